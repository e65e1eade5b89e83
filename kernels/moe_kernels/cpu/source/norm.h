// RMSNorm of a row, and the rotation of a head.
#pragma once

#include <cmath>

#include "vectors.h"

// x / sqrt(mean(x^2) + eps) rounded to X, times weight, rounded to X. `out` may be x.
template <class X, class W>
static inline void norm_row(const X* x, const W* weight, X* out, int64_t width, float eps) {
  f32x16 squares = {};
  for (int64_t d = 0; d < width; d += 16) {
    f32x16 v = load_up_to(x + d, width - d);
    squares += v * v;
  }
  float scale = 1.0f / std::sqrt(fold(squares) / (float)width + eps);
  for (int64_t d = 0; d < width; d += 16) {
    f32x16 normed = round_to(x, load_up_to(x + d, width - d) * scale);
    store_up_to(out + d, normed * load_up_to(weight + d, width - d), width - d);
  }
}

template <class T>
static inline void clip_row(T* row, int64_t count, float bound) {
  for (int64_t d = 0; d < count; d += 16) {
    f32x16 v = load_up_to(row + d, count - d);
    v = select(v > splat(bound), splat(bound), v);
    v = select(v < splat(-bound), splat(-bound), v);
    store_up_to(row + d, v, count - d);
  }
}

// Rotate the first `count` values by halves: x cos + swap(x) sin, the minus sign being in the
// sine's first half; the rest of the head is copied. The first product is the fused one.
template <class T>
static inline void rotate(const T* x, const float* cos, const float* sin, float* out,
                          int64_t count, int64_t dim) {
  int64_t half = count / 2, d = 0;
  if (count % 32 == 0)
    for (; d < count; d += 16) {
      f32x16 swapped = load16(x + (d < half ? d + half : d - half));
      store16(out + d, multiply_add(load16(x + d), load16(cos + d), swapped * load16(sin + d)));
    }
  for (; d < count; ++d) {
    float swapped = load_some(x + (d < half ? d + half : d - half), 1)[0];
    out[d] = load_some(x + d, 1)[0] * cos[d] + swapped * sin[d];
  }
  for (; d < dim; d += 16) store_up_to(out + d, load_up_to(x + d, dim - d), dim - d);
}

template <class T>
static inline void store_row(const float* x, float scale, T* out, int64_t width) {
  for (int64_t d = 0; d < width; d += 16)
    store_up_to(out + d, load_up_to(x + d, width - d) * scale, width - d);
}
