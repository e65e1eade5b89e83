// Blocks of 64 keys and values of a sequence, packed for products: a thread's scratch memory, and
// the packing out of pages.
#pragma once

#include "attention_plan.h"
#include "digits.h"
#include "../scratch.h"

constexpr int64_t kKeys = kGroupColumns, kQueryRows = 64;

// Rows of pages [pages, Hkv, page_size], row_step elements apart. R: the model's dtype, or int8_t
// or Nibbles with scales.
template <class R>
struct Rows {
  const R* data;
  int64_t row_step;
  const bf16* scales;
};

// A layer's keys and values. The first `key_split` values of a key have one scale, the rest (of
// latent attention) another.
template <class R>
struct PageRows {
  Rows<R> keys, values;
  int64_t key_split, scales_per_row;
};

template <class T, class R>
constexpr bool kIsQuantised = !std::is_same_v<T, R>;
template <class R>
constexpr bool kHasZeros = std::is_same_v<R, Nibbles>;
template <class T, class R>
constexpr bool kUsesDigits = HAS_DIGITS && kIsQuantised<T, R> && std::is_same_v<T, bf16>;

// Neighbouring tokens of one sequence that are computed together.
struct TokenBlock {
  int64_t first, count;
  int64_t first_key, last_key;  // the keys that any of them may see: [first_key, last_key)
};

// A thread's scratch memory for one block of rows.
template <class T>
struct Workspace {
  Scratch memory[16];
  uint32_t *keys, *values;        // packed
  float *scores, *sums, *totals;  // [rows, kKeys], [rows, Dv], [rows, 16]
  T* weights;                     // [rows, kKeys]
  float* tops;                    // [rows]: the largest score so far
  // Of quantised rows: the scales of a block, the zeros of 4 bits, and by row the scores of the
  // keys' second part, the sum of the query, and the sum of what the values' zeros add.
  alignas(64) float key_scales[kKeys], key_seconds[kKeys], value_scales[kKeys], value_zeros[kKeys];
  float *second_scores = nullptr, *query_sums = nullptr, *offsets = nullptr;
  // Of digits: queries and weights [rows, 2, ..], and products of weights, not scaled.
  int8_t *query_digits, *weight_digits;
  int32_t* products;
  float *query_scales, *weight_scales;
  int32_t* query_biases;  // [rows, 2]

  // Bytes of a query's digits: two parts, each of them padded.
  static int64_t query_step(const AttentionPlan& p) { return 2 * (p.head_dim + 2 * kLanes); }

  void reserve(const AttentionPlan& p, bool is_quantised) {
    int64_t value_width = panels(p.value_dim) * kLanes;
    keys = memory[0].get<uint32_t>((units<T>(p.head_dim) + 1) * kKeys);
    values = memory[1].get<uint32_t>(units<T>(kKeys) * value_width);
    scores = memory[2].get<float>(kQueryRows * kKeys);
    sums = memory[3].get<float>(kQueryRows * value_width);
    totals = memory[4].get<float>(kQueryRows * kLanes);
    weights = memory[5].get<T>(kQueryRows * kKeys);
    tops = memory[6].get<float>(kQueryRows);
    if (!is_quantised) return;
    second_scores = memory[7].get<float>(kQueryRows * kKeys);
    query_sums = memory[8].get<float>(kQueryRows);
    offsets = memory[9].get<float>(kQueryRows * kLanes);
    query_digits = memory[10].get<int8_t>(kQueryRows * query_step(p));
    weight_digits = memory[11].get<int8_t>(kQueryRows * 2 * kKeys);
    products = memory[12].get<int32_t>(kQueryRows * value_width);
    query_scales = memory[13].get<float>(kQueryRows);
    weight_scales = memory[14].get<float>(kQueryRows);
    query_biases = memory[15].get<int32_t>(kQueryRows * 2);
  }
};

static inline u32x16 value_units(const float* const* rows, int64_t d, int64_t count) {
  return (u32x16)load_up_to(rows[0] + d, count);
}

static inline u32x16 value_units(const bf16* const* rows, int64_t d, int64_t count) {
  return (u32x16)load_up_to(rows[0] + d, count) >> 16 | (u32x16)load_up_to(rows[1] + d, count);
}

// One unit of each of `width` columns, from one or two rows of values.
template <class T>
static inline void pack_values(const T* const* rows, int64_t width, uint32_t* out) {
  int64_t d = 0;
  for (; d + kLanes <= width; d += kLanes) {
    u32x16 v = value_units(rows, d, kLanes);
    memcpy(out + d, &v, sizeof v);
  }
  if (d == width) return;
  u32x16 v = value_units(rows, d, width - d);
  memcpy(out + d, &v, sizeof v);
}

// Up to 64 keys of a sequence and KV head, from position `at`, a multiple of 64.
struct KeyBlock {
  int64_t head, at, count;
};

// Row of the pages where a head's keys from position `at` (a multiple of 16) lie.
static inline int64_t page_row(const AttentionPlan& p, int64_t sequence, int64_t head, int64_t at) {
  int64_t page = p.tables[sequence * p.max_pages + at / p.page_size];
  return (page * p.num_kv_heads + head) * p.page_size + at % p.page_size;
}

template <class R>
static inline void fetch_rows(const Rows<R>& rows, int64_t row, int64_t width, int64_t num_scales) {
  constexpr int64_t kLineBytes = 64;
  const char* first = (const char*)(rows.data + row * rows.row_step);
  const char* last = (const char*)(rows.data + (row + kLanes - 1) * rows.row_step + width);
  for (; first < last; first += kLineBytes) __builtin_prefetch(first);
  if (rows.scales) __builtin_prefetch(rows.scales + row * num_scales);
}

