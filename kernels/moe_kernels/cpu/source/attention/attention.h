// Causal attention over KV pages: blocks of query rows against blocks of 64 keys.
//
// The query heads of a KV head, for some tokens of one sequence, are the rows of a product with the
// block's keys, and then with its values (panels.h). Blocks begin at multiples of 64 positions, and
// a row meets its blocks in order; a key that it must not see has probability 0, which changes no
// sum. So a row's arithmetic depends on its own position and keys only.
#pragma once

#include <cmath>
#include <vector>

#include "key_blocks.h"
#include "../threads.h"

static inline int64_t first_visible(const AttentionPlan& p, int64_t position) {
  int64_t first = p.window ? std::max<int64_t>(0, position + 1 - p.window) : 0;
  return p.chunk ? std::max(first, position / p.chunk * p.chunk) : first;
}

// The longest first, so that the threads end together.
static inline std::vector<TokenBlock> cut_tokens(const AttentionPlan& p, const int64_t* positions,
                                                 int64_t most) {
  std::vector<TokenBlock> blocks;
  for (int64_t t = 0; t < p.num_tokens;) {
    int64_t end = t + 1;
    while (end < p.num_tokens && end - t < most && p.sequences[end] == p.sequences[t]) ++end;
    blocks.push_back({t, end - t, first_visible(p, positions[t]), positions[end - 1] + 1});
    t = end;
  }
  std::stable_sort(blocks.begin(), blocks.end(), [](const TokenBlock& a, const TokenBlock& b) {
    return a.last_key - a.first_key > b.last_key - b.first_key;
  });
  return blocks;
}

// Products of a query and whole numbers -> scores, by the keys' scales and zeros.
template <class T, class R>
static inline void scale_scores(Workspace<T>& work, int64_t row, int64_t num_panels,
                                bool has_two_parts) {
  float* scores = work.scores + row * kKeys;
  const float* seconds = work.second_scores + row * kKeys;
  for (int64_t k = 0; k < num_panels * kLanes; k += kLanes) {
    f32x16 s = load16(scores + k) * load16(work.key_scales + k);
    if (kHasZeros<R>) s += work.query_sums[row] * load16(work.key_seconds + k);
    else if (has_two_parts) s += load16(seconds + k) * load16(work.key_seconds + k);
    store16(scores + k, s);
  }
}

// Scores of one row and block, PANELS * 16 keys -> weights (not yet divided by their sum), rounded
// to T. [first, last): the visible keys, counted from the block's first. Weights of quantised rows
// (R is not T) are multiplied by the values' scales, and `offset` adds up what their zeros add.
template <class T, class R, int PANELS>
static inline void soften(const Workspace<T>& work, const float* scores, float scale, int64_t first,
                          int64_t last, float& top, float* total, float* sums, int64_t value_width,
                          T* weights, float* offset) {
  f32x16 s[PANELS], highest = splat(-INFINITY);
#pragma GCC unroll 4
  for (int n = 0; n < PANELS; ++n) s[n] = load16(scores + n * kLanes);
  if (first > 0 || last < PANELS * kLanes) {
#pragma GCC unroll 4
    for (int n = 0; n < PANELS; ++n) {
      i32x16 key = lanes() + (int32_t)(n * kLanes);
      i32x16 is_hidden = (key < (int32_t)first) | (key >= (int32_t)last);
      s[n] = select(is_hidden, splat(-INFINITY), s[n]);
    }
  }
#pragma GCC unroll 4
  for (int n = 0; n < PANELS; ++n) highest = maximum(s[n], highest);
  float high = largest(highest) * scale;
  f32x16 all = load16(total);
  if (high > top) {  // scale the sums so far down
    float factor = exp16(splat(top - high))[0];
    top = high;
    all *= factor;
    for (int64_t d = 0; d < value_width; d += kLanes) store16(sums + d, load16(sums + d) * factor);
    if (kHasZeros<R>) store16(offset, load16(offset) * factor);
  }
  f32x16 p[4] = {};
#pragma GCC unroll 4
  for (int n = 0; n < PANELS; ++n) {
    p[n] = exp16(multiply_add(s[n], splat(scale), splat(-top)));
    if constexpr (kIsQuantised<T, R>)
      store_rounded(weights + n * kLanes, p[n] * load16(work.value_scales + n * kLanes));
    else p[n] = store_rounded(weights + n * kLanes, p[n]);
  }
  store16(total, all + ((p[0] + p[1]) + (p[2] + p[3])));
  if constexpr (kHasZeros<R>) {
    f32x16 more = load16(offset);
#pragma GCC unroll 4
    for (int n = 0; n < PANELS; ++n) more += p[n] * load16(work.value_zeros + n * kLanes);
    store16(offset, more);
  }
}

