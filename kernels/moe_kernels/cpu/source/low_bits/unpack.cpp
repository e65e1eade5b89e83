#include "unpack.h"

#include "../panels.h"
#include "convert.h"

struct Piece {  // neighbouring eights of one panel of one cell
  const uint32_t* units;
  int64_t num_eights, step;  // step: from a unit of the panel to its next one
  f32x16 scale, zero;
};

// The codes of the pair (2 j, 2 j + 1) of eight values.
template <Values kValues>
static inline u32x16 pair_codes(const u32x16* units, int j) {
  if (kValues == kInt4 || kValues == kE2M1) return units[0] >> 4 * j;
  return units[j & 1] >> 8 * (j >> 1);
}

template <class T, Values kValues, bool kHasZeros>
static void unpack_piece(const Form& form, const Piece& piece, uint32_t* out, int64_t out_step) {
  constexpr bool kIsNarrow = kValues == kInt4 || kValues == kE2M1;
  constexpr int kUnits = kIsNarrow ? 1 : 2;
  const int64_t pair_step = out_step * 2 / kUnit<T>;
  const bool is_rounded = form.rounding == kFloat16 ||
                          (form.rounding == kBfloat16 && sizeof(T) == sizeof(float));
  const float constant = (float)form.zero;
  const f32x16 zero = kHasZeros ? piece.zero : splat((float)form.zero);
  auto values = [&](u32x16 codes) {
    if (kValues == kInt4 && !kHasZeros)
      return Pair{decode_int4(codes, constant), decode_int4(codes >> 16, constant)};
    Pair v = decode_pair<kValues>(codes);
    if (kValues == kInt4 || kValues == kInt8) v.even -= zero, v.odd -= zero;
    return v;
  };
  const uint32_t* from = piece.units;
  for (int64_t i = 0; i < piece.num_eights; ++i) {
    u32x16 units[2];
    for (int u = 0; u < kUnits; ++u, from += piece.step) {
      __builtin_prefetch((const char*)from + 4096);
      memcpy(&units[u], from, sizeof units[u]);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j, out += pair_step) {
      u32x16 codes = pair_codes<kValues>(units, j);
      const Pair pair = values(codes);
      f32x16 even = pair.even * piece.scale, odd = pair.odd * piece.scale;
      if (is_rounded) {
        even = rounded_product(even, form.rounding);
        odd = rounded_product(odd, form.rounding);
      }
      store_pair(even, odd, out, out_step, (const T*)nullptr);
    }
  }
}

#if defined(__AVX512BW__)
// MXFP4 in bf16, where every value is exact: a scale adds to the exponents of all but 0. False if
// a scale could leave the range of bf16's normal numbers.
static bool unpack_powers(const Piece& piece, uint32_t* out, int64_t out_step) {
  const u32x16 exponents = (u32x16)piece.scale >> 23;
  if (_mm512_cmplt_epu32_mask((__m512i)(exponents - 2), _mm512_set1_epi32(251)) != 0xffff)
    return false;
  const u32x16 added = (exponents - 127 << 7 & 0xffff) | (exponents - 127) << 23;
  const __m512i values = _mm512_broadcast_i64x4(_mm256_setr_epi16(
      0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, (short)0x8000, (short)0xbf00,
      (short)0xbf80, (short)0xbfc0, (short)0xc000, (short)0xc040, (short)0xc080, (short)0xc0c0));
  const __m512i codes = _mm512_set1_epi16(15), sizes = _mm512_set1_epi16(7);
  const uint32_t* from = piece.units;
  for (int64_t i = 0; i < piece.num_eights; ++i, from += piece.step) {
    __builtin_prefetch((const char*)from + 4096);
    __m512i unit = _mm512_loadu_si512(from);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j, out += out_step) {
      __m512i index = _mm512_and_si512(_mm512_srli_epi16(unit, 4 * j), codes);
      __m512i value = _mm512_permutexvar_epi16(index, values);
      __mmask32 is_more = _mm512_test_epi16_mask(index, sizes);
      _mm512_storeu_si512(out, _mm512_mask_add_epi16(value, is_more, value, (__m512i)added));
    }
  }
  return true;
}
#endif

template <class T>
using Unpack = void (*)(const Form&, const Piece&, uint32_t*, int64_t);

template <class T>
static Unpack<T> unpack_of(const Form& form) {
  switch (form.values) {
    case kInt4: return form.has_zeros ? unpack_piece<T, kInt4, true> : unpack_piece<T, kInt4, false>;
    case kInt8: return form.has_zeros ? unpack_piece<T, kInt8, true> : unpack_piece<T, kInt8, false>;
    case kE4M3: return unpack_piece<T, kE4M3, false>;
    default: return unpack_piece<T, kE2M1, false>;
  }
}

template <class T>
void unpack(const Form& form, const char* cells, int64_t num_panels, int64_t first, int64_t last,
            uint32_t* out, const T*) {
  const Unpack<T> unpack_some = unpack_of<T>(form);
#if defined(__AVX512BW__)
  const bool has_powers = form.values == kE2M1 && form.scales == kE8M0 && sizeof(T) == sizeof(bf16);
#endif
  const int64_t eight_units = value_bits(form) / 4, step = num_panels * kLanes;
  const int64_t cell_step = cells_bytes(form, form.group, num_panels);
  for (int64_t k = first; k < last;) {
    int64_t start = k / form.group * form.group, end = std::min(last, start + form.group);
    const char* cell = cells + k / form.group * cell_step;
    const char* zeros = cell + step * scale_bytes(form);
    const char* values = cell + cell_head(form, num_panels);
    const int64_t skipped = (k - start) / kEight * eight_units * step;
    for (int64_t p = 0; p < num_panels; ++p) {
      Piece piece{(const uint32_t*)values + skipped + p * kLanes, (end - k + 7) / kEight, step,
                  load_scales(cell + p * kLanes * scale_bytes(form), form.scales), {}};
      if (form.has_zeros)
        piece.zero = __builtin_convertvector((i32x16)widened_bytes(zeros + p * kLanes), f32x16);
      uint32_t* to = out + (k - first) / kUnit<T> * step + p * kLanes;
#if defined(__AVX512BW__)
      if (has_powers && unpack_powers(piece, to, step)) continue;
#endif
      unpack_some(form, piece, to, step);
    }
    k = end;
  }
}

template void unpack(const Form&, const char*, int64_t, int64_t, int64_t, uint32_t*, const bf16*);
template void unpack(const Form&, const char*, int64_t, int64_t, int64_t, uint32_t*, const float*);
