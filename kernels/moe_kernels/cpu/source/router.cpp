// The router's choice: scores, the best experts of the best groups, their weights.

#include <algorithm>
#include <cmath>
#include <vector>

#include "threads.h"
#include "vectors.h"

struct Router {  // mirrored in native_kernels.py
  int64_t num_experts, top_k, is_renormalised, is_sigmoid;
  int64_t num_groups, num_groups_kept, is_top2, threads;
  float renorm_floor, scaling;
};

// Marks the `count` largest of values[0 .. size), the lower index where equal.
static void mark_largest(const float* values, int64_t size, int64_t count, char* is_marked) {
  std::fill(is_marked, is_marked + size, 0);
  for (int64_t k = 0; k < count; ++k) {
    int64_t best = -1;
    for (int64_t i = 0; i < size; ++i)
      if (!is_marked[i] && (best < 0 || values[i] > values[best])) best = i;
    is_marked[best] = 1;
  }
}

static void score(const Router& r, const float* logits, float* scores) {
  int64_t count = r.num_experts;
  if (r.is_sigmoid) {
    for (int64_t e = 0; e < count; e += 16)
      store_up_to(scores + e, 1.0f / (1.0f + exp16(-load_up_to(logits + e, count - e))), count - e);
    return;
  }
  float top = -INFINITY;
  for (int64_t e = 0; e < count; ++e) top = std::fmax(top, logits[e]);
  f32x16 total = {};
  for (int64_t e = 0; e < count; e += 16) {
    store_up_to(scores + e, exp16(load_up_to(logits + e, count - e) - top), count - e);
    total += load_up_to(scores + e, count - e);
  }
  float sum = fold(total);
  for (int64_t e = 0; e < count; e += 16)
    store_up_to(scores + e, load_up_to(scores + e, count - e) / sum, count - e);
}

// -inf for the experts of groups that are not among the best.
static void keep_best_groups(const Router& r, float* choice, std::vector<float>& group_scores,
                             std::vector<char>& is_kept) {
  int64_t size = r.num_experts / r.num_groups;
  for (int64_t g = 0; g < r.num_groups; ++g) {
    float best[2] = {-INFINITY, -INFINITY};
    for (const float* c = choice + g * size; c < choice + (g + 1) * size; ++c) {
      if (*c > best[0]) best[1] = best[0], best[0] = *c;
      else if (*c > best[1]) best[1] = *c;
    }
    group_scores[g] = r.is_top2 ? best[0] + best[1] : best[0];
  }
  mark_largest(group_scores.data(), r.num_groups, r.num_groups_kept, is_kept.data());
  for (int64_t e = 0; e < r.num_experts; ++e)
    if (!is_kept[e / size]) choice[e] = -INFINITY;
}

static void route(const Router& r, const float* logits, const float* bias, int64_t* ids,
                  float* weights, int64_t num_rows) {
  std::vector<float> scores(r.num_experts), choice(r.num_experts), group_scores(r.num_groups);
  std::vector<char> is_chosen(std::max(r.num_experts, r.num_groups));
  for (int64_t t = 0; t < num_rows; ++t) {
    score(r, logits + t * r.num_experts, scores.data());
    for (int64_t e = 0; e < r.num_experts; ++e) choice[e] = scores[e] + (bias ? bias[e] : 0.0f);
    if (r.num_groups > 1) keep_best_groups(r, choice.data(), group_scores, is_chosen);
    mark_largest(choice.data(), r.num_experts, r.top_k, is_chosen.data());
    float sum = 0;
    for (int64_t e = 0, k = t * r.top_k; e < r.num_experts; ++e)
      if (is_chosen[e]) {
        ids[k] = e;
        weights[k++] = scores[e];
        sum += scores[e];
      }
    float divisor = r.is_renormalised ? std::fmax(sum, r.renorm_floor) : 1.0f;
    for (int64_t k = t * r.top_k; k < (t + 1) * r.top_k; ++k)
      weights[k] = weights[k] / divisor * r.scaling;
  }
}

extern "C" {
// logits [T, E], bias [E] or null -> ids (ascending in a row) and weights [T, K].
void moe_route(const Router* router, const float* logits, const float* bias, int64_t* ids,
               float* weights, int64_t num_rows) {
  const Router r = *router;
  constexpr int64_t kRows = 32;  // in one job
  parallel_for((num_rows + kRows - 1) / kRows, num_rows >= 2 * kRows ? r.threads : 1,
               [&](int64_t j) {
                 int64_t first = j * kRows, count = std::min(kRows, num_rows - first);
                 route(r, logits + first * r.num_experts, bias, ids + first * r.top_k,
                       weights + first * r.top_k, count);
               });
}
}
