// Sixteen floats at a time, in GCC's vector extensions: any processor, one source. Operations
// that GCC compiles to poor code have a second version in AVX-512 intrinsics (vectors_avx512.h).
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

typedef float f32x8 __attribute__((vector_size(32)));
typedef double f64x8 __attribute__((vector_size(64)));

static inline f32x16 splat(float value) { return f32x16{} + value; }

static inline f32x16 select(i32x16 mask, f32x16 yes, f32x16 no) { return mask ? yes : no; }

static inline f32x16 load16(const float* p) {
  f32x16 v;
  memcpy(&v, p, sizeof v);
  return v;
}

static inline void store16(float* p, f32x16 v) { memcpy(p, &v, sizeof v); }

static inline f64x8 load8_wide(const float* p) {
  f32x8 v;
  memcpy(&v, p, sizeof v);
  return __builtin_convertvector(v, f64x8);
}

static inline void store8(double* p, f64x8 v) { memcpy(p, &v, sizeof v); }

static inline void store8(float* p, f64x8 v) {  // rounded
  f32x8 narrow = __builtin_convertvector(v, f32x8);
  memcpy(p, &narrow, sizeof narrow);
}

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include "vectors_avx512.h"
#else
#include "vectors_generic.h"
#endif

template <class T>
static inline f32x16 load_up_to(const T* p, int64_t count) {
  return count >= 16 ? load16(p) : load_some(p, count);
}

template <class T>
static inline void store_up_to(T* p, f32x16 v, int64_t count) {
  if (count >= 16) store16(p, v);
  else store_some(p, v, count);
}

// exp(x), about 1 ulp (Cephes' expf): 2^n times a polynomial of the rest. Far below -87 it is 0 (so
// exp(-inf) = 0), above 88 it is exp(88); NaN stays.
static inline f32x16 exp16(f32x16 x) {
  x = clamp_nan_stays(x, -200.0f, 88.0f);
  f32x16 n = round16(x * 1.44269504f);
  f32x16 r = multiply_add(n, splat(-0.693359375f), x);
  r = multiply_add(n, splat(2.12194440e-4f), r);
  f32x16 poly = splat(1.9875691500e-4f);
  poly = multiply_add(poly, r, splat(1.3981999507e-3f));
  poly = multiply_add(poly, r, splat(8.3334519073e-3f));
  poly = multiply_add(poly, r, splat(4.1665795894e-2f));
  poly = multiply_add(poly, r, splat(1.6666665459e-1f));
  poly = multiply_add(poly, r, splat(5.0000001201e-1f));
  return scale_by_power(multiply_add(poly, r * r, r + 1.0f), n);
}

// Store, and return the stored value.
static inline f32x16 store_rounded(float* p, f32x16 v) {
  store16(p, v);
  return v;
}

// v as if it had been stored in T.
static inline f32x16 round_to(const float*, f32x16 v) { return v; }
static inline f32x16 round_to(const bf16*, f32x16 v) {
  bf16 h[16];
  store16(h, v);
  return load16(h);
}

static inline f32x16 upper_half(f32x16 v) {
  return __builtin_shuffle(v, i32x16{8, 9, 10, 11, 12, 13, 14, 15});
}

// The lanes' sum, by distances 8, 4, 2, 1.
static inline float fold(f32x16 v) {
  v += upper_half(v);
  v += __builtin_shuffle(v, i32x16{4, 5, 6, 7});
  v += __builtin_shuffle(v, i32x16{2, 3});
  return v[0] + v[1];
}

static inline float largest(f32x16 v) {
  f32x16 m = maximum(v, upper_half(v));
  m = maximum(m, __builtin_shuffle(m, i32x16{4, 5, 6, 7}));
  m = maximum(m, __builtin_shuffle(m, i32x16{2, 3}));
  return m[0] > m[1] ? m[0] : m[1];
}
