// The expert stage of one layer: rows grouped by expert, SwiGLU, weighted sum in expert order.

#include <atomic>
#include <vector>

#include "gemm.h"

struct Job {  // some columns of one expert's matrix, for some of its rows
  int64_t expert, first_row, num_rows, first, last;
};

// Slots (t * top_k + k) of each expert, ascending.
static std::vector<std::vector<int64_t>> group(const int64_t* ids, int64_t num_slots,
                                               int64_t num_experts) {
  std::vector<std::vector<int64_t>> slots(num_experts);
  for (int64_t s = 0; s < num_slots; ++s) slots[ids[s]].push_back(s);
  return slots;
}

static std::vector<Job> cut(const std::vector<std::vector<int64_t>>& slots, int64_t num_columns,
                            int64_t column_block, int64_t row_block) {
  std::vector<Job> jobs;
  for (int64_t e = 0; e < (int64_t)slots.size(); ++e)
    for (int64_t r = 0; r < (int64_t)slots[e].size(); r += row_block)
      for (int64_t c = 0; c < num_columns; c += column_block)
        jobs.push_back({e, r, std::min(row_block, (int64_t)slots[e].size() - r), c,
                        std::min(num_columns, c + column_block)});
  return jobs;
}

// x [T, D], ids and weights [T, K], gate_up[e] [2F, D] (gate rows, then up rows), down[e] [D, F],
// hidden [T * K, F] and y [T * K, D] for intermediate results, out [T, D].
// Returns 0, or 1 + e if rows were sent for an absent expert e.
template <class T>
static int64_t experts(const T* x, const int64_t* ids, const float* weights,
                       const T* const* gate_up, const T* const* down, T* hidden, float* y,
                       float* out, int64_t num_rows, int64_t top_k, int64_t num_experts,
                       int64_t width, int64_t expert_width, int threads) {
  int64_t num_slots = num_rows * top_k;
  auto slots = group(ids, num_slots, num_experts);
  for (int64_t e = 0; e < num_experts; ++e)
    if (!slots[e].empty() && !gate_up[e]) return 1 + e;
  auto up_jobs = cut(slots, expert_width, 32, 64);
  auto down_jobs = cut(slots, width, 64, 64);
  bool is_small = num_slots * width * expert_width < 32768;
  std::atomic<int64_t> next_up{0}, next_down{0};
#pragma omp parallel num_threads(threads) if (!is_small)
  {
    std::vector<const T*> rows;
    for (int64_t j; (j = next_up.fetch_add(1)) < (int64_t)up_jobs.size();) {
      const Job& job = up_jobs[j];
      const int64_t* mine = slots[job.expert].data() + job.first_row;
      rows.resize(job.num_rows);
      for (int64_t m = 0; m < job.num_rows; ++m) rows[m] = x + mine[m] / top_k * width;
      auto hidden_row = [&](int64_t m) { return hidden + mine[m] * expert_width; };
      auto store = [&](int64_t m, int64_t n, auto mr, auto nr, f32x16 v) {
        scatter<T, decltype(mr)::value, decltype(nr)::value>(v, m, n, hidden_row);
      };
      const T* gate = gate_up[job.expert];
      SwiGLU<T> swiglu{gate, gate + expert_width * width, width};
      multiply<T>(swiglu, rows.data(), job.num_rows, job.first, job.last, store);
    }
#pragma omp barrier
    for (int64_t j; (j = next_down.fetch_add(1)) < (int64_t)down_jobs.size();) {
      const Job& job = down_jobs[j];
      const int64_t* mine = slots[job.expert].data() + job.first_row;
      rows.resize(job.num_rows);
      for (int64_t m = 0; m < job.num_rows; ++m) rows[m] = hidden + mine[m] * expert_width;
      auto y_row = [&](int64_t m) { return y + mine[m] * width; };
      auto store = [&](int64_t m, int64_t n, auto mr, auto nr, f32x16 v) {
        scatter<float, decltype(mr)::value, decltype(nr)::value>(v, m, n, y_row);
      };
      Product<T> product{down[job.expert], expert_width};
      multiply<T>(product, rows.data(), job.num_rows, job.first, job.last, store);
    }
#pragma omp barrier
#pragma omp for schedule(static)
    for (int64_t t = 0; t < num_rows; ++t)
      for (int64_t d = 0; d < width; d += 16) {
        int64_t count = std::min<int64_t>(16, width - d);
        f32x16 sum = {};
        for (int64_t k = 0; k < top_k; ++k)  // expert ids ascend within a row
          sum += load_up_to(y + (t * top_k + k) * width + d, count) * weights[t * top_k + k];
        store_up_to(out + t * width + d, sum, count);
      }
  }
  return 0;
}

#define EXPORT(T, suffix)                                                                         \
  int64_t moe_experts_##suffix(const T* x, const int64_t* ids, const float* weights,              \
                               const T* const* gate_up, const T* const* down, T* hidden,          \
                               float* y, float* out, int64_t num_rows, int64_t top_k,             \
                               int64_t num_experts, int64_t width, int64_t expert_width,          \
                               int64_t threads) {                                                 \
    return experts<T>(x, ids, weights, gate_up, down, hidden, y, out, num_rows, top_k,            \
                      num_experts, width, expert_width, (int)threads);                            \
  }

extern "C" {
EXPORT(bf16, bf16)
EXPORT(float, f32)
}
