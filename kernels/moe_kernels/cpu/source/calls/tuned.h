// The rows of whole fine-tunes in the first half of a layer: what they have in place of the base
// model's norms and router. All kernels compute rows one by one, so a row has the bits that it has
// alone.
#pragma once

#include <vector>

#include "../adapters.h"
#include "../attention/attention_plan.h"
#include "../scratch.h"
#include "../threads.h"
#include "front.h"

// Calls work(tune, rows, count) for every adapter that is a fine-tune and has rows.
template <class Work>
static void for_tunes(const RowAdapters* r, int64_t layer, const Work& work) {
  for (int64_t a = 0; r && a < r->num_adapters; ++a)
    if (const LayerTune* tune = r->layers[a][layer].tune)
      if (int64_t count = r->starts[a + 1] - r->starts[a])
        work(*tune, r->order + r->starts[a], count);
}

// x = hidden normed, with `own` of each fine-tune that has it.
template <class T>
static void tuned_norm(const Front& f, const Parts<T>& parts, const void* weight,
                       const void* LayerTune::*own, const T* hidden, T* x, int64_t num_rows,
                       const RowAdapters* adapters, int64_t layer) {
  parts.rms_norm(hidden, f.width, (const T*)weight, x, num_rows, f.width, f.eps, f.threads);
  for_tunes(adapters, layer, [&](const LayerTune& tune, const int64_t* rows, int64_t count) {
    if (!(tune.*own)) return;
    parallel_for(count, count * f.width > 65536 ? f.threads : 1, [&](int64_t i) {
      parts.rms_norm(hidden + rows[i] * f.width, f.width, (const T*)(tune.*own),
                     x + rows[i] * f.width, 1, f.width, f.eps, 1);
    });
  });
}

// The plan with the norms and sinks of each row; the plan itself if no fine-tune has own ones.
static inline AttentionPlan tuned_plan(const Front& f, const AttentionPlan& plan,
                                       std::vector<const void*>& weights, int64_t num_rows,
                                       const RowAdapters* adapters, int64_t layer) {
  AttentionPlan tuned = plan;
  for_tunes(adapters, layer, [&](const LayerTune& tune, const int64_t* rows, int64_t count) {
    const void* own[3] = {tune.q_norm, tune.k_norm, tune.sinks};
    if (!own[0] && !own[1] && !own[2]) return;
    if (!tuned.own) {
      weights.clear();
      for (int64_t t = 0; t < num_rows; ++t)
        weights.insert(weights.end(), {f.q_norm, f.k_norm, f.sinks});
      tuned.own = weights.data();
    }
    for (int64_t i = 0; i < count; ++i)
      for (int64_t w = 0; w < 3; ++w)
        if (own[w]) weights[3 * rows[i] + w] = own[w];
  });
  return tuned;
}

// The choices of the rows whose fine-tune has a router of its own.
template <class T>
static void tuned_routes(const Front& f, const Parts<T>& parts, const T* x, int64_t* ids,
                         float* weights, const RowAdapters* adapters, int64_t layer) {
  static thread_local Scratch rows_scratch, logits_scratch;
  for_tunes(adapters, layer, [&](const LayerTune& tune, const int64_t* rows, int64_t count) {
    if (!tune.router) return;
    T* own = rows_scratch.get<T>(count * f.width);
    float* logits = logits_scratch.get<float>(count * f.num_experts);
    for (int64_t i = 0; i < count; ++i) std::copy_n(x + rows[i] * f.width, f.width, own + i * f.width);
    parts.router_linear(tune.router, own, f.width, logits, count);
    for (int64_t i = 0; i < count; ++i)
      moe_route(f.route, logits + i * f.num_experts, tune.selection_bias, ids + rows[i] * f.top_k,
                weights + rows[i] * f.top_k, 1);
  });
}
