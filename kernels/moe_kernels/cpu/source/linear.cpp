// Dense linear layers: one matrix, one matrix per head, the router's in fp32.

#include "adapters.h"
#include "low_bits/weights.h"
#include "scratch.h"
#include "threads.h"

#include <vector>

// A weight of any form, ready for moe_linear. Mirrored in native_linear.py.
struct Linear {
  const uint32_t* packed;  // heads' matrices [N, K], one after the other; floats if there are several
  const float* bias;       // [N], or null
  int64_t num_heads, num_outputs, width, threads;
  Form form;
};

struct Block {  // some rows of x against one group of columns
  int64_t head, group, first_row, num_rows;
  int64_t next_group;  // the group that the same thread is likely to compute next
};

// Calls work(block) for every block, in parallel where it pays.
template <class T, class Work>
static void for_blocks(const Linear& l, int64_t num_rows, const Work& work) {
  bool is_small = num_rows * l.num_heads * l.num_outputs * l.width < 131072;
  int64_t threads = is_small ? 1 : l.threads;
  int64_t rows = row_block<T>(l.width), row_blocks = (num_rows + rows - 1) / rows;
  int64_t columns = groups(panels(l.num_outputs)), step = groups_per_job(columns, threads);
  int64_t column_jobs = (columns + step - 1) / step;
  parallel_for(row_blocks * l.num_heads * column_jobs, threads, [&](int64_t j) {
    int64_t first = j / column_jobs / l.num_heads * rows, group = j % column_jobs * step;
    int64_t last = std::min(columns, group + step);
    for (; group < last; ++group) {
      int64_t next = group + 1 < last ? group + 1 : group + 1 + (threads - 1) * step;
      work(Block{j / column_jobs % l.num_heads, group, first, std::min(rows, num_rows - first),
                 next});
    }
  });
}

template <class T>
static Group columns_of(const Linear& l, int64_t head, int64_t group) {
  int64_t num_panels = panels(l.num_outputs);
  return columns_of<T>(l.form, l.packed + head * num_panels * kLanes * units<T>(l.width),
                       num_panels, group, l.width);
}

template <class T, class Index, class Store>
static void multiply_block(const Linear& l, const Block& b, const Rows<T>& rows, const Index& index,
                           const Store& store) {
  multiply_weight<T>(l.form, columns_of<T>(l, b.head, b.group),
                     columns_of<T>(l, b.head, b.next_group).data, l.width, rows, b.num_rows, index,
                     store);
}

// out[t][n] = sum_k x[t][k] w[n][k] (+ bias[n]) (+ residual[t][n]).
template <class T>
static void linear(const Linear& l, const T* x, int64_t row_step, const T* residual, T* out,
                   int64_t num_rows) {
  static thread_local Scratch quantised;
  const Rows<T> rows = make_rows(l.form, x, row_step, num_rows, l.width, quantised, l.threads);
  for_blocks<T>(l, num_rows, [&](const Block& b) {
    int64_t first = b.group * kGroupColumns, count = std::min(kGroupColumns, l.num_outputs - first);
    auto index = [&](int64_t m) { return b.first_row + m; };
    auto store = [&](int64_t m, const float* c) {
      int64_t at = (b.first_row + m) * l.num_outputs + first;
      for (int64_t n = 0; n < count; n += kLanes) {
        f32x16 v = load16(c + n);
        if (l.bias) v += load_up_to(l.bias + first + n, count - n);
        if (residual)  // the layer's own result is rounded before it is added
          v = round_to(x, v) + load_up_to(residual + at + n, count - n);
        store_up_to(out + at + n, v, count - n);
      }
    };
    multiply_block<T>(l, b, rows, index, store);
  });
}

// out[t][h][n] = sum_k x[t][h][k] w[h][n][k].
template <class T>
static void head_linear(const Linear& l, const T* x, int64_t row_step, int64_t head_step, T* out,
                        int64_t num_rows) {
  for_blocks<T>(l, num_rows, [&](const Block& b) {
    int64_t first = b.group * kGroupColumns, count = std::min(kGroupColumns, l.num_outputs - first);
    const Rows<T> rows{x + b.head * head_step, row_step, {}};
    auto index = [&](int64_t m) { return b.first_row + m; };
    auto store = [&](int64_t m, const float* c) {
      T* to = out + ((b.first_row + m) * l.num_heads + b.head) * l.num_outputs + first;
      for (int64_t n = 0; n < count; n += kLanes) store_up_to(to + n, load16(c + n), count - n);
    };
    multiply_block<T>(l, b, rows, index, store);
  });
}

