// The largest value of a row.
#pragma once

#include <algorithm>
#include <limits>

#include "vectors.h"

// The first of the largest values; 0 if all are NaN.
template <class T>
static inline int64_t first_largest(const T* row, int64_t count) {
  constexpr float kLeast = -std::numeric_limits<float>::infinity();
  f32x16 best = splat(kLeast);
  i32x16 at = {};
  int64_t n = 0, found = 0;
  for (; n + 16 <= count; n += 16) {
    f32x16 v = load16(row + n);
    const auto is_larger = v > best;
    best = select(is_larger, v, best);
    at = select(is_larger, i32x16{} + (int32_t)n, at);
  }
  float most = largest(best);
  if (most > kLeast) {
    found = count;
    for (int64_t i = 0; i < 16; ++i)
      if (best[i] == most) found = std::min<int64_t>(found, at[i] + i);
  }
  for (; n < count; ++n) {
    float v = load_some(row + n, 1)[0];
    if (v > most) most = v, found = n;
  }
  return found;
}

static inline bool has_nan(const float* row, int64_t count) {
  i32x16 is_nan = {};
  for (int64_t n = 0; n < count; n += 16) {
    f32x16 v = load_up_to(row + n, count - n);
    is_nan |= v != v;
  }
  for (int64_t i = 0; i < 16; ++i)
    if (is_nan[i]) return true;
  return false;
}
