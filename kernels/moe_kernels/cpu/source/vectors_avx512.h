// Included by vectors.h: the operations on sixteen floats in AVX-512 intrinsics.
#pragma once

#include <immintrin.h>

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef float f32x8 __attribute__((vector_size(32)));
typedef double f64x8 __attribute__((vector_size(64)));

static inline f32x16 splat(float value) { return f32x16{} + value; }

template <class V>
static inline V select(i32x16 mask, V yes, V no) { return mask ? yes : no; }

static inline f32x16 load16(const float* p) {
  f32x16 v;
  memcpy(&v, p, sizeof v);
  return v;
}

static inline void store16(float* p, f32x16 v) { memcpy(p, &v, sizeof v); }

static inline u32x16 load_units16(const uint32_t* p) {
  u32x16 v;
  memcpy(&v, p, sizeof v);
  return v;
}

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

static inline f32x16 to_floats(i32x16 v) { return __builtin_convertvector(v, f32x16); }
static inline i32x16 to_ints(f32x16 v) { return __builtin_convertvector(v, i32x16); }  // towards 0

// Sixteen of 16 bits or 8 bits -> lanes, and back. (GCC converts bytes one by one.)
static inline u32x16 widened_bytes(const void* from) {
  return (u32x16)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
}

static inline u32x16 widened_halves(const void* from) {
  return (u32x16)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
}

static inline i32x16 signed_bytes(i8x16 v) { return (i32x16)_mm512_cvtepi8_epi32((__m128i)v); }

static inline u16x16 narrow_halves(u32x16 v) { return __builtin_convertvector(v, u16x16); }

static inline i8x16 to_bytes(i32x16 v) { return (i8x16)_mm512_cvtepi32_epi8((__m512i)v); }

// fp32 -> bf16 in the low halves of the lanes, to nearest even; a NaN stays a NaN.
static inline u32x16 bf16_bits(f32x16 v) {
  u32x16 bits = (u32x16)v;
  u32x16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return v != v ? (bits >> 16) | 0x40 : rounded;
}

static inline f32x16 load16(const bf16* p) {
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
  return (f32x16)_mm512_slli_epi32(wide, 16);
}

// Round to nearest even; a NaN stays a NaN. (The processor's own conversion also makes 0 of
// denormals.)
static inline __m256i to_bf16(f32x16 v) {
#if defined(__AVX512BF16__)
  return (__m256i)_mm512_cvtneps_pbh((__m512)v);
#else
  __m512i bits = (__m512i)v, high = _mm512_srli_epi32(bits, 16);
  __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  __mmask16 is_nan = _mm512_cmp_ps_mask((__m512)v, (__m512)v, _CMP_UNORD_Q);
  __m512i nan = _mm512_or_si512(high, _mm512_set1_epi32(0x40));
  return _mm512_cvtepi32_epi16(
      _mm512_mask_blend_epi32(is_nan, _mm512_srli_epi32(rounded, 16), nan));
#endif
}

static inline void store16(bf16* p, f32x16 v) { _mm256_storeu_si256((__m256i*)p, to_bf16(v)); }

static inline f32x16 store_rounded(bf16* p, f32x16 v) {
  __m256i half = to_bf16(v);
  _mm256_storeu_si256((__m256i*)p, half);
  return (f32x16)_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
}

static inline f32x16 round_to(const bf16*, f32x16 v) {
  bf16 h[16];
  store16(h, v);
  return load16(h);
}

static inline __mmask16 first_lanes(int64_t count) { return (__mmask16)((1u << count) - 1); }

static inline f32x16 load_some(const float* p, int64_t count) {
  return (f32x16)_mm512_maskz_loadu_ps(first_lanes(count), p);
}

static inline f32x16 load_some(const bf16* p, int64_t count) {
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first_lanes(count), p));
  return (f32x16)_mm512_slli_epi32(wide, 16);
}

static inline void store_some(float* p, f32x16 v, int64_t count) {
  _mm512_mask_storeu_ps(p, first_lanes(count), (__m512)v);
}

