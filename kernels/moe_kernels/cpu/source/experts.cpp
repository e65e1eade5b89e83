// The expert stage of one layer: rows grouped by expert, gated MLPs, weighted sum in expert order.

#include "expert_changes.h"
#include "scratch.h"

struct Part {  // some slots of one expert against some groups of columns
  int64_t expert, first, count, first_group, last_group;
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
                    const int64_t* slots, const Rows<T>& x, int64_t top_k,
                    const Additions<T>& added, T* hidden) {
  int64_t width = e.expert_width, first = group * kGroupColumns / 2;
  const float* bias = e.gate_up_bias ? e.gate_up_bias[part.expert] : nullptr;
  auto index = [&](int64_t m) { return slots[m] / top_k; };
  auto store = [&](int64_t m, const float* c) {
    T* out = hidden + slots[m] * width;
    const float* more = added.up(slots[m]);
    for (int64_t n = first; n < std::min(width, first + kGroupColumns / 2); n += kLanes, c += 32) {
      f32x16 gate = load16(c), up = load16(c + kLanes);
      if (bias) {
        gate += load_up_to(bias + n, width - n);
        up += load_up_to(bias + width + n, width - n);
      }
      if (more) gate += load16(more + n), up += load16(more + added.padded() + n);
      store_up_to(out + n, activate(gate, up, e), width - n);
    }
  };
  multiply_weight<T>(e.gate_up_form, up_columns<T>(e, part.expert, group), next, e.width, x,
                     part.count, index, store);
}

