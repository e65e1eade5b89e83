// Additions of one bit per weight: scale * (sum of x where the bit is set - sum of the other x).
//
// Bits lie in groups of 64 columns, as the panels of the matrix that they belong to: one 64-bit
// word for each k. A result has two chains, of even and of odd k, in one lane of one register each,
// so it depends on its row alone.
#pragma once

#include "../panels.h"
#include "../scratch.h"

struct Signs {  // mirrored in native_signs.py
  const uint64_t* bits;  // [groups of 64 columns][K]; null: nothing is added
  const float* scales;   // one for each panel, or one for each column
  const float* bias;     // [N], or null
  int64_t has_column_scales, num_outputs, width;
};

static inline f32x16 add_where(f32x16 sum, uint32_t bits, f32x16 x) {
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
  return (f32x16)_mm512_mask_add_ps((__m512)sum, (__mmask16)bits, (__m512)sum, (__m512)x);
#else
  constexpr u32x16 kLaneBits = {1,      1 << 1, 1 << 2,  1 << 3,  1 << 4,  1 << 5,  1 << 6,  1 << 7,
                                1 << 8, 1 << 9, 1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 14, 1 << 15};
  return sum + select(((u32x16{} + bits) & kLaneBits) != 0, x, f32x16{});
#endif
}

// c with the additions to one group of columns of row x, in `out`; c itself if there are none.
template <class T>
static const float* with_signs(const Signs& s, const T* x, int64_t group, const float* c,
                               float* out) {
  if (!s.bits) return c;
  static thread_local Scratch scratch;
  float* row = scratch.get<float>(s.width + kLanes);
  f32x16 total{};
  for (int64_t k = 0; k < s.width; k += kLanes) {
    f32x16 v = load_up_to(x + k, s.width - k);
    store16(row + k, v);
    total += v;
  }
  const float all = fold(total);
  f32x16 sums[2][kGroupPanels] = {};
  const uint64_t* bits = s.bits + group * s.width;
  for (int64_t k = 0; k < s.width; k += 2) {
#pragma GCC unroll 2
    for (int64_t i = 0; i < 2; ++i) {
      const uint64_t word = k + i < s.width ? bits[k + i] : 0;
      const f32x16 v = splat(row[k + i]);
#pragma GCC unroll 4
      for (int64_t p = 0; p < kGroupPanels; ++p)
        sums[i][p] = add_where(sums[i][p], (uint32_t)(word >> (kLanes * p)) & 0xffff, v);
    }
  }
  const int64_t first = group * kGroupColumns;
  const int64_t num_panels = std::min(kGroupPanels, panels(s.num_outputs) - group * kGroupPanels);
  for (int64_t p = 0; p < num_panels; ++p) {
    const int64_t column = first + p * kLanes;
    const f32x16 scale =
        s.has_column_scales ? load16(s.scales + column) : splat(s.scales[column / kLanes]);
    f32x16 v = load16(c + p * kLanes) + scale * (2.0f * (sums[0][p] + sums[1][p]) - all);
    if (s.bias) v += load_up_to(s.bias + column, s.num_outputs - column);
    store16(out + p * kLanes, v);
  }
  return out;
}
