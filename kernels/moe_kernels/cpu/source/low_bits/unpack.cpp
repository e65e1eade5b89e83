#include "unpack.h"

#include "../panels.h"
#include "decoders.h"

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
      __builtin_prefetch((const char*)from + kBytesAhead);
      units[u] = load_units16(from);
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

// Calls convert(piece, out, step) for all pieces of [first, last), and stops where one is false.
template <class T, class Convert>
static bool for_pieces(const Form& form, const char* cells, int64_t num_panels, int64_t first,
                       int64_t last, uint32_t* out, const Convert& convert) {
  const int64_t eight_units = value_bits(form) / 4, step = num_panels * kLanes;
  const int64_t cell_step = cells_bytes(form, form.group, num_panels);
  for (int64_t k = first; k < last;) {
    int64_t start = k / form.group * form.group, end = std::min(last, start + form.group);
    const char* cell = cells + k / form.group * cell_step;
    const char* values = cell + cell_head(form, num_panels);
    const int64_t skipped = (k - start) / kEight * eight_units * step;
    for (int64_t p = 0; p < num_panels; ++p) {
      const Piece piece{(const uint32_t*)values + skipped + p * kLanes, (end - k + 7) / kEight,
                        step, cell_scales(form, cell, p), cell_zeros(form, cell, p, num_panels)};
      if (!convert(piece, out + (k - first) / kUnit<T> * step + p * kLanes, step)) return false;
    }
    k = end;
  }
  return true;
}

#if defined(HAS_DECODERS)
static bool unpack_fast(const Form& form, const char* cells, int64_t num_panels, int64_t first,
                        int64_t last, uint32_t* out, const bf16*) {
  return with_decoder(form, [&](const auto& decoder) {
    auto convert = [&](const Piece& piece, uint32_t* to, int64_t step) {
      constexpr int kUnits = std::decay_t<decltype(decoder)>::kUnits;
      typename std::decay_t<decltype(decoder)>::Scales scales;
      if (!decoder.prepare(piece.scale, piece.zero, scales)) return false;
      const uint32_t* from = piece.units;
      for (int64_t i = 0; i < piece.num_eights; ++i) {
        __m512i units[kUnits];
        for (int u = 0; u < kUnits; ++u, from += step) {
          __builtin_prefetch((const char*)from + kBytesAhead);
          units[u] = _mm512_loadu_si512(from);
        }
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j, to += step)
          _mm512_storeu_si512(to, decoder.pair(units, j, scales));
      }
      return true;
    };
    return for_pieces<bf16>(form, cells, num_panels, first, last, out, convert);
  });
}
#else
static bool unpack_fast(const Form&, const char*, int64_t, int64_t, int64_t, uint32_t*,
                        const bf16*) {
  return false;
}
#endif

static bool unpack_fast(const Form&, const char*, int64_t, int64_t, int64_t, uint32_t*,
                        const float*) {
  return false;
}

template <class T>
void unpack(const Form& form, const char* cells, int64_t num_panels, int64_t first, int64_t last,
            uint32_t* out, const T* type) {
  if (unpack_fast(form, cells, num_panels, first, last, out, type)) return;
  const Unpack<T> unpack_some = unpack_of<T>(form);
  for_pieces<T>(form, cells, num_panels, first, last, out,
                [&](const Piece& piece, uint32_t* to, int64_t step) {
                  unpack_some(form, piece, to, step);
                  return true;
                });
}

template void unpack(const Form&, const char*, int64_t, int64_t, int64_t, uint32_t*, const bf16*);
template void unpack(const Form&, const char*, int64_t, int64_t, int64_t, uint32_t*, const float*);
