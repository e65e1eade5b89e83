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
  auto value = [&](u32x16 codes) {
    f32x16 v = kValues == kInt4 && !kHasZeros ? decode_int4(codes, constant)
                                              : decode<kValues>(codes);
    if (kValues == kInt8 && !kHasZeros) v -= constant;
    if (kHasZeros) v -= piece.zero;
    return v * piece.scale;
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
      f32x16 even = value(codes), odd = value(codes >> 16);
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

template <class T>
void unpack(const Form& form, const char* cells, int64_t num_panels, int64_t first, int64_t last,
            uint32_t* out, const T*) {
  const Unpack<T> unpack_some = unpack_of<T>(form);
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
        piece.zero = __builtin_convertvector((i32x16)widened<u8x16>(zeros + p * kLanes), f32x16);
      unpack_some(form, piece, out + (k - first) / kUnit<T> * step + p * kLanes, step);
    }
    k = end;
  }
}

template void unpack(const Form&, const char*, int64_t, int64_t, int64_t, uint32_t*, const bf16*);
template void unpack(const Form&, const char*, int64_t, int64_t, int64_t, uint32_t*, const float*);
