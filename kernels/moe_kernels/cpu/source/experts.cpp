// The expert stage of one layer: rows grouped by expert, gated MLPs, weighted sum in expert order.

#include <numeric>
#include <vector>

#include "low_bits/signs.h"
#include "low_bits/weights.h"
#include "scratch.h"
#include "threads.h"

struct SignedExpert {  // additions of one bit per weight, mirrored in native_signs.py
  Signs gate_up, down;
};

struct Experts {  // mirrored in native_experts.py
  const uint32_t* const* gate_up;    // by expert: gate and up panels alternate; null: absent
  const uint32_t* const* down;       // by expert
  const float* const* gate_up_bias;  // by expert: [2][F], null if there are none
  const float* const* down_bias;     // by expert: [D]
  int64_t num_experts, width, expert_width, threads;
  float alpha, limit, up_offset;  // limit: infinity if there is none
  Form gate_up_form, down_form;
  const SignedExpert* signs;  // by expert, or null
};

struct Part {  // some slots of one expert against some groups of columns
  int64_t expert, first, count, first_group, last_group;
};

// Slots (t * top_k + k) sorted by expert: those of e are order[starts[e] .. starts[e + 1]). Those of
// expert -1, which is elsewhere, are left out.
struct Slots {
  std::vector<int64_t> starts, order;

  Slots(const int64_t* ids, int64_t num_slots, int64_t num_experts)
      : starts(num_experts + 1), order(num_slots) {
    for (int64_t s = 0; s < num_slots; ++s)
      if (ids[s] >= 0) ++starts[ids[s] + 1];
    std::partial_sum(starts.begin(), starts.end(), starts.begin());
    std::vector<int64_t> next(starts.begin(), starts.end() - 1);
    for (int64_t s = 0; s < num_slots; ++s)
      if (ids[s] >= 0) order[next[ids[s]]++] = s;
  }

  int64_t count(int64_t expert) const { return starts[expert + 1] - starts[expert]; }
};

// Experts with most rows first, so that the last parts are small ones.
static std::vector<Part> cut(const Slots& slots, const std::vector<int64_t>& by_size,
                             int64_t rows_per_part, int64_t num_groups, int64_t threads) {
  int64_t step = groups_per_job(num_groups * (int64_t)by_size.size(), threads);
  std::vector<Part> parts;
  for (int64_t e : by_size)
    for (int64_t r = 0; r < slots.count(e); r += rows_per_part)
      for (int64_t g = 0; g < num_groups; g += step)
        parts.push_back({e, slots.starts[e] + r, std::min(rows_per_part, slots.count(e) - r), g,
                         std::min(num_groups, g + step)});
  return parts;
}

static inline f32x16 activate(f32x16 gate, f32x16 up, const Experts& e) {
  gate = select(gate > splat(e.limit), splat(e.limit), gate);
  up = select(up > splat(e.limit), splat(e.limit), up);
  up = select(up < splat(-e.limit), splat(-e.limit), up);
  return gate / (1.0f + exp16(gate * -e.alpha)) * (up + e.up_offset);
}

template <class T>
static Group up_columns(const Experts& e, int64_t expert, int64_t group) {
  return columns_of<T>(e.gate_up_form, e.gate_up[expert], 2 * panels(e.expert_width), group,
                       e.width);
}

template <class T>
static Group down_columns(const Experts& e, int64_t expert, int64_t group) {
  return columns_of<T>(e.down_form, e.down[expert], panels(e.width), group, e.expert_width);
}

// 32 values of the hidden layer, from up to 2 gate and 2 up panels.
template <class T>
static void gate_up(const Experts& e, const Part& part, int64_t group, const uint32_t* next,
                    const int64_t* slots, const Rows<T>& x, int64_t top_k, T* hidden) {
  int64_t width = e.expert_width, first = group * kGroupColumns / 2;
  const float* bias = e.gate_up_bias ? e.gate_up_bias[part.expert] : nullptr;
  auto index = [&](int64_t m) { return slots[m] / top_k; };
  auto store = [&](int64_t m, const float* c) {
    alignas(64) float sums[kGroupColumns];
    if (e.signs)
      c = with_signs(e.signs[part.expert].gate_up, x.data + index(m) * x.step, group, c, sums);
    T* out = hidden + slots[m] * width;
    for (int64_t n = first; n < std::min(width, first + kGroupColumns / 2); n += kLanes, c += 32) {
      f32x16 gate = load16(c), up = load16(c + kLanes);
      if (bias) {
        gate += load_up_to(bias + n, width - n);
        up += load_up_to(bias + width + n, width - n);
      }
      store_up_to(out + n, activate(gate, up, e), width - n);
    }
  };
  multiply_weight<T>(e.gate_up_form, up_columns<T>(e, part.expert, group), next, e.width, x,
                     part.count, index, store);
}

