// The first half of a layer in one call: everything between two visits to the experts.
//
// It calls the kernel of each part, so the results are the same bit for bit; it saves the calls
// through Python between them.

#include "front.h"

#include <algorithm>
#include <vector>

#include "../scratch.h"
#include "../threads.h"
#include "../vectors.h"
#include "tuned.h"

template <class T>
static void front(const Front& f, const Parts<T>& parts, const AttentionPlan* plan, const T* hidden,
                  const int64_t* positions, const int64_t* kv_rows, const KVPages* pages, T* out,
                  T* x, int64_t* ids, float* weights, int64_t num_rows,
                  const RowAdapters* adapters, int64_t layer) {
  static thread_local Scratch qkv_scratch, attended_scratch, logits_scratch;
  static thread_local std::vector<const void*> own_weights;
  T* qkv = qkv_scratch.get<T>(num_rows * f.qkv_width);
  T* attended = attended_scratch.get<T>(num_rows * f.attended_width);
  tuned_norm(f, parts, f.attention_norm, kAttentionNorm, hidden, x, num_rows, adapters, layer);
  parts.linear(f.qkv, x, f.width, nullptr, qkv, num_rows);
  if (adapters) parts.low_rank(adapters, layer, kQKV, x, f.width, qkv, f.threads);
  if (adapters) parts.row_signs(adapters, layer, kQKV, x, f.width, qkv, f.threads);
  AttentionPlan tuned = *plan;
  if (adapters) own_weights.resize(3 * num_rows);
  if (own_attended({f.q_norm, f.k_norm, f.sinks}, own_weights.data(), num_rows, adapters, layer))
    tuned.own = own_weights.data();
  parts.attend(&tuned, qkv, (const T*)f.q_norm, (const T*)f.k_norm, f.sinks, f.cos, f.sin,
               f.query_scale, positions, kv_rows, pages, attended);
  parts.linear(f.output, attended, f.attended_width, hidden, out, num_rows);
  if (adapters) parts.low_rank(adapters, layer, kOutput, attended, f.attended_width, out, f.threads);
  if (adapters) parts.row_signs(adapters, layer, kOutput, attended, f.attended_width, out, f.threads);
  tuned_norm(f, parts, f.moe_norm, kMoeNorm, out, x, num_rows, adapters, layer);
  if (!f.router) return;
  float* logits = logits_scratch.get<float>(num_rows * f.num_experts);
  parts.router_linear(f.router, x, f.width, logits, num_rows);
  moe_route(f.route, logits, f.selection_bias, ids, weights, num_rows);
  own_routes<T>(parts.router_linear, f.route, x, f.width, f.num_experts, f.top_k, ids, weights,
                adapters, layer);
}

// out = hidden + (T)(first + second), `second` being optional.
template <class T>
static void add(const T* hidden, const float* first, const float* second, T* out, int64_t count,
                int64_t threads) {
  constexpr int64_t kChunk = 32768;  // of values: a job
  parallel_for((count + kChunk - 1) / kChunk, threads, [&](int64_t j) {
    for (int64_t i = j * kChunk; i < std::min(count, (j + 1) * kChunk); i += 16) {
      f32x16 sum = load_up_to(first + i, count - i);
      if (second) sum += load_up_to(second + i, count - i);
      store_up_to(out + i, load_up_to(hidden + i, count - i) + round_to(hidden, sum), count - i);
    }
  });
}

// The parts of a layer that fine-tunes replace, for layers that are called part by part.
#define EXPORT_OWN(T, suffix)                                                                     \
  void moe_row_norms_##suffix(const RowAdapters* r, int64_t layer, int64_t norm, const T* x,      \
                              int64_t row_step, T* y, int64_t width, double eps,                  \
                              int64_t threads) {                                                  \
    own_norms<T>(moe_rms_norm_##suffix, norm, x, row_step, y, width, eps, threads, r, layer);     \
  }                                                                                               \
  void moe_row_routes_##suffix(const RowAdapters* r, int64_t layer, const Router* route,          \
                               const T* x, int64_t width, int64_t num_experts, int64_t top_k,     \
                               int64_t* ids, float* weights) {                                    \
    own_routes<T>(moe_router_linear_##suffix, route, x, width, num_experts, top_k, ids, weights,  \
                  r, layer);                                                                      \
  }

#define EXPORT(T, suffix)                                                                         \
  void moe_front_##suffix(const Front* f, const AttentionPlan* plan, const T* hidden,             \
                          const int64_t* positions, const int64_t* kv_rows, const KVPages* pages, \
                          T* out, T* x, int64_t* ids, float* weights, int64_t num_rows,           \
                          const RowAdapters* adapters, int64_t layer) {                           \
    Parts<T> parts{moe_rms_norm_##suffix, moe_linear_##suffix, moe_attend_##suffix,               \
                   moe_router_linear_##suffix, moe_low_rank_##suffix, moe_row_signs_##suffix};    \
    front<T>(*f, parts, plan, hidden, positions, kv_rows, pages, out, x, ids, weights, num_rows,  \
             adapters, layer);                                                                    \
  }                                                                                               \
  void moe_add_##suffix(const T* hidden, const float* first, const float* second, T* out,         \
                        int64_t count, int64_t threads) {                                         \
    add<T>(hidden, first, second, out, count, threads);                                           \
  }

extern "C" {
EXPORT(bf16, bf16)
EXPORT(float, f32)
EXPORT_OWN(bf16, bf16)
EXPORT_OWN(float, f32)

int64_t moe_row_attended(const RowAdapters* r, int64_t layer, const void* q_norm,
                         const void* k_norm, const void* sinks, const void** own,
                         int64_t num_rows) {
  return own_attended({q_norm, k_norm, sinks}, own, num_rows, r, layer);
}
}
