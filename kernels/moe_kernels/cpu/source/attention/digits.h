// Products of whole numbers, exact: queries and weights as two digits of a byte, keys and values as
// they lie in their pages.
//
// A query is rounded to 16 bits by its largest value, q = (256 high + low) * scale with digits in
// [-128, 127]; a row's weights in a block likewise, with digits in [0, 255]. That is finer than
// bf16. Sums of such products are exact in 32 bits, so no order of summing can show. They need
// instructions for bytes (VNNI); without them, whole numbers are multiplied as bf16.
#pragma once

#include "kv_rows.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define HAS_DIGITS 1
#else
#define HAS_DIGITS 0
#endif

constexpr int64_t kDigitUnit = 4;  // values of k in 32 bits

static inline int64_t digit_units(int64_t width) { return (width + kDigitUnit - 1) / kDigitUnit; }

// Two digits of `width` values each, padded with zeros to whole units.
struct DigitRow {
  const int8_t *high, *low;
};

#if HAS_DIGITS
// IS_KEYS: columns are unsigned and rows signed; else the other way round.
template <bool IS_KEYS>
static inline __m512i add_bytes(__m512i sum, __m512i columns, __m512i row) {
  return IS_KEYS ? _mm512_dpbusd_epi32(sum, columns, row) : _mm512_dpbusd_epi32(sum, row, columns);
}

template <bool IS_KEYS, int MR, int NV>
static void digit_tile(const DigitRow* rows, int64_t num_units, const uint32_t* w, int64_t step,
                       int32_t* c, int64_t row_step) {
  __m512i high[MR][NV] = {}, low[MR][NV] = {};
  for (int64_t u = 0; u < num_units; ++u, w += step) {
    __m512i columns[NV];
#pragma GCC unroll 4
    for (int n = 0; n < NV; ++n) columns[n] = _mm512_loadu_si512(w + n * kLanes);
#pragma GCC unroll 3
    for (int m = 0; m < MR; ++m) {
      int32_t digits[2];
      memcpy(&digits[0], rows[m].high + u * kDigitUnit, sizeof digits[0]);
      memcpy(&digits[1], rows[m].low + u * kDigitUnit, sizeof digits[1]);
      __m512i row_high = _mm512_set1_epi32(digits[0]), row_low = _mm512_set1_epi32(digits[1]);
#pragma GCC unroll 4
      for (int n = 0; n < NV; ++n) {
        high[m][n] = add_bytes<IS_KEYS>(high[m][n], columns[n], row_high);
        low[m][n] = add_bytes<IS_KEYS>(low[m][n], columns[n], row_low);
      }
    }
  }
  for (int m = 0; m < MR; ++m)
    for (int n = 0; n < NV; ++n)
      _mm512_storeu_si512(c + m * row_step + n * kLanes,
                          _mm512_add_epi32(_mm512_slli_epi32(high[m][n], 8), low[m][n]));
}

template <bool IS_KEYS, int MR>
static void digit_panels(const DigitRow* rows, int64_t num_units, const uint32_t* w, int64_t step,
                         int64_t num_panels, int32_t* c, int64_t row_step) {
  int64_t n = 0;
  for (; n + 4 <= num_panels; n += 4)
    digit_tile<IS_KEYS, MR, 4>(rows, num_units, w + n * kLanes, step, c + n * kLanes, row_step);
  for (; n < num_panels; ++n)
    digit_tile<IS_KEYS, MR, 1>(rows, num_units, w + n * kLanes, step, c + n * kLanes, row_step);
}

// c[m][0 .. 16 panels) = rows[m] . columns, w as the packing below leaves it.
template <bool IS_KEYS>
static void multiply_digits(const DigitRow* rows, int64_t num_rows, int64_t num_units,
                            const uint32_t* w, int64_t step, int64_t num_panels, int32_t* c,
                            int64_t row_step) {
  int64_t m = 0;
  auto at = [&](auto&& function, int64_t count) {
    function(rows + m, num_units, w, step, num_panels, c + m * row_step, row_step);
    m += count;
  };
  while (num_rows - m >= 3) at(digit_panels<IS_KEYS, 3>, 3);
  if (num_rows - m == 2) at(digit_panels<IS_KEYS, 2>, 2);
  if (num_rows - m == 1) at(digit_panels<IS_KEYS, 1>, 1);
}

static inline __m512i load_bytes(const int8_t* row, int64_t count) {
  if (count >= 64) return _mm512_loadu_si512(row);
  return _mm512_maskz_loadu_epi8(((__mmask64)1 << count) - 1, row);
}

