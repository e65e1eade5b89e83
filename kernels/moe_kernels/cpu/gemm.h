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

template <int N>
struct Size {
  static constexpr int value = N;
};

// What a tile holds: products with the rows of one matrix ...
template <class T>
struct Product {
  const T* w;
  int64_t width;
  template <int MR, int NR>
  f32x16 at(const T* const* a, int64_t n) const {
    return tile<T, MR, NR>(a, w + n * width, width, width);
  }
};

// ... or silu(gate) * up, from two.
template <class T>
struct SwiGLU {
  const T *gate, *up;
  int64_t width;
  template <int MR, int NR>
  f32x16 at(const T* const* a, int64_t n) const {
    f32x16 g = tile<T, MR, NR>(a, gate + n * width, width, width);
    return silu16(g) * tile<T, MR, NR>(a, up + n * width, width, width);
  }
};

// Calls store(m, n, Size<MR>, Size<NR>, values): rows m .. m + MR, columns n .. n + NR.
template <class T, int MR, int NR, class Kind, class Store>
static inline void one_tile(const Kind& kind, const T* const* a, int64_t m, int64_t n,
                            const Store& store) {
  store(m, n, Size<MR>{}, Size<NR>{}, kind.template at<MR, NR>(a + m, n));
}

template <class T, int NR, class Kind, class Store>
static inline void tile_column(const Kind& kind, const T* const* a, int64_t num_rows, int64_t n,
                               const Store& store) {
  int64_t m = 0;
  for (; m + 4 <= num_rows; m += 4) one_tile<T, 4, NR>(kind, a, m, n, store);
  if (num_rows - m == 3) one_tile<T, 3, NR>(kind, a, m, n, store);
  if (num_rows - m == 2) one_tile<T, 2, NR>(kind, a, m, n, store);
  if (num_rows - m == 1) one_tile<T, 1, NR>(kind, a, m, n, store);
}

// All rows of a against columns [first, last) of the result.
template <class T, class Kind, class Store>
static void multiply(const Kind& kind, const T* const* a, int64_t num_rows, int64_t first,
                     int64_t last, const Store& store) {
  int64_t n = first;
  if (num_rows == 1)
    for (; n + 8 <= last; n += 8) one_tile<T, 1, 8>(kind, a, 0, n, store);
  if (num_rows == 2)
    for (; n + 8 <= last; n += 8) one_tile<T, 2, 8>(kind, a, 0, n, store);
  for (; n + 4 <= last; n += 4) tile_column<T, 4>(kind, a, num_rows, n, store);
  for (; n < last; ++n) tile_column<T, 1>(kind, a, num_rows, n, store);
}

// A tile's lanes, converted at once, copied to its rows: row(m) is where row m begins.
template <class T, int MR, int NR, class Row>
static inline void scatter(f32x16 values, int64_t m, int64_t n, const Row& row) {
  T converted[16];
  store16(converted, values);
  for (int i = 0; i < MR; ++i) memcpy(row(m + i) + n, converted + i * NR, NR * sizeof(T));
}

template <class T, int MR, int NR, class Row>
static inline f32x16 gather(int64_t m, int64_t n, const Row& row) {
  T found[16] = {};
  for (int i = 0; i < MR; ++i) memcpy(found + i * NR, row(m + i) + n, NR * sizeof(T));
  return load16(found);
}