template <class T, class R, class... Rest>
static inline void soften(int64_t num_panels, Rest&&... rest) {
  if (num_panels == 4) soften<T, R, 4>(rest...);
  else if (num_panels == 3) soften<T, R, 3>(rest...);
  else if (num_panels == 2) soften<T, R, 2>(rest...);
  else soften<T, R, 1>(rest...);
}

// The sum of a query's values, which the keys' zeros are multiplied with.
template <class T>
static inline float sum_of(const T* row, int64_t width) {
  f32x16 sum = {};
  for (int64_t d = 0; d < width; d += kLanes) sum += load_up_to(row + d, width - d);
  return fold(sum);
}

// Query heads [first, first + count), all of one KV head.
struct HeadBlock {
  int64_t kv_head, first, count;
};

// Some query heads for a block of tokens; those of KV head `next_kv_head` come next (-1: none do).
// q: [T, H, D] with q_step values from token to token. out: [T, H, Dv]. Returns whether all results
// are finite.
template <class T, class R>
static bool attend_block(const AttentionPlan& p, Workspace<T>& work, const TokenBlock& block,
                         HeadBlock heads, int64_t next_kv_head, const T* q, int64_t q_step,
                         const int64_t* positions, const PageRows<R>& pages, const float* sinks,
                         T* out) {
  int64_t count = heads.count, num_rows = block.count * count;
  int64_t value_width = panels(p.value_dim) * kLanes;
  const T *queries[kQueryRows], *weights[kQueryRows];
  for (int64_t r = 0; r < num_rows; ++r) {
    int64_t head = heads.first + r % count;
    queries[r] = q + (block.first + r / count) * q_step + head * p.head_dim;
    weights[r] = work.weights + r * kKeys;
    f32x16 total = {};
    work.tops[r] = -1e30f;  // finite, so that a block in which a row sees nothing changes nothing
    if (sinks) work.tops[r] = sinks[head], total[0] = 1;
    store16(work.totals + r * kLanes, total);
    if (kHasZeros<R>) {
      work.query_sums[r] = sum_of(queries[r], p.head_dim);
      store16(work.offsets + r * kLanes, f32x16{});
    }
  }
  bool has_two_parts = pages.key_split < p.head_dim;
  const T* rests[kQueryRows];  // of the queries: for the second part of the keys
  for (int64_t r = 0; r < num_rows && has_two_parts; ++r) rests[r] = queries[r] + pages.key_split;
  memset(work.sums, 0, num_rows * value_width * sizeof(float));
  int64_t first_at = block.first_key / kKeys * kKeys;
  auto key_block = [&](int64_t kv_head, int64_t at) {
    return KeyBlock{kv_head, at, std::min(kKeys, block.last_key - at)};
  };
  for (int64_t at = first_at; at < block.last_key; at += kKeys) {
    KeyBlock now = key_block(heads.kv_head, at), next = key_block(heads.kv_head, at + kKeys);
    if (next.count <= 0 && next_kv_head >= 0) next = key_block(next_kv_head, first_at);
    int64_t num_panels = panels(now.count);
    pack_keys_and_values(p, work, block, now, next, pages);
    multiply_rows(queries, num_rows, pages.key_split, work.keys, kKeys, num_panels, work.scores,
                  kKeys, false);
    if (has_two_parts)
      multiply_rows(rests, num_rows, p.head_dim - pages.key_split,
                    work.keys + units<T>(pages.key_split) * kKeys, kKeys, num_panels,
                    work.second_scores, kKeys, false);
    for (int64_t r = 0; r < num_rows; ++r) {
      int64_t position = positions[block.first + r / count];
      if constexpr (kIsQuantised<T, R>) scale_scores<T, R>(work, r, num_panels, has_two_parts);
      soften<T, R>(num_panels, work, work.scores + r * kKeys, p.scale,
                   first_visible(p, position) - at, position + 1 - at, work.tops[r],
                   work.totals + r * kLanes, work.sums + r * value_width, value_width,
                   work.weights + r * kKeys, work.offsets + r * kLanes);
    }
    multiply_rows(weights, num_rows, num_panels * kLanes, work.values, value_width,
                  value_width / kLanes, work.sums, value_width, true);
  }
  f32x16 zero = {};  // NaN as soon as a result is not finite
  for (int64_t r = 0; r < num_rows; ++r) {
    T* to = out + ((block.first + r / count) * p.num_heads + heads.first + r % count) * p.value_dim;
    float total = fold(load16(work.totals + r * kLanes)), offset = 0;
    if (kHasZeros<R>) offset = fold(load16(work.offsets + r * kLanes));
    for (int64_t d = 0; d < p.value_dim; d += kLanes) {
      f32x16 v = load16(work.sums + r * value_width + d);
      if (kHasZeros<R>) v += offset;
      v = v / total;
      zero += v - v;
      store_up_to(to + d, v, p.value_dim - d);
    }
  }
  return fold(zero) == 0;
}

