// Sixteen floats at a time, in GCC's vector extensions: any processor, one source.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__clang__)
#error "build with g++: __builtin_shuffle with a mask vector is GCC's"
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

// v as if it had been stored in T.
static inline f32x16 round_to(const float*, f32x16 v) { return v; }
static inline f32x16 round_to(const bf16*, f32x16 v) {
  bf16 h[16];
  store16(h, v);
  return load16(h);
}

// The lanes' sum, first to last.
static inline float fold(f32x16 v) {
  float sum = 0;
  for (int i = 0; i < 16; ++i) sum += v[i];
  return sum;
}

static inline float largest(f32x16 v) {
  f32x16 m = maximum(v, __builtin_shuffle(v, i32x16{8, 9, 10, 11, 12, 13, 14, 15}));
  m = maximum(m, __builtin_shuffle(m, i32x16{4, 5, 6, 7}));
  m = maximum(m, __builtin_shuffle(m, i32x16{2, 3}));
  return m[0] > m[1] ? m[0] : m[1];
}

