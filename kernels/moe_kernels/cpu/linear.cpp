// Dense linear layers.

#include <vector>

#include "gemm.h"

static constexpr int64_t kRowBlock = 64;
static constexpr int64_t kColumnBlock = 64;

// out[t][n] = sum_k x[t][k] w[n][k] (+ bias[n]) (+ residual[t][n]).
template <class T>
static void linear(const T* x, const T* w, const T* bias, const T* residual, T* out,
                   int64_t num_rows, int64_t num_outputs, int64_t width,
                   int threads) {
  std::vector<const T*> rows(num_rows);
  for (int64_t t = 0; t < num_rows; ++t) rows[t] = x + t * width;
  int64_t row_blocks = (num_rows + kRowBlock - 1) / kRowBlock;
  int64_t column_blocks = (num_outputs + kColumnBlock - 1) / kColumnBlock;
  bool is_small = num_rows * num_outputs * width < 65536;
#pragma omp parallel for num_threads(threads) collapse(2) schedule(static) if (!is_small)
  for (int64_t c = 0; c < column_blocks; ++c)
    for (int64_t r = 0; r < row_blocks; ++r) {
      int64_t first_row = r * kRowBlock, count = std::min(kRowBlock, num_rows - first_row);
      int64_t first = c * kColumnBlock, last = std::min(num_outputs, first + kColumnBlock);
      auto out_row = [&](int64_t m) { return out + (first_row + m) * num_outputs; };
      auto residual_row = [&](int64_t m) { return residual + (first_row + m) * num_outputs; };
      auto bias_row = [&](int64_t) { return bias; };
      auto store = [&](int64_t m, int64_t n, auto mr, auto nr, f32x16 v) {
        constexpr int MR = decltype(mr)::value, NR = decltype(nr)::value;
        if (bias) v += gather<T, MR, NR>(m, n, bias_row);
        if (residual) {  // the layer's own result is rounded before it is added
          T rounded[16];
          store16(rounded, v);
          v = load16(rounded) + gather<T, MR, NR>(m, n, residual_row);
        }
        scatter<T, MR, NR>(v, m, n, out_row);
      };
      Product<T> product{w, width};
      multiply<T>(product, rows.data() + first_row, count, first, last, store);
    }
}

#define EXPORT(T, suffix)                                                                         \
  void moe_linear_##suffix(const T* x, const T* w, const T* bias, const T* residual, T* out,      \
                           int64_t num_rows, int64_t num_outputs, int64_t width,                  \
                           int64_t threads) {                                                     \
    linear<T>(x, w, bias, residual, out, num_rows, num_outputs, width, (int)threads);             \
  }

extern "C" {
EXPORT(bf16, bf16)
EXPORT(float, f32)
}
