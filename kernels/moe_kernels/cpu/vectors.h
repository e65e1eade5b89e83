// Sixteen floats at a time, in GCC/Clang vector extensions: any processor, one source.
//
// Row invariance is decided here. A dot product adds its terms in one order, whatever tile it is
// part of: sixteen lanes run along k, and the lanes are folded by distances 8, 4, 2, 1.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#include <immintrin.h>
#endif

using bf16 = uint16_t;
typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

static inline f32x16 splat(float value) { return f32x16{} + value; }

static inline f32x16 load16(const float* p) {
  f32x16 v;
  memcpy(&v, p, sizeof v);
  return v;
}

static inline f32x16 load16(const bf16* p) {
  u16x16 h;
  memcpy(&h, p, sizeof h);
  return (f32x16)(__builtin_convertvector(h, u32x16) << 16);
}

static inline void store16(float* p, f32x16 v) { memcpy(p, &v, sizeof v); }

// Round to nearest even; a NaN stays a NaN.
static inline void store16(bf16* p, f32x16 v) {
  u32x16 bits = (u32x16)v;
  u32x16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  u32x16 nan = (bits >> 16) | 0x40;
  i32x16 is_nan = v != v;
  u32x16 chosen = ((u32x16)is_nan & nan) | (~(u32x16)is_nan & rounded);
  u16x16 h = __builtin_convertvector(chosen, u16x16);
  memcpy(p, &h, sizeof h);
}

template <class T>
static inline f32x16 load_some(const T* p, int64_t count) {
  T padded[16] = {};
  memcpy(padded, p, count * sizeof(T));
  return load16(padded);
}

template <class T>
static inline void store_some(T* p, f32x16 v, int64_t count) {
  T padded[16];
  store16(padded, v);
  memcpy(p, padded, count * sizeof(T));
}

template <class T>
static inline f32x16 load_up_to(const T* p, int64_t count) {
  return count >= 16 ? load16(p) : load_some(p, count);
}

template <class T>
static inline void store_up_to(T* p, f32x16 v, int64_t count) {
  if (count >= 16) store16(p, v);
  else store_some(p, v, count);
}

static inline f32x16 select(i32x16 mask, f32x16 yes, f32x16 no) {
  return (f32x16)((mask & (i32x16)yes) | (~mask & (i32x16)no));
}

static inline f32x16 maximum(f32x16 a, f32x16 b) { return select(a > b, a, b); }

// exp(x), about 1 ulp (Cephes' expf): 2^n times a polynomial of the rest. -inf gives 0, NaN stays.
static inline f32x16 exp16(f32x16 x) {
  f32x16 clamped = select(x < splat(-87.3f), splat(-87.3f), x);
  clamped = select(clamped > splat(88.0f), splat(88.0f), clamped);
  f32x16 shifted = clamped * 1.44269504f + 12582912.0f;  // rounds to an integer in the low bits
  i32x16 n = (i32x16)shifted - 0x4b400000;
  f32x16 whole = shifted - 12582912.0f;
  f32x16 r = clamped - whole * 0.693359375f + whole * 2.12194440e-4f;
  f32x16 poly = splat(1.9875691500e-4f);
  poly = poly * r + 1.3981999507e-3f;
  poly = poly * r + 8.3334519073e-3f;
  poly = poly * r + 4.1665795894e-2f;
  poly = poly * r + 1.6666665459e-1f;
  poly = poly * r + 5.0000001201e-1f;
  f32x16 result = (poly * r * r + r + 1.0f) * (f32x16)((n + 127) << 23);
  result = select(x < splat(-87.3f), splat(0.0f), result);
  return select(x == x, result, x);
}

static inline f32x16 silu16(f32x16 x) { return x / (1.0f + exp16(-x)); }

#define FOLD(x, y, lo, hi) (__builtin_shuffle(x, y, lo) + __builtin_shuffle(x, y, hi))
#if defined(__clang__)
#error "build with g++: __builtin_shuffle with a mask vector is GCC's"
#endif

// Sums of the lanes of sixteen vectors, as one vector: lane i is the sum of v[i].
static inline f32x16 sum_lanes(const f32x16* v) {
  static const int reversed[16] = {0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15};
  const i32x16 lo8 = {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23};
  const i32x16 lo4 = {0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27};
  const i32x16 lo2 = {0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29};
  const i32x16 lo1 = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
  f32x16 a[8], b[4], c[2];
  for (int i = 0; i < 8; ++i) a[i] = FOLD(v[reversed[i]], v[reversed[i + 8]], lo8, lo8 + 8);
  for (int i = 0; i < 4; ++i) b[i] = FOLD(a[i], a[i + 4], lo4, lo4 + 4);
  for (int i = 0; i < 2; ++i) c[i] = FOLD(b[i], b[i + 2], lo2, lo2 + 2);
  return FOLD(c[0], c[1], lo1, lo1 + 1);
}

// How two rows meet along k: the widest multiply-add that the processor has for the type.
template <class T>
struct Dot {
  static constexpr int step = 16;
  using Vector = f32x16;
  static inline Vector load(const T* p) { return load16(p); }
  static inline Vector load_tail(const T* p, int64_t count) { return load_some(p, count); }
  static inline f32x16 add(f32x16 sum, Vector a, Vector b) { return sum + a * b; }
};

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
template <>
struct Dot<bf16> {
  static constexpr int step = 32;
  using Vector = __m512bh;
  static inline Vector load(const bf16* p) { return (__m512bh)_mm512_loadu_si512(p); }
  static inline Vector load_tail(const bf16* p, int64_t count) {
    return (__m512bh)_mm512_maskz_loadu_epi16((__mmask32)((1ull << count) - 1), p);
  }
  static inline f32x16 add(f32x16 sum, Vector a, Vector b) {
    return (f32x16)_mm512_dpbf16_ps((__m512)sum, a, b);
  }
};
#endif