// The first and the second scale of 16 rows; the second are the zeros of 4 bits.
struct ScalePair {
  f32x16 first, second;
};

static inline ScalePair scale_pair(const bf16* scales, int64_t per_row) {
  if (per_row == 1) return {load16(scales), f32x16{}};
  u32x16 both = load_units16((const uint32_t*)scales);
  return {(f32x16)(both << 16), (f32x16)(both & 0xffff0000u)};
}

template <class T, class R>
static inline int64_t key_units(int64_t width) {
  return kUsesDigits<T, R> ? digit_units(width) : units<T>(width);
}

template <class T, class R>
static inline void pack_key_numbers(const int8_t* const* rows, int64_t width, uint32_t* out) {
#if HAS_DIGITS
  if constexpr (kUsesDigits<T, R>) return pack_key_bytes(rows, width, out, kKeys);
#endif
  pack_numbers<T>(rows, width, out, kKeys);
}

// 16 keys and values as whole numbers, and their scales. Scales of values that no row of the token
// block sees are 0: the memory there may hold NaN.
template <class T, class R>
static void pack_quantised(const AttentionPlan& p, Workspace<T>& work, const PageRows<R>& pages,
                           int64_t row, int64_t k, i32x16 is_seen) {
  int64_t width = p.value_dim, value_width = panels(width) * kLanes, split = pages.key_split;
  int8_t room[kLanes][kMaxHeadDim];
  const int8_t* rows[kLanes];
  for (int64_t i = 0; i < kLanes; ++i)
    rows[i] = numbers_of(pages.keys.data + (row + i) * pages.keys.row_step, p.head_dim, room[i]);
  pack_key_numbers<T, R>(rows, split, work.keys + k);
  if (split < p.head_dim) {
    const int8_t* rest[kLanes];
    for (int64_t i = 0; i < kLanes; ++i) rest[i] = rows[i] + split;
    pack_key_numbers<T, R>(rest, p.head_dim - split, work.keys + key_units<T, R>(split) * kKeys + k);
  }
  if ((const void*)pages.values.data != (const void*)pages.keys.data)
    for (int64_t i = 0; i < kLanes; ++i)
      rows[i] = numbers_of(pages.values.data + (row + i) * pages.values.row_step, width, room[i]);
#if HAS_DIGITS
  if constexpr (kUsesDigits<T, R>)
    for (int64_t i = 0; i < kLanes; i += kDigitUnit)
      pack_value_bytes(rows + i, width, work.values + (k + i) / kDigitUnit * value_width);
#endif
  if constexpr (!kUsesDigits<T, R>)
    for (int64_t i = 0; i < kLanes; i += kUnit<T>)
      pack_number_units<T>(rows + i, width, work.values + (k + i) / kUnit<T> * value_width);
  int64_t at = row * pages.scales_per_row;
  ScalePair key = scale_pair(pages.keys.scales + at, pages.scales_per_row);
  ScalePair value = scale_pair(pages.values.scales + at, pages.scales_per_row);
  store16(work.key_scales + k, key.first), store16(work.key_seconds + k, key.second);
  store16(work.value_scales + k, select(is_seen, value.first, f32x16{}));
  store16(work.value_zeros + k, select(is_seen, value.second, f32x16{}));
}

// A block's keys, packed; likewise its values, with 0 for those that no row of the token block
// sees: the memory there may hold NaN. `next` is fetched meanwhile, as pages are scattered.
template <class T, class R>
static void pack_keys_and_values(const AttentionPlan& p, Workspace<T>& work, const TokenBlock& block,
                                 KeyBlock now, KeyBlock next, const PageRows<R>& pages) {
  const Rows<R>&keys = pages.keys, &values = pages.values;
  static const T zeros[kMaxHeadDim] = {};
  int64_t sequence = p.sequences[block.first], width = p.value_dim;
  int64_t value_width = panels(width) * kLanes;
  for (int64_t k = 0; k < std::max(now.count, next.count); k += kLanes) {
    if (k < next.count) {
      int64_t row = page_row(p, sequence, next.head, next.at + k);
      fetch_rows(keys, row, row_size<R>(p.head_dim), pages.scales_per_row);
      if (values.data != keys.data)
        fetch_rows(values, row, row_size<R>(p.value_dim), pages.scales_per_row);
    }
    if (k >= now.count) continue;
    int64_t row = page_row(p, sequence, now.head, now.at + k);
    int64_t first_seen = block.first_key - now.at - k, last_seen = now.count - k;
    if constexpr (kIsQuantised<T, R>) {
      i32x16 is_seen = (lanes() >= (int32_t)first_seen) & (lanes() < (int32_t)last_seen);
      pack_quantised<T>(p, work, pages, row, k, is_seen);
    } else {
      pack_panel(keys.data + row * keys.row_step, keys.row_step, kLanes, p.head_dim, work.keys + k,
                 kKeys);
      for (int64_t i = 0; i < kLanes; i += kUnit<T>) {
        const T* pair[2];
        for (int64_t n = 0; n < kUnit<T>; ++n) {
          bool is_seen = i + n >= first_seen && i + n < last_seen;
          pair[n] = is_seen ? values.data + (row + i + n) * values.row_step : zeros;
        }
        pack_values(pair, width, work.values + (k + i) / kUnit<T> * value_width);
      }
    }
  }
}