// A NaN among the keys that some rows of a block see must not reach the others (0 * NaN is NaN):
// then every token is computed alone.
template <class T, class... Rest>
static void attend_block_safely(const AttentionPlan& p, Workspace<T>& work, const TokenBlock& block,
                                HeadBlock heads, int64_t next_kv_head, const T* q, int64_t q_step,
                                const int64_t* positions, const Rest&... rest) {
  if (attend_block(p, work, block, heads, next_kv_head, q, q_step, positions, rest...)) return;
  for (int64_t t = block.first; block.count > 1 && t < block.first + block.count; ++t) {
    TokenBlock one{t, 1, first_visible(p, positions[t]), positions[t] + 1};
    attend_block(p, work, one, heads, -1, q, q_step, positions, rest...);
  }
}

// How a step's attention is cut: token blocks, and blocks of query heads of one KV head each.
struct AttentionJobs {
  std::vector<TokenBlock> blocks;
  std::vector<HeadBlock> heads;
  int64_t heads_per_job, jobs_per_block, threads;

  AttentionJobs(const AttentionPlan& p, const int64_t* positions) {
    int64_t group = p.num_heads / p.num_kv_heads, parts = (group + kQueryRows - 1) / kQueryRows;
    int64_t size = (group + parts - 1) / parts;
    for (int64_t h = 0; h < p.num_kv_heads; ++h)
      for (int64_t first = 0; first < group; first += size)
        heads.push_back({h, h * group + first, std::min(size, group - first)});
    blocks = cut_tokens(p, positions, std::max<int64_t>(1, kQueryRows / size));
    int64_t work = 0;
    for (const TokenBlock& b : blocks) work += b.count * (b.last_key - b.first_key);
    threads = work * p.num_heads * p.head_dim < 65536 ? 1 : p.threads;
    // All heads of a block in one job, where that leaves jobs enough: see `next_kv_head`.
    bool has_many_blocks = (int64_t)blocks.size() >= 8 * threads || threads == 1;
    heads_per_job = has_many_blocks ? heads.size() : 1;
    jobs_per_block = heads.size() / heads_per_job;
  }
};

template <class T, class R>
static void attend_jobs(const AttentionPlan& p, const AttentionJobs& jobs, const T* q,
                        int64_t q_step, const int64_t* positions, const PageRows<R>& pages,
                        const float* sinks, T* out) {
  parallel_for(jobs.blocks.size() * jobs.jobs_per_block, jobs.threads, [&](int64_t j) {
    static thread_local Workspace<T> work;
    work.reserve(p, kIsQuantised<T, R>);
    int64_t first = j % jobs.jobs_per_block * jobs.heads_per_job;
    for (int64_t h = first; h < first + jobs.heads_per_job; ++h)
      attend_block_safely(p, work, jobs.blocks[j / jobs.jobs_per_block], jobs.heads[h],
                          h + 1 < first + jobs.heads_per_job ? jobs.heads[h + 1].kv_head : -1, q,
                          q_step, positions, pages, sinks, out);
  });
}
