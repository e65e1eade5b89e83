// Linear layers with an addition of one bit per weight.

#include <vector>

#include "../adapters.h"
#include "../threads.h"

struct SignJob {  // some rows of x against some panels
  const Signs* signs;
  int64_t first, count, first_panel, last_panel;
};

constexpr int64_t kRowsOfJob = 16, kPanelsOfJob = 32;

static void cut(const Signs& s, int64_t first, int64_t count, std::vector<SignJob>& jobs) {
  const int64_t last_panel = panels(s.num_outputs);
  for (int64_t t = 0; t < count; t += kRowsOfJob)
    for (int64_t p = 0; p < last_panel; p += kPanelsOfJob)
      jobs.push_back({&s, first + t, std::min(kRowsOfJob, count - t), p,
                      std::min(last_panel, p + kPanelsOfJob)});
}

// y[row(i)] += the additions, for the rows i of each job.
template <class T, class Row>
static void add_to_rows(const std::vector<SignJob>& jobs, const Row& row, const T* x,
                        int64_t row_step, T* y, int64_t threads) {
  parallel_for(jobs.size(), jobs.size() < 4 ? 1 : threads, [&](int64_t j) {
    const SignJob& job = jobs[j];
    const int64_t width = job.signs->num_outputs;
    for (int64_t i = job.first; i < job.first + job.count; ++i) {
      T* to = y + row(i) * width;
      const float* sums = sign_sums(x + row(i) * row_step, job.signs->width);
      add_signs(*job.signs, sums, job.first_panel, job.last_panel, [&](int64_t n, f32x16 v) {
        store_up_to(to + n, load_up_to(to + n, width - n) + v, width - n);
      });
    }
  });
}

// y[t] += the additions of its adapter to one of a layer's matrices.
template <class T>
static void row_signs(const RowAdapters& r, int64_t layer, int64_t matrix, const T* x,
                      int64_t row_step, T* y, int64_t threads) {
  std::vector<SignJob> jobs;
  for (int64_t a = 0; a < r.num_adapters; ++a) {
    const LayerTune* tune = r.layers[a][layer].tune;
    const Signs* signs = tune ? tune->signs[matrix] : nullptr;
    if (signs) cut(*signs, r.starts[a], r.starts[a + 1] - r.starts[a], jobs);
  }
  add_to_rows(jobs, [&](int64_t i) { return r.order[i]; }, x, row_step, y, threads);
}

// y[t] += the additions.
template <class T>
static void all_signs(const Signs& s, const T* x, int64_t row_step, T* y, int64_t num_rows,
                      int64_t threads) {
  std::vector<SignJob> jobs;
  cut(s, 0, num_rows, jobs);
  add_to_rows(jobs, [](int64_t i) { return i; }, x, row_step, y, threads);
}

#define EXPORT(T, suffix)                                                                         \
  void moe_add_signs_##suffix(const Signs* s, const T* x, int64_t row_step, T* y,                 \
                              int64_t num_rows, int64_t threads) {                                \
    all_signs<T>(*s, x, row_step, y, num_rows, threads);                                          \
  }                                                                                               \
  void moe_row_signs_##suffix(const RowAdapters* r, int64_t layer, int64_t matrix, const T* x,    \
                              int64_t row_step, T* y, int64_t threads) {                          \
    row_signs<T>(*r, layer, matrix, x, row_step, y, threads);                                     \
  }

extern "C" {
EXPORT(bf16, bf16)
EXPORT(float, f32)
}
