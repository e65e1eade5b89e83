// Rows of keys and values in pages: in the model's dtype, or as whole numbers with scales.
//
// A quantised row is `whole numbers * scale`, in 4 bits `(whole number - 8) * scale + zero`; scales
// and zeros are bf16. It is quantised by itself when it is written, so the bytes of a page depend
// on its own tokens only. Whole numbers up to 127 are exact in bf16: the products read them as they
// are, and scales are applied to the sums. moe_kernels/reference/torch_kv_rows.py is the definition.
#pragma once

#include <cmath>

#include "../panels.h"

constexpr int64_t kMaxHeadDim = 1024;

struct KVPages {  // mirrored in native_attention.py
  void *keys, *values;              // rows of pages [pages, Hkv, page_size]
  bf16 *key_scales, *value_scales;  // [.., scales_per_row], or null
  int64_t bits, scales_per_row;     // bits: 0 stands for rows in the model's dtype
  int64_t rotation;                 // width of the Hadamard matrices of queries and keys, 0: none
};

struct Nibbles {  // two numbers of a row: that of its first half in the low bits
  uint8_t byte;
};

static inline float wide(bf16 value) {
  uint32_t bits = (uint32_t)value << 16;
  float wide;
  memcpy(&wide, &bits, sizeof wide);
  return wide;
}

static inline float put_scale(bf16* to, float value) {  // the rounded value
  store_up_to(to, splat(value), 1);
  return wide(*to);
}

// Multiplies each block of `block` values by the orthonormal Hadamard matrix, in place.
static inline void hadamard(float* x, int64_t width, int64_t block) {
  for (int64_t half = 1; half < block; half *= 2)
    for (int64_t at = 0; at < width; at += 2 * half)
      for (int64_t i = at; i < at + half; ++i) {
        float a = x[i], b = x[i + half];
        x[i] = a + b, x[i + half] = a - b;
      }
  float factor = 1.0f / std::sqrt((float)block);
  for (int64_t i = 0; i < width; ++i) x[i] *= factor;
}

constexpr float kLeastMagnitude = 7.8886090522101181e-31f;  // 2^-100: rows below it are zeros

struct RowRange {
  float least, most;
  bool is_finite;
};

static inline RowRange range_of(const float* x, int64_t width) {
  f32x16 least = splat(INFINITY), most = splat(-INFINITY), zero = {};
  for (int64_t d = 0; d < width; d += 16) {
    f32x16 v = load_up_to(x + d, width - d);
    if (width - d < 16) v = select(lanes() < (int32_t)(width - d), v, splat(x[0]));
    least = -maximum(-v, -least), most = maximum(v, most), zero += v - v;
  }
  return {-largest(-least), largest(most), fold(zero) == 0};
}

// The whole numbers nearest to (x - zero) / scale, within [least, most] once `shift` is added.
static inline void put_numbers(const float* x, int64_t width, float scale, float zero, float shift,
                               float least, float most, int8_t* out) {
  for (int64_t d = 0; d < width; d += 16) {
    int64_t count = std::min<int64_t>(16, width - d);
    f32x16 v = (load_up_to(x + d, count) - zero) / scale;
    v = clamp_nan_stays(round16(v) + shift, least, most);
    i8x16 numbers = to_bytes(to_ints(v));
    memcpy(out + d, &numbers, count);
  }
}

// One row of `width` values. A row with a NaN or an infinity has the scale NaN.
static inline void store_quantised(const float* x, int64_t width, int8_t* out, bf16* scales) {
  RowRange range = range_of(x, width);
  float most = std::max(-range.least, range.most);
  bool is_usable = range.is_finite && most >= kLeastMagnitude;
  float scale = put_scale(scales, is_usable ? most / 127.0f : range.is_finite ? 0.0f : NAN);
  if (is_usable) put_numbers(x, width, scale, 0.0f, 0.0f, -127.0f, 127.0f, out);
  else memset(out, 0, width);
}

