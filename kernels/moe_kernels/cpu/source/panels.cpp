// The register tiles behind every product, and the packing of weights.

#include "panels.h"

// The processor's own vectors, and as many accumulators as fill its registers: 6 x 4 of 32 with
// AVX-512, 6 x 2 of 16 with AVX.
#if defined(__AVX512F__)
constexpr int kWidth = 16, kTileRows = 6, kTilePanels = 4;
#elif defined(__AVX__)
constexpr int kWidth = 8, kTileRows = 6, kTilePanels = 1;
#else
constexpr int kWidth = 4, kTileRows = 3, kTilePanels = 1;
#endif
typedef float Floats __attribute__((vector_size(4 * kWidth)));
typedef uint32_t Units __attribute__((vector_size(4 * kWidth)));
constexpr int kPanelVectors = (int)kLanes / kWidth;

template <class V, class P>
static inline V load(const P* p) {
  V v;
  memcpy(&v, p, sizeof v);
  return v;
}

static inline Floats add_product(Floats sum, uint32_t row, Units column, const float*) {
  float value;
  memcpy(&value, &row, sizeof value);
  return sum + (Floats)column * value;
}

static inline Floats add_product(Floats sum, uint32_t row, Units column, const bf16*) {
#if defined(__AVX512BF16__)
  __m512i pair = _mm512_set1_epi32((int)row);
  return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)pair, (__m512bh)column);
#else
  uint32_t halves[2] = {row << 16, row & 0xffff0000u};
  float even, odd;
  memcpy(&even, &halves[0], sizeof even);
  memcpy(&odd, &halves[1], sizeof odd);
  sum += (Floats)(column << 16) * even;
  return sum + (Floats)(column & 0xffff0000u) * odd;
#endif
}

constexpr int64_t kLineBytes = 64;

// Memory to prefetch while a tile computes: in every unit the next 1, 2 or 4 lines, until the last.
// Each line is requested once: a repeated request would keep others from being fetched.
struct Ahead {
  const char *next, *last;
  int lines;
  inline void fetch() {
    __builtin_prefetch(next);
    if (lines > 1) __builtin_prefetch(next + kLineBytes);
    if (lines > 2) {
      __builtin_prefetch(next + 2 * kLineBytes);
      __builtin_prefetch(next + 3 * kLineBytes);
    }
    next = std::min(next + lines * kLineBytes, last);
  }
};

// MR rows against NV vectors of columns.
template <class T, int MR, int NV>
static void tile(const T* const* rows, int64_t width, const uint32_t* w, int64_t step, float* c,
                 int64_t row_step, bool is_added, Ahead ahead) {
  Floats sums[MR][NV] = {};
  if (is_added)
    for (int m = 0; m < MR; ++m)
      for (int n = 0; n < NV; ++n) sums[m][n] = load<Floats>(c + m * row_step + n * kWidth);
  const T* a[MR];
  for (int m = 0; m < MR; ++m) a[m] = rows[m];
  int64_t whole = width / kUnit<T>;
  for (int64_t u = 0; u < whole; ++u) {
    ahead.fetch();
    Units columns[NV];
#pragma GCC unroll 4
    for (int n = 0; n < NV; ++n) columns[n] = load<Units>(w + n * kWidth);
#pragma GCC unroll 8
    for (int m = 0; m < MR; ++m) {
      uint32_t row;
      memcpy(&row, a[m] + u * kUnit<T>, sizeof row);
#pragma GCC unroll 4
      for (int n = 0; n < NV; ++n)
        sums[m][n] = add_product(sums[m][n], row, columns[n], (const T*)nullptr);
    }
    w += step;
  }
  if (whole * kUnit<T> < width)
    for (int m = 0; m < MR; ++m)
      for (int n = 0; n < NV; ++n)
        sums[m][n] = add_product(sums[m][n], load_unit(a[m] + width - 1, 1),
                                 load<Units>(w + n * kWidth), (const T*)nullptr);
  for (int m = 0; m < MR; ++m)
    for (int n = 0; n < NV; ++n)
      memcpy(c + m * row_step + n * kWidth, &sums[m][n], sizeof(Floats));
}

template <class T>
using Tile = void (*)(const T* const*, int64_t, const uint32_t*, int64_t, float*, int64_t, bool,
                      Ahead);

template <class T, int MR>
static constexpr Tile<T> tile_of(int64_t num_panels) {
#if defined(__AVX512F__)
  if (num_panels == 4) return tile<T, MR, 4>;
  if (num_panels == 3) return tile<T, MR, 3>;
  if (num_panels == 2) return tile<T, MR, 2>;
#endif
  return tile<T, MR, kPanelVectors>;
}