template <class T>
static void down(const Experts& e, const Part& part, int64_t group, const uint32_t* next,
                 const int64_t* slots, const Rows<T>& hidden, float* y) {
  int64_t first = group * kGroupColumns, last = std::min(e.width, first + kGroupColumns);
  const float* bias = e.down_bias ? e.down_bias[part.expert] : nullptr;
  auto index = [&](int64_t m) { return slots[m]; };
  auto store = [&](int64_t m, const float* c) {
    alignas(64) float sums[kGroupColumns];
    if (e.signs)
      c = with_signs(e.signs[part.expert].down, hidden.data + index(m) * hidden.step, group, c, sums);
    float* out = y + slots[m] * e.width;
    for (int64_t n = first; n < last; n += kLanes, c += kLanes) {
      f32x16 v = load16(c);
      if (bias) v += load_up_to(bias + n, e.width - n);
      store_up_to(out + n, v, e.width - n);
    }
  };
  multiply_weight<T>(e.down_form, down_columns<T>(e, part.expert, group), next, e.expert_width,
                     hidden, part.count, index, store);
}

// Calls work(part, group, next) for every group of every part; `next` is the address of the group
// that the same thread is likely to compute next.
template <class Columns, class Work>
static void for_parts(const std::vector<Part>& parts, int64_t threads, Columns columns,
                      const Experts& e, const Work& work) {
  parallel_for(parts.size(), threads, [&](int64_t j) {
    const Part &part = parts[j], *after = parts.data() + j + threads;
    if (j + threads >= (int64_t)parts.size()) after = nullptr;
    for (int64_t g = part.first_group; g < part.last_group; ++g) {
      const uint32_t* next = nullptr;
      if (g + 1 < part.last_group) next = columns(e, part.expert, g + 1).data;
      else if (after) next = columns(e, after->expert, after->first_group).data;
      work(part, g, next);
    }
  });
}

// The sum of weights * y over the choices that are here, exact in any order and grouping
// (expert_mlp.combine_choices has the reasons and the limits): products are exact in double, and
// t + C - C is t's nearest multiple of 2^-36. -fassociative-math would undo it; fused operations do
// no harm.
constexpr double kGrid = 1.5 * (1 << 16);

template <class Out>
static void weigh(const float* y, const int64_t* ids, const float* weights, int64_t top_k,
                  int64_t width, Out* out) {
  int64_t d = 0;
  for (constexpr int64_t kStep = 32; d + kStep <= width; d += kStep) {
    f64x8 sums[kStep / 8] = {};
    for (int64_t k = 0; k < top_k; ++k) {
      if (ids[k] < 0) continue;  // y is not written there
      const float* from = y + k * width + d;
#pragma GCC unroll 4
      for (int64_t i = 0; i < kStep / 8; ++i)
        sums[i] += load8_wide(from + 8 * i) * (double)weights[k] + kGrid - kGrid;
    }
#pragma GCC unroll 4
    for (int64_t i = 0; i < kStep / 8; ++i) store8(out + d + 8 * i, sums[i]);
  }
  for (; d < width; ++d) {
    double sum = 0;
    for (int64_t k = 0; k < top_k; ++k)
      if (ids[k] >= 0) sum += (double)y[k * width + d] * weights[k] + kGrid - kGrid;
    out[d] = (Out)sum;
  }
}

template <class T>
static Rows<T> input_rows(const Experts& e, const T* x, int64_t num_rows, int64_t threads) {
  static thread_local Scratch scratch;
  return make_rows(e.gate_up_form, x, e.width, num_rows, e.width, scratch, threads);
}

// A slot without an expert here has no hidden row; what lies there is quantised and not read.
template <class T>
static Rows<T> hidden_rows(const Experts& e, const T* hidden, int64_t num_rows, int64_t threads) {
  static thread_local Scratch scratch;
  return make_rows(e.down_form, hidden, e.expert_width, num_rows, e.expert_width, scratch, threads);
}