// 16 keys as columns: unit u of each at out[u * step .. + 16), 128 being added to every number.
static inline void pack_key_bytes(const int8_t* const* rows, int64_t width, uint32_t* out,
                                  int64_t step) {
  const __m512i half = _mm512_set1_epi8((char)0x80);
  for (int64_t at = 0; at < width; at += 64) {
    int64_t count = std::min<int64_t>(64, width - at);
    u32x16 x[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i)
      x[i] = (u32x16)_mm512_xor_si512(load_bytes(rows[i] + at, count), half);
    transpose16(x);
    uint32_t* to = out + at / kDigitUnit * step;
    if (count == 64) {
#pragma GCC unroll 16
      for (int j = 0; j < kLanes; ++j) memcpy(to + j * step, &x[j], sizeof x[j]);
    } else {
      for (int64_t j = 0; j < digit_units(count); ++j) memcpy(to + j * step, &x[j], sizeof x[j]);
    }
  }
}

// Four values as one unit of each of `width` columns, the rest of the last panel being zero.
static inline void pack_value_bytes(const int8_t* const* rows, int64_t width, uint32_t* out) {
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  for (int64_t at = 0; at < width; at += 64) {
    __m512i r[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
      r[i] = _mm512_permutexvar_epi32(order, load_bytes(rows[i] + at, width - at));
    __m512i a = _mm512_unpacklo_epi8(r[0], r[1]), b = _mm512_unpacklo_epi8(r[2], r[3]);
    __m512i c = _mm512_unpackhi_epi8(r[0], r[1]), d = _mm512_unpackhi_epi8(r[2], r[3]);
    __m512i columns[4] = {_mm512_unpacklo_epi16(a, b), _mm512_unpackhi_epi16(a, b),
                          _mm512_unpacklo_epi16(c, d), _mm512_unpackhi_epi16(c, d)};
    for (int n = 0; n < 4 && at + n * kLanes < width; ++n)
      _mm512_storeu_si512(out + at + n * kLanes, columns[n]);
  }
}

typedef uint8_t u8x16 __attribute__((vector_size(16)));

static inline void put_digits(i32x16 high, i32x16 low, int8_t* to_high, int8_t* to_low) {
  u8x16 h = __builtin_convertvector(high, u8x16), l = __builtin_convertvector(low, u8x16);
  memcpy(to_high, &h, sizeof h), memcpy(to_low, &l, sizeof l);
}

struct QueryDigits {
  float scale;
  int32_t biases[2];  // what the added 128 adds to a product with either part of the keys
};

// A query's digits: part after part, each padded to whole panels of 16. Its sums stay in 32 bits.
template <class T>
static inline QueryDigits put_query(const T* q, int64_t width, int64_t split, int8_t* high,
                                    int8_t* low) {
  f32x16 most = {}, zero = {};
  for (int64_t d = 0; d < width; d += kLanes) {
    f32x16 v = load_up_to(q + d, width - d);
    most = maximum(v, maximum(-v, most)), zero += v - v;
  }
  float top = largest(most), limit = std::max(split, width - split) <= 512 ? 32639.0f : 16319.0f;
  bool is_usable = fold(zero) == 0 && top > 1e-30f;
  QueryDigits found{fold(zero) != 0 ? NAN : is_usable ? top / limit : 0.0f, {0, 0}};
  float factor = is_usable ? limit / top : 0.0f;
  for (int part = 0; part < 2; ++part) {
    int64_t from = part ? split : 0, to = part ? width : split;
    i32x16 sum = {};
    for (int64_t d = from; d < to; d += kLanes, high += kLanes, low += kLanes) {
      f32x16 x = is_usable ? load_up_to(q + d, to - d) * factor : f32x16{};
      i32x16 v = to_ints(round16(x));
      i32x16 least = ((v + 128) & 255) - 128;
      put_digits((v - least) >> 8, least, high, low);
      sum += v;
    }
    for (int i = 0; i < kLanes; ++i) found.biases[part] += 128 * sum[i];
  }
  return found;
}

// The weights of a row and block, as digits -> their scale. NaN and infinity give the scale NaN.
template <int PANELS>
static inline float put_weights(const f32x16* w, int8_t* high, int8_t* low) {
  f32x16 most = {}, zero = {};
#pragma GCC unroll 4
  for (int n = 0; n < PANELS; ++n) most = maximum(w[n], most), zero += w[n] - w[n];
  float top = largest(most);
  if (fold(zero) != 0) return NAN;
  bool is_usable = top > 1e-30f;
  float factor = is_usable ? 65535.0f / top : 0.0f;
#pragma GCC unroll 4
  for (int n = 0; n < PANELS; ++n) {
    i32x16 v = to_ints(round16(w[n] * factor));
    put_digits(v >> 8, v & 255, high + n * kLanes, low + n * kLanes);
  }
  return is_usable ? top / 65535.0f : 0.0f;
}
#endif
