// The rows of whole fine-tunes in the first half of a layer: what they have in place of the base
// model's norms and router. All kernels compute rows one by one, so a row has the bits that it has
// alone.
#pragma once

#include <algorithm>
#include <array>

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

// y = x normed, for the rows whose fine-tune has this norm of its own.
template <class T, class Norm>
static void own_norms(const Norm& rms_norm, int64_t norm, const T* x, int64_t row_step, T* y,
                      int64_t width, double eps, int64_t threads, const RowAdapters* adapters,
                      int64_t layer) {
  for_tunes(adapters, layer, [&](const LayerTune& tune, const int64_t* rows, int64_t count) {
    if (!tune.norms[norm]) return;
    parallel_for(count, count * width > 65536 ? threads : 1, [&](int64_t i) {
      rms_norm(x + rows[i] * row_step, row_step, (const T*)tune.norms[norm], y + rows[i] * width, 1,
               width, eps, 1);
    });
  });
}

// x = hidden normed, with `norm` of each fine-tune that has it.
template <class T>
static void tuned_norm(const Front& f, const Parts<T>& parts, const void* weight, int64_t norm,
                       const T* hidden, T* x, int64_t num_rows, const RowAdapters* adapters,
                       int64_t layer) {
  parts.rms_norm(hidden, f.width, (const T*)weight, x, num_rows, f.width, f.eps, f.threads);
  own_norms<T>(parts.rms_norm, norm, hidden, f.width, x, f.width, f.eps, f.threads, adapters, layer);
}

// The norms and sinks of each row's attention -> own [T, 3]. Whether a fine-tune has own ones:
// otherwise nothing is written.
static inline bool own_attended(const std::array<const void*, 3>& base, const void** own,
                                int64_t num_rows, const RowAdapters* adapters, int64_t layer) {
  bool has_own = false;
  for_tunes(adapters, layer, [&](const LayerTune& tune, const int64_t* rows, int64_t count) {
    if (!tune.attended[0] && !tune.attended[1] && !tune.attended[2]) return;
    for (int64_t t = 0; t < num_rows && !has_own; ++t)
      std::copy(base.begin(), base.end(), own + 3 * t);
    has_own = true;
    for (int64_t i = 0; i < count; ++i)
      for (int64_t w = 0; w < 3; ++w)
        if (tune.attended[w]) own[3 * rows[i] + w] = tune.attended[w];
  });
  return has_own;
}

// The choices of the rows whose fine-tune has a router of its own.
template <class T, class RouterLinear>
static void own_routes(const RouterLinear& router_linear, const Router* route, const T* x,
                       int64_t width, int64_t num_experts, int64_t top_k, int64_t* ids,
                       float* weights, const RowAdapters* adapters, int64_t layer) {
  static thread_local Scratch rows_scratch, logits_scratch;
  for_tunes(adapters, layer, [&](const LayerTune& tune, const int64_t* rows, int64_t count) {
    if (!tune.router) return;
    T* own = rows_scratch.get<T>(count * width);
    float* logits = logits_scratch.get<float>(count * num_experts);
    for (int64_t i = 0; i < count; ++i) std::copy_n(x + rows[i] * width, width, own + i * width);
    router_linear(tune.router, own, width, logits, count);
    for (int64_t i = 0; i < count; ++i)
      moe_route(route, logits + i * num_experts, tune.selection_bias, ids + rows[i] * top_k,
                weights + rows[i] * top_k, 1);
  });
}
