// RMSNorm and the largest value, row by row.

#include <algorithm>

#include "largest.h"
#include "norm.h"
#include "threads.h"

template <class T>
static void rms_norm(const T* x, int64_t row_step, const T* weight, T* out, int64_t num_rows,
                     int64_t width, float eps, int64_t threads) {
  int64_t rows_per_job = 16384 / width + 1;
  parallel_for((num_rows + rows_per_job - 1) / rows_per_job,
               num_rows * width > 65536 ? threads : 1, [&](int64_t j) {
                 int64_t last = std::min(num_rows, (j + 1) * rows_per_job);
                 for (int64_t t = j * rows_per_job; t < last; ++t)
                   norm_row(x + t * row_step, weight, out + t * width, width, eps);
               });
}

#define EXPORT(T, suffix)                                                                         \
  void moe_rms_norm_##suffix(const T* x, int64_t row_step, const T* weight, T* out,               \
                             int64_t num_rows, int64_t width, double eps, int64_t threads) {      \
    rms_norm<T>(x, row_step, weight, out, num_rows, width, (float)eps, threads);                  \
  }

extern "C" {
EXPORT(bf16, bf16)
EXPORT(float, f32)

// Of each row of x [R, N] the first of its largest values, and that value: NaN if there is a NaN.
void moe_largest(const float* x, int64_t* places, float* values, int64_t num_rows, int64_t width,
                 int64_t threads) {
  parallel_for(num_rows, num_rows * width > 65536 ? threads : 1, [&](int64_t r) {
    const float* row = x + r * width;
    places[r] = first_largest(row, width);
    values[r] = has_nan(row, width) ? std::numeric_limits<float>::quiet_NaN() : row[places[r]];
  });
}
}