template <class T>
static Tile<T> tile_of(int64_t num_rows, int64_t num_panels) {
  switch (num_rows) {
#if defined(__AVX__)
    case 6: return tile_of<T, 6>(num_panels);
    case 5: return tile_of<T, 5>(num_panels);
    case 4: return tile_of<T, 4>(num_panels);
#endif
    case 3: return tile_of<T, 3>(num_panels);
    case 2: return tile_of<T, 2>(num_panels);
    default: return tile_of<T, 1>(num_panels);
  }
}

constexpr int64_t kUnitsAhead = 16;

template <class T>
void multiply_rows(const T* const* rows, int64_t num_rows, int64_t width, const uint32_t* w,
                   int64_t step, int64_t num_panels, float* c, int64_t row_step, bool is_added,
                   Prefetch next) {
  int64_t num_tiles = (num_rows + kTileRows - 1) / kTileRows;
  int64_t share = next.bytes / num_tiles, pass = kLineBytes * units<T>(width);
  int64_t lines = (share + pass - 1) / pass;
  for (int64_t n = 0; n < num_panels; n += kTilePanels) {
    int64_t wide = std::min<int64_t>(kTilePanels, num_panels - n);
    for (int64_t i = 0, m = 0; i < num_tiles; ++i) {  // tiles as equal as can be
      int64_t count = (num_rows - m + num_tiles - i - 1) / (num_tiles - i);
      const uint32_t* columns = w + n * kLanes;
      const char* own = (const char*)(columns + kUnitsAhead * step);
      Ahead ahead{own, own + 4 * step * units<T>(width), 4};
      if (next.bytes)
        ahead = {next.data + share * i, next.data + share * (i + 1), (int)std::min<int64_t>(lines, 4)};
      tile_of<T>(count, wide)(rows + m, width, columns, step, c + m * row_step + n * kLanes,
                              row_step, is_added, ahead);
      m += count;
    }
  }
}

template void multiply_rows(const float* const*, int64_t, int64_t, const uint32_t*, int64_t,
                            int64_t, float*, int64_t, bool, Prefetch);
template void multiply_rows(const bf16* const*, int64_t, int64_t, const uint32_t*, int64_t,
                            int64_t, float*, int64_t, bool, Prefetch);

constexpr int64_t kBlock = 128;  // values of k that are made contiguous at a time

// 16 columns of the result whose values of k do not lie together: block by block through `rows`.
template <class T>
static void pack_scattered(const T* source, int64_t row_step, int64_t column_step, int64_t count,
                           int64_t width, uint32_t* out, int64_t step) {
  T rows[kLanes * kBlock] = {};
  for (int64_t k = 0; k < width; k += kBlock) {
    int64_t wide = std::min(kBlock, width - k);
    for (int64_t j = 0; j < wide; ++j) {
      const T* from = source + (k + j) * column_step;
      for (int64_t i = 0; i < count; ++i) rows[i * kBlock + j] = from[i * row_step];
    }
    pack_panel(rows, kBlock, kLanes, wide, out + k / kUnit<T> * step, step);
  }
}

// A matrix [N, K] with any distances between rows and between columns, into panels first,
// first + stride, first + 2 stride ... of a packed matrix of num_panels.
template <class T>
static void pack(const T* source, int64_t row_step, int64_t column_step, int64_t num_rows,
                 int64_t width, uint32_t* packed, int64_t first, int64_t stride,
                 int64_t num_panels) {
  for (int64_t r = 0, panel = first; r < num_rows; r += kLanes, panel += stride) {
    Group g = group_of<T>(packed, num_panels, panel / kGroupPanels, width);
    int64_t step = g.panels * kLanes, count = std::min(kLanes, num_rows - r);
    uint32_t* out = const_cast<uint32_t*>(g.data) + panel % kGroupPanels * kLanes;
    const T* from = source + r * row_step;
    if (column_step == 1) pack_panel(from, row_step, count, width, out, step);
    else pack_scattered(from, row_step, column_step, count, width, out, step);
  }
}

#define EXPORT(T, suffix)                                                                         \
  void moe_pack_##suffix(const T* source, int64_t row_step, int64_t column_step,                  \
                         int64_t num_rows, int64_t width, uint32_t* packed, int64_t first,        \
                         int64_t stride, int64_t num_panels) {                                    \
    pack<T>(source, row_step, column_step, num_rows, width, packed, first, stride, num_panels);   \
  }

extern "C" {
EXPORT(bf16, bf16)
EXPORT(float, f32)
}