static inline void store_quantised(const float* x, int64_t width, Nibbles* out, bf16* scales) {
  RowRange range = range_of(x, width);
  float spread = range.most - range.least;
  bool is_finite = range.is_finite && spread <= 3.4028234663852886e38f;
  bool is_usable = is_finite && spread >= kLeastMagnitude;
  float scale = put_scale(scales, is_usable ? spread / 15.0f : is_finite ? 0.0f : NAN);
  float zero = put_scale(scales + 1, is_finite ? range.least + 8.0f * scale : NAN);
  int8_t numbers[kMaxHeadDim];
  if (is_usable) put_numbers(x, width, scale, zero, 8.0f, 0.0f, 15.0f, numbers);
  else memset(numbers, 8, width);
  for (int64_t d = 0; d < width / 2; ++d)
    out[d].byte = (uint8_t)(numbers[d] | numbers[d + width / 2] << 4);
}

template <class R>
static inline int64_t row_size(int64_t width) {  // elements of a row
  return std::is_same_v<R, Nibbles> ? width / 2 : width;
}

// A row's whole numbers, less 8 if they have 4 bits. `room` may be where they are put.
static inline const int8_t* numbers_of(const int8_t* row, int64_t, int8_t*) { return row; }
static inline const int8_t* numbers_of(const Nibbles* row, int64_t width, int8_t* room) {
  int64_t half = width / 2;
  for (int64_t d = 0; d < half; ++d) room[d] = (int8_t)((row[d].byte & 15) - 8);
  for (int64_t d = 0; d < half; ++d) room[half + d] = (int8_t)((row[d].byte >> 4) - 8);
  return room;
}

static inline u32x16 float_bits(i32x16 numbers) {
  return (u32x16)to_floats(numbers);
}

// Byte `k` of each lane as bits of a float.
static inline u32x16 byte_bits(u32x16 four, int k) {
  return float_bits((i32x16)(four << (24 - 8 * k)) >> 24);
}

// 16 rows of whole numbers as one panel of units of T, as pack_panel does of rows of T.
template <class T>
static void pack_numbers(const int8_t* const* rows, int64_t width, uint32_t* out, int64_t step) {
  for (int64_t at = 0; at < width; at += 64) {
    int64_t count = std::min<int64_t>(64, width - at);
    u32x16 x[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      if (count == 64) memcpy(&x[i], rows[i] + at, 64);
      else x[i] = u32x16{}, memcpy(&x[i], rows[i] + at, count);
    }
    transpose16(x);
    auto put = [&](int64_t unit, u32x16 v) {
      if (unit * kUnit<T> < width) memcpy(out + unit * step, &v, sizeof v);
    };
#pragma GCC unroll 16
    for (int64_t j = 0; j < kLanes; ++j) {  // four columns
      u32x16 b[4];
#pragma GCC unroll 4
      for (int k = 0; k < 4; ++k) b[k] = byte_bits(x[j], k);
      int64_t unit = (at + 4 * j) / kUnit<T>;
      if constexpr (kUnit<T> == 2) {
        put(unit, b[0] >> 16 | b[1]), put(unit + 1, b[2] >> 16 | b[3]);
      } else {
        put(unit, b[0]), put(unit + 1, b[1]), put(unit + 2, b[2]), put(unit + 3, b[3]);
      }
    }
  }
}

static inline u32x16 number_bits(const int8_t* row, int64_t count) {
  i8x16 numbers = {};
  if (count >= 16) memcpy(&numbers, row, 16);
  else memcpy(&numbers, row, count);
  return float_bits(signed_bytes(numbers));
}

// One unit of each of `width` columns, from one or two rows of whole numbers.
template <class T>
static inline void pack_number_units(const int8_t* const* rows, int64_t width, uint32_t* out) {
  for (int64_t d = 0; d < width; d += kLanes) {
    u32x16 v = number_bits(rows[0] + d, width - d);
    if constexpr (kUnit<T> == 2) v = v >> 16 | number_bits(rows[1] + d, width - d);
    memcpy(out + d, &v, sizeof v);
  }
}
