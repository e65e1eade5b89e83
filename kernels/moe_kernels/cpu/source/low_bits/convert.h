// Codes of few bits, scales and roundings, sixteen at a time.
#pragma once

#include "../vectors.h"
#include "form.h"

// 16-bit floats in the low halves of the lanes -> fp32, and back (to nearest even).
#if HAS_AVX512
static inline f32x16 from_half(u32x16 h) {
  return (f32x16)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)h));
}

static inline f32x16 round_to_half(f32x16 v) {
  return (f32x16)_mm512_cvtph_ps(
      _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
#elif defined(__F16C__) && defined(__AVX2__)
static inline f32x16 from_half(u32x16 h) {
  const __m256i narrow = (__m256i)narrow_halves(h);
  return {(f32x8)_mm256_cvtph_ps(_mm256_castsi256_si128(narrow)),
          (f32x8)_mm256_cvtph_ps(_mm256_extracti128_si256(narrow, 1))};
}

static inline f32x16 round_to_half(f32x16 v) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {(f32x8)_mm256_cvtph_ps(_mm256_cvtps_ph((__m256)v.low, kNearest)),
          (f32x8)_mm256_cvtph_ps(_mm256_cvtps_ph((__m256)v.high, kNearest))};
}
#else
static inline f32x16 from_half(u32x16 h) {
  u32x16 size = h & 0x7fff, sign = (h & 0x8000) << 16;
  f32x16 v = (f32x16)(size << 13) * 0x1p112f;  // denormals of fp16 too
  u32x16 special = (size << 13) | 0x7f800000u;
  return (f32x16)(select(size >= 0x7c00, special, (u32x16)v) | sign);
}

static inline float round_to_half(float v) {
  uint32_t bits;
  memcpy(&bits, &v, sizeof bits);
  uint32_t size = bits & 0x7fffffff, sign = bits & 0x80000000;
  if (size >= 0x7f800000) return v;             // infinity, NaN
  if (size >= 0x477ff000) size = 0x7f800000;    // rounds to 65536
  else if (size < 0x38800000) {                 // a denormal: a multiple of 2^-24
    float rest;
    memcpy(&rest, &size, sizeof rest);
    rest = (rest + 0.5f) - 0.5f;                // floats from 0.5 on are 2^-24 apart
    memcpy(&size, &rest, sizeof size);
  } else size = (size + 0xfff + (size >> 13 & 1)) & ~0x1fffu;
  bits = size | sign;
  memcpy(&v, &bits, sizeof v);
  return v;
}

static inline f32x16 round_to_half(f32x16 v) {
  for (int i = 0; i < 16; ++i) v[i] = round_to_half(v[i]);
  return v;
}
#endif

// The product of value and scale, as its own type would hold it.
static inline f32x16 rounded_product(f32x16 v, int64_t type) {
  if (type == kBfloat16) return (f32x16)(bf16_bits(v) << 16);
  if (type == kFloat16) return round_to_half(v);
  return v;
}

// Sixteen scales -> fp32.
static inline f32x16 load_scales(const char* from, int64_t type) {
  switch (type) {
    case kFloat32: return load16((const float*)from);
    case kBfloat16: return (f32x16)(widened_halves(from) << 16);
    case kFloat16: return from_half(widened_halves(from));
    default: {  // 2^(code - 127); 255 is NaN
      u32x16 code = widened_bytes(from), bits = code << 23;
      bits = select(code == 0, u32x16{} + 0x400000u, bits);
      return (f32x16)select(code == 255, u32x16{} + 0x7fc00000u, bits);
    }
  }
}

// The values that the low 4 or 8 bits of the lanes stand for. Whole numbers as they are: the code of
// 0 is still to be subtracted.
template <Values kValues>
static inline f32x16 decode(u32x16 codes) {
  if (kValues == kE4M3) {  // the bits of an fp16 that is 2^8 times smaller
    u32x16 size = codes & 0x7f;
    f32x16 v = from_half(size << 7 | (codes & 0x80) << 8) * 256.0f;
    return (f32x16)select(size == 0x7f, u32x16{} + 0x7fc00000u, (u32x16)v);
  }
  if (kValues == kE2M1) {
#if HAS_AVX512
    const __m512 values = _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2,
                                         -3, -4, -6);
    return (f32x16)_mm512_permutexvar_ps((__m512i)codes, values);
#else
    static constexpr float kValuesOf[16] = {0,     0.5f,  1,     1.5f,  2,  3,  4,  6,
                                            -0.0f, -0.5f, -1.0f, -1.5f, -2, -3, -4, -6};
    return look_up(kValuesOf, codes);
#endif
  }
  return to_floats((i32x16)(codes & (kValues == kInt4 ? 15 : 255)));
}

// The values of a pair of codes 16 bits apart, first the lower one's.
struct Pair {
  f32x16 even, odd;
};

template <Values kValues>
static inline Pair decode_pair(u32x16 codes) {
#if HAS_AVX512
  if (kValues == kE4M3) {  // every value is exact in bf16: both at once
    const __m512i c = (__m512i)codes, size = _mm512_and_si512(c, _mm512_set1_epi16(0x7f));
    const __m512i denormals = _mm512_castsi128_si512(_mm_setr_epi16(
        0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));
    __m512i v = _mm512_add_epi16(_mm512_slli_epi16(size, 4), _mm512_set1_epi16(0x3c00));
    const __mmask32 is_denormal = _mm512_cmplt_epu16_mask(size, _mm512_set1_epi16(8));
    const __mmask32 is_nan = _mm512_cmpeq_epi16_mask(size, _mm512_set1_epi16(0x7f));
    v = _mm512_mask_permutexvar_epi16(v, is_denormal, size, denormals);
    v = _mm512_mask_mov_epi16(v, is_nan, _mm512_set1_epi16(0x7fc0));
    const __m512i sign = _mm512_slli_epi16(_mm512_and_si512(c, _mm512_set1_epi16(0x80)), 8);
    const u32x16 both = (u32x16)_mm512_or_si512(v, sign);
    return {(f32x16)(both << 16), (f32x16)(both & 0xffff0000u)};
  }
#endif
  return {decode<kValues>(codes), decode<kValues>(codes >> 16)};
}

// The same for whole numbers in 4 bits and no zeros of the groups' own: zero is subtracted.
static inline f32x16 decode_int4(u32x16 codes, float zero) {
#if HAS_AVX512
  const __m512 values = _mm512_sub_ps(
      _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), _mm512_set1_ps(zero));
  return (f32x16)_mm512_permutexvar_ps((__m512i)codes, values);
#else
  return decode<kInt4>(codes) - zero;
#endif
}

// A pair of values of k of sixteen columns as a product reads it: one unit of bf16, two of fp32.
static inline void store_pair(f32x16 even, f32x16 odd, uint32_t* out, int64_t, const uint16_t*) {
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24,
                                         8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
  _mm512_storeu_si512(out, _mm512_permutexvar_epi16(order, both));
#else
  u32x16 unit = bf16_bits(even) | bf16_bits(odd) << 16;
  memcpy(out, &unit, sizeof unit);
#endif
}

static inline void store_pair(f32x16 even, f32x16 odd, uint32_t* out, int64_t step, const float*) {
  memcpy(out, &even, sizeof even);
  memcpy(out + step, &odd, sizeof odd);
}
