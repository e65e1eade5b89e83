// Additions of one bit per weight: scale * (sum of x, with minus where the bit is not set) (+ bias).
//
// The sums of four neighbouring x with all 16 ways of signs are made once for a row, and four bits
// of an output choose one of them. Bits lie in panels of 16 outputs: [panels][words of 32 k][16],
// the first k in the lowest bit. A result adds its choices from k = 0 to the last in one chain, in
// one lane of one register, so it depends on its row alone.
#pragma once

#include "../panels.h"
#include "../scratch.h"

struct Signs {  // mirrored in native_signs.py
  const uint32_t* bits;  // null: nothing is added
  const float* scales;   // one for each panel, or one for each column
  const float* bias;     // [N], or null
  int64_t has_column_scales, num_outputs, width;
};

struct SignedExpert {  // mirrored in native_signs.py
  Signs gate, up, down;
};

constexpr int64_t kWordBits = 32, kChoiceBits = 4, kWays = 1 << kChoiceBits;

static inline int64_t sign_words(int64_t width) { return (width + kWordBits - 1) / kWordBits; }

// The 16 sums of each four values of a row, which is filled up with zeros. Valid until the thread's
// next call.
template <class T>
static const float* sign_sums(const T* x, int64_t width) {
  static thread_local Scratch row_scratch, scratch;
  const int64_t padded = sign_words(width) * kWordBits;
  float* row = row_scratch.get<float>(padded);
  for (int64_t k = 0; k < padded; k += kLanes)
    store16(row + k, k < width ? load_up_to(x + k, width - k) : f32x16{});
  constexpr uint32_t M = 1u << 31;  // the sign of a float, in the lanes without bit 0, 1, 2, 3
  alignas(64) constexpr uint32_t kMinus[kChoiceBits][kWays] = {
      {M, 0, M, 0, M, 0, M, 0, M, 0, M, 0, M, 0, M, 0},
      {M, M, 0, 0, M, M, 0, 0, M, M, 0, 0, M, M, 0, 0},
      {M, M, M, M, 0, 0, 0, 0, M, M, M, M, 0, 0, 0, 0},
      {M, M, M, M, M, M, M, M, 0, 0, 0, 0, 0, 0, 0, 0}};
  float* sums = scratch.get<float>(padded / kChoiceBits * kWays);
  for (int64_t k = 0; k < padded; k += kChoiceBits) {
    auto value = [&](int64_t i) {
      return (f32x16)((u32x16)splat(row[k + i]) ^ load_units16(kMinus[i]));
    };
    store16(sums + k / kChoiceBits * kWays, (value(0) + value(1)) + (value(2) + value(3)));
  }
  return sums;
}

template <int N>
static inline void add_choices(const uint32_t* bits, int64_t words, const float* sums,
                               f32x16* totals) {
  f32x16 c[N] = {};
  for (int64_t w = 0; w < words; ++w) {
    u32x16 word[N];
    for (int p = 0; p < N; ++p) {
      const uint32_t* from = bits + (p * words + w) * kLanes;
      word[p] = load_units16(from);
      __builtin_prefetch(from + N * words * kLanes);  // of the next panels
    }
#pragma GCC unroll 8
    for (int64_t j = 0; j < kWordBits / kChoiceBits; ++j, sums += kWays)
#pragma GCC unroll 4
      for (int p = 0; p < N; ++p)
        c[p] += look_up(sums, word[p] >> (uint32_t)(kChoiceBits * j));
  }
  for (int p = 0; p < N; ++p) totals[p] = c[p];
}

// Calls store(n, v) with the additions to outputs n, n + 1 .. n + 15 for panels [first, last).
// `sums`: of the row, from `sign_sums`.
template <class Store>
static void add_signs(const Signs& s, const float* sums, int64_t first, int64_t last,
                      const Store& store) {
  const int64_t words = sign_words(s.width);
  for (int64_t p = first; p < last; p += kGroupPanels) {
    const uint32_t* bits = s.bits + p * words * kLanes;
    const int64_t count = std::min(kGroupPanels, last - p);
    f32x16 totals[kGroupPanels];
    if (count == 4) add_choices<4>(bits, words, sums, totals);
    else if (count == 3) add_choices<3>(bits, words, sums, totals);
    else if (count == 2) add_choices<2>(bits, words, sums, totals);
    else add_choices<1>(bits, words, sums, totals);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t n = (p + i) * kLanes;
      f32x16 v = totals[i] * (s.has_column_scales ? load16(s.scales + n) : splat(s.scales[p + i]));
      if (s.bias) v += load_up_to(s.bias + n, s.num_outputs - n);
      store(n, v);
    }
  }
}
