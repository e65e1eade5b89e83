// Sixteen floats at a time, in GCC's vector extensions: one vector with AVX-512, and two of eight
// elsewhere. Both headers below have the same types and operations.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__clang__)
#error "build with g++: __builtin_shuffle with a mask vector is GCC's"
#endif

using bf16 = uint16_t;
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef int8_t i8x16 __attribute__((vector_size(16)));

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define HAS_AVX512 1
#include "vectors_avx512.h"
#else
#define HAS_AVX512 0
#include "vectors_halves.h"
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

static inline i32x16 lanes() {  // 0, 1, 2 .. 15
  alignas(64) static constexpr int32_t kNumbers[16] = {0, 1, 2,  3,  4,  5,  6,  7,
                                                       8, 9, 10, 11, 12, 13, 14, 15};
  return (i32x16)load_units16((const uint32_t*)kNumbers);
}