static inline void store_some(bf16* p, f32x16 v, int64_t count) {
  _mm256_mask_storeu_epi16(p, first_lanes(count), to_bf16(v));
}

static inline f32x16 maximum(f32x16 a, f32x16 b) {  // b where one is NaN
  return (f32x16)_mm512_max_ps((__m512)a, (__m512)b);
}

static inline f32x16 multiply_add(f32x16 a, f32x16 b, f32x16 c) {
  return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}

static inline f32x16 clamp_nan_stays(f32x16 x, float low, float high) {
  __m512 v = _mm512_max_ps(_mm512_set1_ps(low), (__m512)x);
  return (f32x16)_mm512_min_ps(_mm512_set1_ps(high), v);
}

static inline f32x16 round16(f32x16 x) {
  return (f32x16)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

static inline f32x16 scale_by_power(f32x16 x, f32x16 n) {  // x 2^n
  return (f32x16)_mm512_scalef_ps((__m512)x, (__m512)n);
}

// Lane i is table[index[i] mod 16].
static inline f32x16 look_up(const float* table, u32x16 index) {
  return (f32x16)_mm512_permutexvar_ps((__m512i)index, _mm512_loadu_ps(table));
}

// Of each eight lanes 0, 4, 1, 5, 2, 6, 3, 7.
static inline i32x16 fours_mixed(i32x16 v) {
  return __builtin_shuffle(v, i32x16{0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15});
}

// Lanes further up come down.
template <class V>
static inline V down8(V v) { return __builtin_shuffle(v, i32x16{8, 9, 10, 11, 12, 13, 14, 15}); }
template <class V>
static inline V down4(V v) { return __builtin_shuffle(v, i32x16{4, 5, 6, 7}); }
template <class V>
static inline V down2(V v) { return __builtin_shuffle(v, i32x16{2, 3}); }

// The lanes' sum, by distances 8, 4, 2, 1.
template <class V>
static inline auto fold(V v) {
  v += down8(v);
  v += down4(v);
  v += down2(v);
  return v[0] + v[1];
}

template <class V>
static inline auto largest(V v) {
  V most = v, other = down8(v);
  most = most > other ? most : other, other = down4(most);
  most = most > other ? most : other, other = down2(most);
  most = most > other ? most : other;
  return most[0] > most[1] ? most[0] : most[1];
}

// x[i] lane j <-> x[j] lane i: within every four lanes first, then the fours.
static inline void transpose16(u32x16* x) {
  __m512i fours[16];
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    __m512i r0 = (__m512i)x[i], r1 = (__m512i)x[i + 1], r2 = (__m512i)x[i + 2];
    __m512i r3 = (__m512i)x[i + 3];
    __m512i a = _mm512_unpacklo_epi32(r0, r1), b = _mm512_unpacklo_epi32(r2, r3);
    __m512i c = _mm512_unpackhi_epi32(r0, r1), d = _mm512_unpackhi_epi32(r2, r3);
    fours[i] = _mm512_unpacklo_epi64(a, b);
    fours[i + 1] = _mm512_unpackhi_epi64(a, b);
    fours[i + 2] = _mm512_unpacklo_epi64(c, d);
    fours[i + 3] = _mm512_unpackhi_epi64(c, d);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {  // fours[4 r + i], four q: rows 4 r .., lane 4 q + i
    __m512i a = _mm512_shuffle_i32x4(fours[i], fours[4 + i], 0x88);
    __m512i b = _mm512_shuffle_i32x4(fours[8 + i], fours[12 + i], 0x88);
    __m512i c = _mm512_shuffle_i32x4(fours[i], fours[4 + i], 0xdd);
    __m512i d = _mm512_shuffle_i32x4(fours[8 + i], fours[12 + i], 0xdd);
    x[i] = (u32x16)_mm512_shuffle_i32x4(a, b, 0x88);
    x[4 + i] = (u32x16)_mm512_shuffle_i32x4(c, d, 0x88);
    x[8 + i] = (u32x16)_mm512_shuffle_i32x4(a, b, 0xdd);
    x[12 + i] = (u32x16)_mm512_shuffle_i32x4(c, d, 0xdd);
  }
}
