// Units of few bits -> pairs of bf16, in AVX-512: the values that convert.h gives, bit for bit, from
// fewer instructions. Each decoder has
//
//     kUnits                          units of eight values of k
//     decodes(form)                   whether it is made for the form
//     Scales, prepare(scale, zero, s) what a panel of one cell needs; false if convert.h has to do
//                                     it: a scale is negative, or a product could be out of range
//     pair(units, j, s)               values 2 j and 2 j + 1 of eight: [16 columns][2] words
#pragma once

#include "convert.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define HAS_DECODERS 1

// Within 2^-100 .. 2^100: no product leaves the normal numbers of bf16.
static inline bool are_moderate(f32x16 scales) {
  const __m512i exponents = _mm512_srli_epi32((__m512i)scales, 23);
  const __m512i above = _mm512_sub_epi32(exponents, _mm512_set1_epi32(27));
  return _mm512_cmplt_epu32_mask(above, _mm512_set1_epi32(201)) == 0xffff;
}

static inline __m512i bf16_words(f32x16 low, f32x16 high) {  // 16 of each
  return (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
}

static inline __m512i twice(__m256i words) { return _mm512_broadcast_i64x4(words); }

// E2M1 with powers of 2 as scales: a scale adds to the exponents of all values but 0.
class Powers {
 public:
  static constexpr int kUnits = 1;
  using Scales = __m512i;

  explicit Powers(const Form&) {}

  static bool decodes(const Form& form) { return form.values == kE2M1 && form.scales == kE8M0; }

  bool prepare(f32x16 scale, f32x16, Scales& added) const {
    if (!are_moderate(scale)) return false;
    const u32x16 exponents = ((u32x16)scale >> 23) - 127;
    added = (__m512i)((exponents << 7 & 0xffff) | exponents << 23);
    return true;
  }

  __m512i pair(const __m512i* units, int j, const Scales& added) const {
    const __m512i value = _mm512_permutexvar_epi16(_mm512_srli_epi16(units[0], 4 * j), values_);
    const __mmask32 is_more = _mm512_test_epi16_mask(value, sizes_);
    return _mm512_mask_add_epi16(value, is_more, value, added);
  }

 private:
  const __m512i values_ = twice(_mm256_setr_epi16(
      0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, (short)0x8000, (short)0xbf00,
      (short)0xbf80, (short)0xbfc0, (short)0xc000, (short)0xc040, (short)0xc080, (short)0xc0c0));
  const __m512i sizes_ = _mm512_set1_epi16(0x7fff);
};

// int4 around 8. A value is 1, 3, 5 or 7 times a power of 2, so only four products of a scale are
// rounded, and the others have other exponents and signs. The word of a code has the place of its
// product among the four at bit 4, where the choice of it wants it, and the power and the sign where
// bf16 has them. Bit 6 tells it from the word of 0.
class Multiples {
 public:
  static constexpr int kUnits = 1;
  struct Scales {
    __m512i low, high;  // products 1 and 3, 5 and 7, less the places
  };

  explicit Multiples(const Form&) {}

  static bool decodes(const Form& form) {
    return form.values == kInt4 && !form.has_zeros && form.zero == 8 && form.rounding != kFloat16;
  }

  bool prepare(f32x16 scale, f32x16, Scales& s) const {
    if (!are_moderate(scale)) return false;
    s.low = _mm512_sub_epi16(bf16_words(scale, scale * 3.0f), places_);
    s.high = _mm512_sub_epi16(bf16_words(scale * 5.0f, scale * 7.0f), later_places_);
    return true;
  }

  __m512i pair(const __m512i* units, int j, const Scales& s) const {
    const __m512i word = _mm512_permutexvar_epi16(_mm512_srli_epi16(units[0], 4 * j), words_);
    const __m512i place = _mm512_or_si512(word, columns_);
    const __m512i product = _mm512_permutex2var_epi16(s.low, place, s.high);
    return _mm512_maskz_add_epi16(_mm512_test_epi16_mask(word, word), product, word);
  }

 private:
  static constexpr short kOne = 0x40, kThree = 0x50, kFive = 0x60, kSeven = 0x70;
  static constexpr short kTwice = 0x80, kMinus = (short)0x8000;

  static __m512i halves(short low, short high) {
    return _mm512_inserti64x4(_mm512_set1_epi16(low), _mm256_set1_epi16(high), 1);
  }

  const __m512i words_ = twice(_mm256_setr_epi16(
      kMinus | (kOne + 3 * kTwice), kMinus | kSeven, kMinus | (kThree + kTwice), kMinus | kFive,
      kMinus | (kOne + 2 * kTwice), kMinus | kThree, kMinus | (kOne + kTwice), kMinus | kOne, 0,
      kOne, kOne + kTwice, kThree, kOne + 2 * kTwice, kFive, kThree + kTwice, kSeven));
  const __m512i places_ = halves(kOne, kThree), later_places_ = halves(kFive, kSeven);
  const __m512i columns_ = _mm512_setr_epi32(
      0, 0x10001, 0x20002, 0x30003, 0x40004, 0x50005, 0x60006, 0x70007, 0x80008, 0x90009, 0xa000a,
      0xb000b, 0xc000c, 0xd000d, 0xe000e, 0xf000f);
};

// Whole numbers whose scales have 16 bits. A code, put into the mantissa of a power of 2, is that
// power plus the code: one fused operation multiplies and subtracts, and nothing of it is rounded.
template <Values kValues>
class WholeNumbers {
 public:
  static constexpr int kUnits = kValues == kInt8 ? 2 : 1;
  struct Scales {
    __m512 scale, start;  // start: minus the power and the code of 0, times the scale
  };

  explicit WholeNumbers(const Form& form) : zero_(splat((float)form.zero)), form_(form) {}

  static bool decodes(const Form& form) {
    return form.values == kValues && form.rounding != kFloat16 &&
           (form.scales == kBfloat16 || form.scales == kFloat16);
  }

  bool prepare(f32x16 scale, f32x16 zero, Scales& s) const {
    s.scale = (__m512)scale;
    s.start = (__m512)(scale * -(kPower + (form_.has_zeros ? zero : zero_)));
    return are_moderate(scale);
  }

  __m512i pair(const __m512i* units, int j, const Scales& s) const {
    __m512i low, high;  // codes at the place, and what is beside them
    if (kValues == kInt8) {
      const __m512i unit = units[j & 1];
      low = j < 2 ? _mm512_slli_epi32(unit, 15) : _mm512_slli_epi32(unit, 7);
      high = j < 2 ? _mm512_srli_epi32(unit, 1) : _mm512_srli_epi32(unit, 9);
    } else {
      low = _mm512_slli_epi32(units[0], 16 - 4 * j);
      high = _mm512_srli_epi32(units[0], 4 * j);
    }
    const __m512 even = _mm512_fmadd_ps(at_power(low), s.scale, s.start);
    const __m512 odd = _mm512_fmadd_ps(at_power(high), s.scale, s.start);
    return _mm512_permutexvar_epi16(order_, (__m512i)_mm512_cvtne2ps_pbh(odd, even));
  }

 private:
  static constexpr float kPower = kValues == kInt8 ? 256.0f : 128.0f;
  static constexpr int kPlace = kValues == kInt8 ? 0x007f8000 : 0x000f0000;
  static constexpr int kPowerBits = kValues == kInt8 ? 0x43800000 : 0x43000000;

  static __m512 at_power(__m512i codes) {  // (codes & place) | power
    return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(
        codes, _mm512_set1_epi32(kPlace), _mm512_set1_epi32(kPowerBits), 0xea));
  }

  const __m512i order_ = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24,
                                          8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const f32x16 zero_;
  const Form& form_;
};

// Calls use(decoder) with the one for the form, if there is one -> what it returns, or false.
template <class Use>
static inline bool with_decoder(const Form& form, const Use& use) {
  if (Powers::decodes(form)) return use(Powers(form));
  if (Multiples::decodes(form)) return use(Multiples(form));
  if (WholeNumbers<kInt4>::decodes(form)) return use(WholeNumbers<kInt4>(form));
  if (WholeNumbers<kInt8>::decodes(form)) return use(WholeNumbers<kInt8>(form));
  return false;
}
#endif

// The scales of one panel of a cell, and what stands for 0 if each cell says so.
static inline f32x16 cell_scales(const Form& form, const char* cell, int64_t panel) {
  return load_scales(cell + panel * 16 * scale_bytes(form), form.scales);
}

static inline f32x16 cell_zeros(const Form& form, const char* cell, int64_t panel,
                                int64_t num_panels) {
  const char* zeros = cell + num_panels * 16 * scale_bytes(form);
  return form.has_zeros
             ? to_floats((i32x16)widened_bytes(zeros + panel * 16))
             : f32x16{};
}