template <class T>
static void down(const Experts& e, const Part& part, int64_t group, const uint32_t* next,
                 const int64_t* slots, const Rows<T>& hidden, const Additions<T>& added, float* y) {
  int64_t first = group * kGroupColumns, last = std::min(e.width, first + kGroupColumns);
  const float* bias = e.down_bias ? e.down_bias[part.expert] : nullptr;
  auto index = [&](int64_t m) { return slots[m]; };
  auto store = [&](int64_t m, const float* c) {
    float* out = y + slots[m] * e.width;
    bool is_added = added.has_down(slots[m]);
    for (int64_t n = first; n < last; n += kLanes, c += kLanes) {
      f32x16 v = load16(c);
      if (bias) v += load_up_to(bias + n, e.width - n);
      if (is_added) v += load_up_to(out + n, e.width - n);
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

// What each adapter of the rows changes in this bank.
static std::vector<const ExpertChanges*> changes_of(const RowAdapters* adapters, int64_t layer,
                                                    bool is_mlp) {
  std::vector<const ExpertChanges*> changes;
  for (int64_t a = 0; adapters && a < adapters->num_adapters; ++a) {
    const LayerChanges& each = adapters->layers[a][layer];
    changes.push_back(is_mlp ? each.mlp : each.experts);
  }
  bool is_any = std::any_of(changes.begin(), changes.end(), [](auto* each) { return each; });
  return is_any ? changes : std::vector<const ExpertChanges*>();
}

// x [T, D], ids and weights [T, K], out [T, D]: the sum in double, or rounded once to float.
// `adapters`: of the rows, or null; `layer` and `is_mlp` name the bank among what they change.
// Returns 0, or 1 + e if rows were sent for an absent expert e.
template <class T, class Out>
static int64_t experts(const Experts& bank, const T* x, const int64_t* own_ids,
                       const float* weights, Out* out, int64_t num_rows, int64_t top_k,
                       const RowAdapters* adapters, int64_t layer, bool is_mlp) {
  static thread_local Scratch hidden_scratch, y_scratch;
  const auto changes = changes_of(adapters, layer, is_mlp);
  const int64_t num_slots = num_rows * top_k, *adapter = adapters ? adapters->adapter : nullptr;
  const WideBank wide(bank, own_ids, num_rows, top_k, adapter, changes);
  const Experts& e = wide.table();
  const int64_t* ids = wide.ids();
  Slots slots(ids, num_slots, e.num_experts);
  std::vector<int64_t> by_size;
  for (int64_t i = 0; i < e.num_experts; ++i)
    if (slots.count(i)) {
      if (!e.gate_up[i]) return 1 + i % bank.num_experts;
      by_size.push_back(i);
    }
  std::stable_sort(by_size.begin(), by_size.end(),
                   [&](int64_t a, int64_t b) { return slots.count(a) > slots.count(b); });
  Additions<T> added(e);
  if (!changes.empty())
    if (int64_t absent = added.find(slots, bank.num_experts, top_k, adapter, changes)) return absent;
  T* hidden = hidden_scratch.get<T>(num_slots * e.expert_width);
  float* y = y_scratch.get<float>(num_slots * e.width);
  int64_t threads = num_slots * e.width * e.expert_width < 65536 ? 1 : e.threads;
  auto up_parts =
      cut(slots, by_size, row_block<T>(e.width), groups(2 * panels(e.expert_width)), threads);
  auto down_parts =
      cut(slots, by_size, row_block<T>(e.expert_width), groups(panels(e.width)), threads);
  const Rows<T> inputs = input_rows(e, x, num_rows, threads);
  added.add_up(x, top_k, threads);
  for_parts(up_parts, threads, up_columns<T>, e, [&](const Part& p, int64_t group, auto next) {
    gate_up<T>(e, p, group, next, slots.order.data() + p.first, inputs, top_k, added, hidden);
  });
  const Rows<T> rows = hidden_rows(e, hidden, num_slots, threads);
  added.add_down(hidden, y, threads);
  for_parts(down_parts, threads, down_columns<T>, e, [&](const Part& p, int64_t group, auto next) {
    down<T>(e, p, group, next, slots.order.data() + p.first, rows, added, y);
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
// `adapters`: their additions in these columns, which are all here, as layer 0; or null.
template <class T>
static Additions<T> additions_to(const Experts& e, const Slots& slots,
                                 const RowAdapters* adapters) {
  Additions<T> added(e);
  const auto changes = changes_of(adapters, 0, false);
  if (!changes.empty()) added.find(slots, 1, 1, adapters->adapter, changes);
  return added;
}

template <class T>
static void mlp_hidden(const Experts& e, const T* x, T* hidden, int64_t num_rows,
                       const RowAdapters* adapters) {
  std::vector<int64_t> ids(num_rows);
  Slots slots(ids.data(), num_rows, 1);
  int64_t threads = num_rows * e.width * e.expert_width < 65536 ? 1 : e.threads;
  auto parts = cut(slots, {0}, row_block<T>(e.width), groups(2 * panels(e.expert_width)), threads);
  const Rows<T> inputs = input_rows(e, x, num_rows, threads);
  Additions<T> added = additions_to<T>(e, slots, adapters);
  added.add_up(x, 1, threads);
  for_parts(parts, threads, up_columns<T>, e, [&](const Part& p, int64_t group, auto next) {
    gate_up<T>(e, p, group, next, slots.order.data() + p.first, inputs, 1, added, hidden);
  });
}

template <class T>
static void mlp_down(const Experts& e, const T* hidden, const float* weights, float* out,
                     int64_t num_rows, const RowAdapters* adapters) {
  std::vector<int64_t> ids(num_rows);
  Slots slots(ids.data(), num_rows, 1);
  int64_t threads = num_rows * e.width * e.expert_width < 65536 ? 1 : e.threads;
  auto parts = cut(slots, {0}, row_block<T>(e.expert_width), groups(panels(e.width)), threads);
  const Rows<T> rows = hidden_rows(e, hidden, num_rows, threads);
  Additions<T> added = additions_to<T>(e, slots, adapters);
  added.add_down(hidden, out, threads);
  for_parts(parts, threads, down_columns<T>, e, [&](const Part& p, int64_t group, auto next) {
    down<T>(e, p, group, next, slots.order.data() + p.first, rows, added, out);
  });
  for (int64_t t = 0; t < num_rows; ++t)
    weigh(out + t * e.width, ids.data() + t, weights + t, 1, e.width, out + t * e.width);
}

#define EXPORT_HALVES(T, suffix)                                                                  \
  void moe_mlp_hidden_##suffix(const Experts* e, const T* x, T* hidden, int64_t num_rows,         \
                               const RowAdapters* adapters) {                                     \
    mlp_hidden<T>(*e, x, hidden, num_rows, adapters);                                             \
  }                                                                                               \
  void moe_mlp_down_##suffix(const Experts* e, const T* hidden, const float* weights, float* out, \
                             int64_t num_rows, const RowAdapters* adapters) {                     \
    mlp_down<T>(*e, hidden, weights, out, num_rows, adapters);                                    \
  }

#define EXPORT(T, suffix, Out)                                                                    \
  int64_t moe_experts_##suffix(const Experts* e, const T* x, const int64_t* ids,                  \
                               const float* weights, Out* out, int64_t num_rows, int64_t top_k,   \
                               const RowAdapters* adapters, int64_t layer, int64_t is_mlp) {      \
    return experts<T>(*e, x, ids, weights, out, num_rows, top_k, adapters, layer, is_mlp);        \
  }

extern "C" {
EXPORT(bf16, bf16, float)
EXPORT(float, f32, float)
EXPORT(bf16, partial_bf16, double)
EXPORT(float, partial_f32, double)
EXPORT_HALVES(bf16, bf16)
EXPORT_HALVES(float, f32)
}
