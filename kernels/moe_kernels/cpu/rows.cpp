// RMSNorm, row by row.

#include "norm.h"
#include "pool.h"

#define EXPORT(T, suffix)                                                                         \
  void moe_rms_norm_##suffix(const T* x, int64_t row_step, const T* weight, T* out,               \
                             int64_t num_rows, int64_t width, double eps, int64_t threads) {      \
    parallel_rows(num_rows * width > 65536 ? threads : 1, num_rows, 16, [&](int64_t t) {          \
      norm_row(x + t * row_step, weight, out + t * width, width, (float)eps);                     \
    });                                                                                           \
  }

extern "C" {
EXPORT(bf16, bf16)
EXPORT(float, f32)
}