// x [T, D], ids and weights [T, K], out [T, D]: the sum in double, or rounded once to float.
// Returns 0, or 1 + e if rows were sent for an absent expert e.
template <class T, class Out>
static int64_t experts(const Experts& e, const T* x, const int64_t* ids, const float* weights,
                       Out* out, int64_t num_rows, int64_t top_k) {
  static thread_local Scratch hidden_scratch, y_scratch;
  int64_t num_slots = num_rows * top_k;
  Slots slots(ids, num_slots, e.num_experts);
  std::vector<int64_t> by_size;
  for (int64_t i = 0; i < e.num_experts; ++i)
    if (slots.count(i)) {
      if (!e.gate_up[i]) return 1 + i;
      by_size.push_back(i);
    }
  std::stable_sort(by_size.begin(), by_size.end(),
                   [&](int64_t a, int64_t b) { return slots.count(a) > slots.count(b); });
  T* hidden = hidden_scratch.get<T>(num_slots * e.expert_width);
  float* y = y_scratch.get<float>(num_slots * e.width);
  int64_t threads = num_slots * e.width * e.expert_width < 65536 ? 1 : e.threads;
  auto up_parts =
      cut(slots, by_size, row_block<T>(e.width), groups(2 * panels(e.expert_width)), threads);
  auto down_parts =
      cut(slots, by_size, row_block<T>(e.expert_width), groups(panels(e.width)), threads);
  const Rows<T> inputs = input_rows(e, x, num_rows, threads);
  for_parts(up_parts, threads, up_columns<T>, e, [&](const Part& p, int64_t group, auto next) {
    gate_up<T>(e, p, group, next, slots.order.data() + p.first, inputs, top_k, hidden);
  });
  const Rows<T> rows = hidden_rows(e, hidden, num_slots, threads);
  for_parts(down_parts, threads, down_columns<T>, e, [&](const Part& p, int64_t group, auto next) {
    down<T>(e, p, group, next, slots.order.data() + p.first, rows, y);
  });
  constexpr int64_t kRows = 16;
  parallel_for((num_rows + kRows - 1) / kRows, threads, [&](int64_t j) {
    for (int64_t t = j * kRows; t < std::min(num_rows, (j + 1) * kRows); ++t)
      weigh(y + t * top_k * e.width, ids + t * top_k, weights + t * top_k, top_k, e.width,
            out + t * e.width);
  });
  return 0;
}

// One MLP in two halves, so that ranks can share the columns of each: `e` has columns of the gate
// and up projections (hidden: [T, F of them]), or columns of the down projection (out: [T, D of
// them]) and the whole hidden layer. Both equal the result of `experts` in these columns, bit for bit.
template <class T>
static void mlp_hidden(const Experts& e, const T* x, T* hidden, int64_t num_rows) {
  std::vector<int64_t> ids(num_rows);
  Slots slots(ids.data(), num_rows, 1);
  int64_t threads = num_rows * e.width * e.expert_width < 65536 ? 1 : e.threads;
  auto parts = cut(slots, {0}, row_block<T>(e.width), groups(2 * panels(e.expert_width)), threads);
  const Rows<T> inputs = input_rows(e, x, num_rows, threads);
  for_parts(parts, threads, up_columns<T>, e, [&](const Part& p, int64_t group, auto next) {
    gate_up<T>(e, p, group, next, slots.order.data() + p.first, inputs, 1, hidden);
  });
}

template <class T>
static void mlp_down(const Experts& e, const T* hidden, const float* weights, float* out,
                     int64_t num_rows) {
  std::vector<int64_t> ids(num_rows);
  Slots slots(ids.data(), num_rows, 1);
  int64_t threads = num_rows * e.width * e.expert_width < 65536 ? 1 : e.threads;
  auto parts = cut(slots, {0}, row_block<T>(e.expert_width), groups(panels(e.width)), threads);
  const Rows<T> rows = hidden_rows(e, hidden, num_rows, threads);
  for_parts(parts, threads, down_columns<T>, e, [&](const Part& p, int64_t group, auto next) {
    down<T>(e, p, group, next, slots.order.data() + p.first, rows, out);
  });
  for (int64_t t = 0; t < num_rows; ++t)
    weigh(out + t * e.width, ids.data() + t, weights + t, 1, e.width, out + t * e.width);
}

#define EXPORT_HALVES(T, suffix)                                                                  \
  void moe_mlp_hidden_##suffix(const Experts* e, const T* x, T* hidden, int64_t num_rows) {       \
    mlp_hidden<T>(*e, x, hidden, num_rows);                                                       \
  }                                                                                               \
  void moe_mlp_down_##suffix(const Experts* e, const T* hidden, const float* weights, float* out, \
                             int64_t num_rows) {                                                  \
    mlp_down<T>(*e, hidden, weights, out, num_rows);                                              \
  }

#define EXPORT(T, suffix, Out)                                                                    \
  int64_t moe_experts_##suffix(const Experts* e, const T* x, const int64_t* ids,                  \
                               const float* weights, Out* out, int64_t num_rows, int64_t top_k) { \
    return experts<T>(*e, x, ids, weights, out, num_rows, top_k);                                 \
  }

extern "C" {
EXPORT(bf16, bf16, float)
EXPORT(float, f32, float)
EXPORT(bf16, partial_bf16, double)
EXPORT(float, partial_f32, double)
EXPORT_HALVES(bf16, bf16)
EXPORT_HALVES(float, f32)
}
