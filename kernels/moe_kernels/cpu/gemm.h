// Rows of a times rows of w: out(m, n) = sum_k a[m][k] w[n][k], in fp32, handed to an epilogue.
#pragma once

#include <algorithm>

#include "vectors.h"

// MR x NR results (at most 16) in lanes m * NR + n.
template <class T, int MR, int NR>
static inline f32x16 tile(const T* const* a, const T* w, int64_t width, int64_t stride) {
  using D = Dot<T>;
  f32x16 sums[16] = {};
  int64_t k = 0;
  for (; k + D::step <= width; k += D::step) {
    typename D::Vector b[NR];
#pragma GCC unroll 16
    for (int n = 0; n < NR; ++n) b[n] = D::load(w + n * stride + k);
#pragma GCC unroll 16
    for (int m = 0; m < MR; ++m) {
      typename D::Vector row = D::load(a[m] + k);
#pragma GCC unroll 16
      for (int n = 0; n < NR; ++n) sums[m * NR + n] = D::add(sums[m * NR + n], row, b[n]);
    }
  }
  if (k < width) {
    for (int m = 0; m < MR; ++m) {
      typename D::Vector row = D::load_tail(a[m] + k, width - k);
      for (int n = 0; n < NR; ++n)
        sums[m * NR + n] =
            D::add(sums[m * NR + n], row, D::load_tail(w + n * stride + k, width - k));
    }
  }
  return sum_lanes(sums);
}

// Calls store(m, n, values, count): `count` neighbours n, n + 1, ... of row m.
template <class T, int MR, int NR, class Store>
static inline void tile_rows(const T* const* a, int64_t m, const T* w, int64_t n, int64_t width,
                             const Store& store) {
  float values[16];
  store16(values, tile<T, MR, NR>(a + m, w + n * width, width, width));
  for (int i = 0; i < MR; ++i) store(m + i, n, values + i * NR, NR);
}

template <class T, int NR, class Store>
static inline void tile_column(const T* const* a, int64_t num_rows, const T* w, int64_t n,
                               int64_t width, const Store& store) {
  int64_t m = 0;
  for (; m + 4 <= num_rows; m += 4) tile_rows<T, 4, NR>(a, m, w, n, width, store);
  if (num_rows - m == 3) tile_rows<T, 3, NR>(a, m, w, n, width, store);
  if (num_rows - m == 2) tile_rows<T, 2, NR>(a, m, w, n, width, store);
  if (num_rows - m == 1) tile_rows<T, 1, NR>(a, m, w, n, width, store);
}

// All rows of a against rows [first, last) of w; both have `width` columns, w's are contiguous.
template <class T, class Store>
static void multiply(const T* const* a, int64_t num_rows, const T* w, int64_t first, int64_t last,
                     int64_t width, const Store& store) {
  int64_t n = first;
  if (num_rows == 1)
    for (; n + 8 <= last; n += 8) tile_rows<T, 1, 8>(a, 0, w, n, width, store);
  if (num_rows == 2)
    for (; n + 8 <= last; n += 8) tile_rows<T, 2, 8>(a, 0, w, n, width, store);
  for (; n + 4 <= last; n += 4) tile_column<T, 4>(a, num_rows, w, n, width, store);
  for (; n < last; ++n) tile_column<T, 1>(a, num_rows, w, n, width, store);
}
