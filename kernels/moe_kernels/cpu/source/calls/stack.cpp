// All layers of a model in one call, from token ids to logits.
//
// It calls the kernel of each part, so the results are the same bit for bit; it saves the calls
// through Python between them, and lays the step out.

#include <algorithm>
#include <chrono>
#include <vector>

#include "../adapters.h"
#include "../attention/attention_plan.h"
#include "front.h"
#include "../scratch.h"
#include "../vectors.h"

struct Experts;

struct StackLayer {  // mirrored in native_stack.py
  const Front* front;
  const Experts *experts, *mlp;  // routed: null in a dense layer; dense or shared: may be null
  const KVPages* pages;
  int64_t shape;  // of its attention, one of the stack's
};

struct Stack {  // mirrored in native_stack.py
  const void *embedding, *final_norm;
  const Linear* head;
  const StackLayer* layers;
  const AttentionPlan* shapes;  // without the step's tokens and tables
  int64_t num_layers, num_shapes, width, vocab_size, top_k, threads;
  double eps;
  float logits_divisor;
};

// S sequences one after the other, T tokens, R rows of logits.
struct StackStep {  // mirrored in native_stack.py
  const int64_t* slices;  // [S, 5]: first position, tokens, logits, pages, tokens without a page
  const int64_t *tokens, *pages;
  float* logits;     // [R, V]
  void* hidden;      // [T, D]; also the input, unless the first layer is among those to compute
  int64_t* ids;      // [sparse layers, T, K] of the layers to compute, or null
  float* weights;    // likewise
  int64_t* times;    // [layers, 5] in ns since the call began, or null; see `clock`
  int64_t* at_layer; // the layer that is being computed
  const RowAdapters* adapters;  // of the tokens, or null
  int64_t num_slices, num_tokens, num_logits;
  int64_t first, end;  // the layers to compute; there are logits only behind the last one
};

template <class T>
struct StackParts {
  Parts<T> front_parts;
  int64_t (*experts)(const Experts*, const T*, const int64_t*, const float*, float*, int64_t,
                     int64_t, const RowAdapters*, int64_t, int64_t);
  void (*front)(const Front*, const AttentionPlan*, const T*, const int64_t*, const int64_t*,
                const KVPages*, T*, T*, int64_t*, float*, int64_t, const RowAdapters*, int64_t);
  void (*add)(const T*, const float*, const float*, T*, int64_t, int64_t);
};

#define DECLARE_PARTS(T, suffix)                                                                  \
  int64_t moe_experts_##suffix(const Experts*, const T*, const int64_t*, const float*, float*,    \
                               int64_t, int64_t, const RowAdapters*, int64_t, int64_t);           \
  void moe_front_##suffix(const Front*, const AttentionPlan*, const T*, const int64_t*,           \
                          const int64_t*, const KVPages*, T*, T*, int64_t*, float*, int64_t,      \
                          const RowAdapters*, int64_t);                                           \
  void moe_add_##suffix(const T*, const float*, const float*, T*, int64_t, int64_t);

extern "C" {
DECLARE_PARTS(bf16, bf16)
DECLARE_PARTS(float, f32)
}

// Where the rows of a step stand: what every layer's attention needs.
struct Layout {
  std::vector<int64_t> positions, places, sequences, kv_rows, tables, logit_rows;
  std::vector<AttentionPlan> plans;

  void lay_out(const Stack& s, const StackStep& step) {
    positions.clear(), places.clear(), sequences.clear(), kv_rows.clear(), logit_rows.clear();
    int64_t most = 0;
    for (int64_t i = 0; i < step.num_slices; ++i) most = std::max(most, step.slices[5 * i + 3]);
    tables.assign(step.num_slices * most, 0);
    const int64_t* pages = step.pages;
    for (int64_t i = 0; i < step.num_slices; ++i) {
      const int64_t *slice = step.slices + 5 * i, num_pages = slice[3];
      std::copy_n(pages, num_pages, tables.data() + i * most);
      add_rows(s.shapes[0], slice, i, pages);
      pages += num_pages;
    }
    plans.assign(s.shapes, s.shapes + s.num_shapes);
    for (AttentionPlan& plan : plans) {
      plan.sequences = sequences.data(), plan.tables = tables.data();
      plan.places = places.data();
      plan.num_tokens = step.num_tokens, plan.max_pages = most;
    }
  }

