// Packed matrices, and products of rows with them.
//
// A matrix [N, K] is cut into panels of 16 rows of it (columns of the result). Along k, a panel
// holds one *unit* of 32 bits of each of its 16 rows at a time: one float, or two bf16. Four
// neighbouring panels make a group, which lies in memory as [units of k][panels][16] and so is read
// from front to back by the product. The last group may have fewer panels; the
// missing rest of the last panel or unit is zero.
//
// Row invariance is decided here. A result adds its terms from k = 0 to the last in one chain of
// its own, in one lane of one register: the tile that it is part of does not matter, nor whether
// the chain is put down in between.
#pragma once

#include <algorithm>

#include "vectors.h"

constexpr int64_t kLanes = 16, kGroupPanels = 4, kGroupColumns = kLanes * kGroupPanels;

template <class T>
constexpr int64_t kUnit = 4 / (int64_t)sizeof(T);  // values of k in one unit

template <class T>
static inline int64_t units(int64_t width) {
  return (width + kUnit<T> - 1) / kUnit<T>;
}

static inline int64_t panels(int64_t columns) { return (columns + kLanes - 1) / kLanes; }

struct Group {  // one group of a packed matrix
  const uint32_t* data;
  int64_t panels;
};

template <class T>
static inline Group group_of(const uint32_t* packed, int64_t num_panels, int64_t group,
                             int64_t width) {
  return {packed + group * kGroupColumns * units<T>(width),
          std::min(kGroupPanels, num_panels - group * kGroupPanels)};
}

static inline int64_t groups(int64_t num_panels) {
  return (num_panels + kGroupPanels - 1) / kGroupPanels;
}

// c[m][0 .. 16 panels) = (is_added ? c : 0) + rows[m] . columns, for num_rows rows of `width`
// values. `step`: distance of two units of w, 16 times the panels of its group.
// `next`: memory to prefetch on the way; without it, w itself is prefetched some units ahead.
struct Prefetch {
  const char* data = nullptr;
  int64_t bytes = 0;
};

template <class T>
void multiply_rows(const T* const* rows, int64_t num_rows, int64_t width, const uint32_t* w,
                   int64_t step, int64_t num_panels, float* c, int64_t row_step, bool is_added,
                   Prefetch next = {});

template <class T>
static inline uint32_t load_unit(const T* p, int64_t count) {  // 1 .. kUnit values
  uint32_t unit = 0;
  memcpy(&unit, p, std::min(count, kUnit<T>) * sizeof(T));
  return unit;
}

// 16 rows of [.., width], each `row_step` after the last, as one panel: unit u goes to
// out[u * step .. + 16). The rows from num_rows on are zero.
template <class T>
static void pack_panel(const T* rows, int64_t row_step, int64_t num_rows, int64_t width,
                       uint32_t* out, int64_t step) {
  int64_t u = 0, whole = width / kUnit<T>;
  for (; u + kLanes <= whole && num_rows == kLanes; u += kLanes) {
    u32x16 x[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i)
      memcpy(&x[i], rows + i * row_step + u * kUnit<T>, sizeof x[i]);
    transpose16(x);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) memcpy(out + (u + i) * step, &x[i], sizeof x[i]);
  }
  for (; u < units<T>(width); ++u)
    for (int64_t i = 0; i < kLanes; ++i)
      out[u * step + i] =
          i < num_rows ? load_unit(rows + i * row_step + u * kUnit<T>, width - u * kUnit<T>) : 0;
}

// All rows against one group: row(m) is where row m begins, store(m, c) gets its sums, 16 for each
// panel. With rows for several tiles, `next`, the thread's next group, is fetched meanwhile.
template <class T, class Row, class Store>
static void multiply_group(Group g, const uint32_t* next, int64_t width, int64_t num_rows,
                           const Row& row, const Store& store) {
  constexpr int64_t kChunk = 24;
  alignas(64) float c[kChunk * kGroupColumns];
  const T* rows[kChunk];
  int64_t bytes = g.panels * kLanes * units<T>(width) * sizeof(uint32_t);
  if (!next) bytes = 0;
  int64_t chunks = (num_rows + kChunk - 1) / kChunk;
  Prefetch ahead{(const char*)next, 0};
  for (int64_t m = 0; chunks; --chunks) {
    int64_t count = (num_rows - m + chunks - 1) / chunks;
    ahead.bytes = bytes / chunks;
    for (int64_t i = 0; i < count; ++i) rows[i] = row(m + i);
    multiply_rows(rows, count, width, g.data, g.panels * kLanes, g.panels, c, kGroupColumns,
                  false, ahead);
    for (int64_t i = 0; i < count; ++i) store(m + i, c + i * kGroupColumns);
    m += count, ahead.data += ahead.bytes, bytes -= ahead.bytes;
  }
}

// How many neighbouring groups make a job: few enough to share the work out, and several, so that
// a thread mostly fetches ahead its own groups.
static inline int64_t groups_per_job(int64_t num_groups, int64_t threads) {
  constexpr int64_t kMost = 4, kJobsPerThread = 6;
  return std::clamp<int64_t>(num_groups / (threads * kJobsPerThread), 1, kMost);
}

// How many rows of `width` values stay in a core's cache while a job's groups pass by.
template <class T>
static inline int64_t row_block(int64_t width) {
  constexpr int64_t kCacheBytes = 384 * 1024, kRows = 24;
  return std::max<int64_t>(1, kCacheBytes / (kRows * width * (int64_t)sizeof(T))) * kRows;
}
