// Linear layers with an addition of one bit per weight.

#include "signs.h"

#include "../threads.h"

// out[t][n] = y[t][n] + the additions (+ residual[t][n]).
template <class T>
static void add_signs(const Signs& s, const T* x, int64_t row_step, const T* y, const T* residual,
                      T* out, int64_t num_rows, int64_t threads) {
  const int64_t num_groups = groups(panels(s.num_outputs));
  if (num_rows * s.num_outputs * s.width < 131072) threads = 1;
  parallel_for(num_groups, threads, [&](int64_t g) {
    const int64_t first = g * kGroupColumns, count = std::min(kGroupColumns, s.num_outputs - first);
    alignas(64) float c[kGroupColumns] = {}, with[kGroupColumns];
    for (int64_t t = 0; t < num_rows; ++t) {
      const int64_t at = t * s.num_outputs + first;
      for (int64_t n = 0; n < count; n += kLanes) store16(c + n, load_up_to(y + at + n, count - n));
      const float* sums = with_signs(s, x + t * row_step, g, c, with);
      for (int64_t n = 0; n < count; n += kLanes) {
        f32x16 v = load16(sums + n);
        if (residual)  // the layer's own result is rounded before it is added
          v = round_to(x, v) + load_up_to(residual + at + n, count - n);
        store_up_to(out + at + n, v, count - n);
      }
    }
  });
}

#define EXPORT(T, suffix)                                                                         \
  void moe_add_signs_##suffix(const Signs* s, const T* x, int64_t row_step, const T* y,           \
                              const T* residual, T* out, int64_t num_rows, int64_t threads) {     \
    add_signs<T>(*s, x, row_step, y, residual, out, num_rows, threads);                           \
  }

extern "C" {
EXPORT(bf16, bf16)
EXPORT(float, f32)
}