// y[t] += (x[t] A^T) B^T for the rows of each adapter, with its matrices A and B. As by calls of
// `linear`, those with B having y as their residual.
template <class T>
static void low_rank(const RowAdapters& r, int64_t layer, int64_t matrix, const T* x,
                     int64_t row_step, T* y, int64_t threads) {
  struct Job { const LowRank* added; int64_t first, count; };
  std::vector<Job> jobs;
  for (int64_t i = 0; i < r.num_adapters; ++i) {
    const LowRank* added = r.layers[i][layer].linears[matrix];
    for (int64_t t = r.starts[i]; added && t < r.starts[i + 1]; t += kAdapterRows)
      jobs.push_back({added, t, std::min(kAdapterRows, r.starts[i + 1] - t)});
  }
  parallel_for(jobs.size(), threads, [&](int64_t j) {
    static thread_local Scratch scratch;
    const Job& job = jobs[j];
    const LowRank& added = *job.added;
    const int64_t *rows = r.order + job.first, rank = added.a->num_outputs;
    T* narrow = scratch.get<T>(job.count * rank);
    multiply_rounded<T>(added.a->packed, rank, added.a->width, job.count,
                        [&](int64_t m) { return x + rows[m] * row_step; }, narrow);
    for (int64_t p = 0; p < added.num_parts; ++p) {
      const LowRankPart& part = added.parts[p];
      const int64_t width = part.b->num_outputs;
      auto store = [&](int64_t m, int64_t n, const float* c) {
        T* to = y + rows[m] * added.num_outputs + part.first_output;
        for (int64_t end = std::min(width, n + kGroupColumns); n < end; n += kLanes, c += kLanes)
          store_up_to(to + n, round_to(x, load16(c)) + load_up_to(to + n, width - n), width - n);
      };
      multiply_packed<T>(part.b->packed, width, part.b->width, job.count,
                         [&](int64_t m) { return narrow + m * rank + part.first_rank; }, store);
    }
  });
}

// y[t] = the up-projections of x[t] for the rows whose fine-tune has its own. Neighbouring rows of
// one adapter are one product.
template <class T>
static void row_heads(const RowAdapters& r, int64_t layer, int64_t matrix, const T* x,
                      int64_t row_step, int64_t head_step, T* y) {
  for (int64_t a = 0; a < r.num_adapters; ++a) {
    const LayerTune* tune = r.layers[a][layer].tune;
    const Linear* own = tune ? tune->heads[matrix] : nullptr;
    for (int64_t i = r.starts[a], end; own && i < r.starts[a + 1]; i = end) {
      const int64_t first = r.order[i];
      for (end = i + 1; end < r.starts[a + 1] && r.order[end] == first + end - i;) ++end;
      head_linear<T>(*own, x + first * row_step, row_step, head_step,
                     y + first * own->num_heads * own->num_outputs, end - i);
    }
  }
}

// fp32 weights and results for every type of x.
template <class T>
static void router_linear(const Linear& l, const T* x, int64_t row_step, float* out,
                          int64_t num_rows) {
  static thread_local Scratch widened;
  float* rows = widened.get<float>(num_rows * l.width);
  for (int64_t t = 0; t < num_rows; ++t)
    for (int64_t k = 0; k < l.width; k += kLanes)
      store_up_to(rows + t * l.width + k, load_up_to(x + t * row_step + k, l.width - k),
                  l.width - k);
  linear<float>(l, rows, l.width, nullptr, out, num_rows);
}

#define EXPORT(T, suffix)                                                                         \
  void moe_linear_##suffix(const Linear* l, const T* x, int64_t row_step, const T* residual,      \
                           T* out, int64_t num_rows) {                                            \
    linear<T>(*l, x, row_step, residual, out, num_rows);                                          \
  }                                                                                               \
  void moe_head_linear_##suffix(const Linear* l, const T* x, int64_t row_step, int64_t head_step, \
                                T* out, int64_t num_rows) {                                       \
    head_linear<T>(*l, x, row_step, head_step, out, num_rows);                                    \
  }                                                                                               \
  void moe_low_rank_##suffix(const RowAdapters* r, int64_t layer, int64_t matrix, const T* x,     \
                             int64_t row_step, T* y, int64_t threads) {                           \
    low_rank<T>(*r, layer, matrix, x, row_step, y, threads);                                      \
  }                                                                                               \
  void moe_row_heads_##suffix(const RowAdapters* r, int64_t layer, int64_t matrix, const T* x,    \
                              int64_t row_step, int64_t head_step, T* y) {                        \
    row_heads<T>(*r, layer, matrix, x, row_step, head_step, y);                                   \
  }                                                                                               \
  void moe_router_linear_##suffix(const Linear* l, const T* x, int64_t row_step, float* out,      \
                                  int64_t num_rows) {                                             \
    router_linear<T>(*l, x, row_step, out, num_rows);                                             \
  }

extern "C" {
EXPORT(bf16, bf16)
EXPORT(float, f32)
}