 private:
  // See KVCache.rows: pages hold the positions of each KV head together.
  void add_rows(const AttentionPlan& shape, const int64_t* slice, int64_t index,
                const int64_t* pages) {
    int64_t first = slice[0], end = first + slice[1], size = shape.page_size;
    for (int64_t at = first; at < end; ++at) {
      if (at >= end - slice[2]) logit_rows.push_back(positions.size());
      int64_t place = at - slice[4];
      positions.push_back(at), places.push_back(place), sequences.push_back(index);
      int64_t row = pages[place / size] * shape.num_kv_heads * size + place % size;
      for (int64_t h = 0; h < shape.num_kv_heads; ++h) kv_rows.push_back(row + h * size);
    }
  }
};

static int64_t nanoseconds() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

template <class T>
class StackRun {
 public:
  StackRun(const Stack& s, const StackStep& step, const StackParts<T>& parts)
      : s_(s), step_(step), parts_(parts), rows_(step.num_tokens), began_(nanoseconds()) {
    static thread_local Scratch scratch[6];
    int64_t size = rows_ * s.width;
    hidden_ = static_cast<T*>(step.hidden);
    attended_ = scratch[0].get<T>(size), x_ = scratch[1].get<T>(size);
    sum_ = scratch[2].get<float>(size), shared_ = scratch[3].get<float>(size);
    ids_ = scratch[4].get<int64_t>(rows_ * std::max<int64_t>(1, s.top_k));
    weights_ = scratch[5].get<float>(rows_ * std::max<int64_t>(1, s.top_k));
  }

  // 0, or 1 plus the number of an expert that rows chose and that is not here.
  int64_t run() {
    static thread_local Layout layout;
    layout.lay_out(s_, step_);
    for (int64_t t = 0; t < rows_ && step_.first == 0; ++t) {
      const ModelTune* tune = tune_of(t);
      auto* embedding = static_cast<const T*>(tune && tune->embedding ? tune->embedding : s_.embedding);
      std::copy_n(embedding + step_.tokens[t] * s_.width, s_.width, hidden_ + t * s_.width);
    }
    int64_t *ids = step_.ids, num_choices = rows_ * s_.top_k;
    float* weights = step_.weights;
    for (int64_t l = step_.first; l < step_.end; ++l) {
      const StackLayer& layer = s_.layers[l];
      *step_.at_layer = l;
      bool is_kept = ids && layer.experts;
      if (int64_t absent = run_layer(layer, layout, l, is_kept ? ids : ids_,
                                     is_kept ? weights : weights_))
        return absent;
      if (is_kept) ids += num_choices, weights += num_choices;
    }
    if (step_.end == s_.num_layers) find_logits(layout.logit_rows);
    return 0;
  }

 private:
  int64_t run_layer(const StackLayer& layer, Layout& layout, int64_t l, int64_t* ids,
                    float* weights) {
    clock(l, 0);
    parts_.front(layer.front, &layout.plans[layer.shape], hidden_, layout.positions.data(),
                 layout.kv_rows.data(), layer.pages, attended_, x_, ids, weights, rows_,
                 step_.adapters, l);
    int64_t absent = 0;
    if (!layer.experts) absent = pass_mlp(layer.mlp, sum_, l);
    clock(l, 1);
    if (layer.experts)
      absent = parts_.experts(layer.experts, x_, ids, weights, sum_, rows_, s_.top_k,
                              step_.adapters, l, 0);
    clock(l, 2);
    bool is_shared = layer.experts && layer.mlp && !absent;
    if (is_shared) absent = pass_mlp(layer.mlp, shared_, l);
    clock(l, 3);
    parts_.add(attended_, sum_, is_shared ? shared_ : nullptr, hidden_, rows_ * s_.width,
               s_.threads);
    clock(l, 4);
    return absent;
  }

  // An MLP that all rows pass: a bank of one expert.
  int64_t pass_mlp(const Experts* mlp, float* out, int64_t l) {
    std::fill_n(ids_, rows_, 0);
    std::fill_n(weights_, rows_, 1.0f);
    return parts_.experts(mlp, x_, ids_, weights_, out, rows_, 1, step_.adapters, l, 1);
  }

  // Rows of fine-tunes with the same final norm and head pass them together, and so do all others.
  void find_logits(const std::vector<int64_t>& rows) {
    const int64_t num_adapters = step_.adapters ? step_.adapters->num_adapters : 0;
    const ModelTune base{nullptr, s_.final_norm, s_.head};
    std::vector<int64_t> places;
    for (int64_t a = -1; a < num_adapters; ++a) {
      const ModelTune* own = a < 0 ? &base : step_.adapters->model(a);
      if (!own || !has_own_head(own)) continue;
      places.clear();
      for (size_t r = 0; r < rows.size(); ++r)
        if (own == (has_own_head(tune_of(rows[r])) ? tune_of(rows[r]) : &base)) places.push_back(r);
      if (!places.empty()) find_logits(rows, places, *own);
    }
  }

  static bool has_own_head(const ModelTune* tune) {
    return tune && (tune->final_norm || tune->head);
  }

  void find_logits(const std::vector<int64_t>& rows, const std::vector<int64_t>& places,
                   const ModelTune& own) {
    static thread_local Scratch logits_scratch;
    const int64_t count = places.size(), size = s_.vocab_size;
    T* logits = logits_scratch.get<T>(count * size);
    for (int64_t i = 0; i < count; ++i)
      std::copy_n(hidden_ + rows[places[i]] * s_.width, s_.width, attended_ + i * s_.width);
    const void* norm = own.final_norm ? own.final_norm : s_.final_norm;
    parts_.front_parts.rms_norm(attended_, s_.width, static_cast<const T*>(norm), x_, count,
                                s_.width, s_.eps, s_.threads);
    parts_.front_parts.linear(own.head ? own.head : s_.head, x_, s_.width, nullptr, logits, count);
    for (int64_t i = 0; i < count; ++i)
      for (int64_t n = 0; n < size; n += 16)
        store_up_to(step_.logits + places[i] * size + n,
                    load_up_to(logits + i * size + n, size - n) / s_.logits_divisor, size - n);
  }

  const ModelTune* tune_of(int64_t row) const {
    return step_.adapters ? step_.adapters->model(step_.adapters->adapter[row]) : nullptr;
  }

  // Times of a layer: it begins, its front has ended (in a dense layer its MLP too), its experts,
  // its shared expert, the sum.
  void clock(int64_t layer, int64_t place) {
    if (step_.times) step_.times[5 * (layer - step_.first) + place] = nanoseconds() - began_;
  }

  const Stack& s_;
  const StackStep& step_;
  const StackParts<T>& parts_;
  const int64_t rows_, began_;
  T *hidden_, *attended_, *x_;
  float *sum_, *shared_, *weights_;
  int64_t* ids_;
};

#define EXPORT(T, suffix)                                                                         \
  int64_t moe_stack_##suffix(const Stack* stack, const StackStep* step) {                         \
    StackParts<T> parts{{moe_rms_norm_##suffix, moe_linear_##suffix, moe_attend_##suffix,         \
                         moe_router_linear_##suffix, moe_low_rank_##suffix,                       \
                         moe_row_signs_##suffix},                                                 \
                        moe_experts_##suffix,                                                     \
                        moe_front_##suffix,                                                       \
                        moe_add_##suffix};                                                        \
    return StackRun<T>(*stack, *step, parts).run();                                               \
  }

extern "C" {
EXPORT(bf16, bf16)
EXPORT(float, f32)
}
