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
  float *scores = work.scores + row * kKeys, *seconds = work.second_scores + row * kKeys;
  auto product = [&](const float* at, int part) {
    if constexpr (!kUsesDigits<T, R>) return load16(at);
    i32x16 whole = (i32x16)load_units16((const uint32_t*)at);
    whole -= work.query_biases[2 * row + part];
    return to_floats(whole) * work.query_scales[row];
  };
  for (int64_t k = 0; k < num_panels * kLanes; k += kLanes) {
    f32x16 s = product(scores + k, 0) * load16(work.key_scales + k);
    if (kHasZeros<R>) s += work.query_sums[row] * load16(work.key_seconds + k);
    else if (has_two_parts) s += product(seconds + k, 1) * load16(work.key_seconds + k);
    store16(scores + k, s);
  }
}

// Scores of one row and block, PANELS * 16 keys -> weights (not yet divided by their sum), rounded
// to T. [first, last): the visible keys, counted from the block's first. Weights of quantised rows
// (R is not T) are multiplied by the values' scales, and `offset` adds up what their zeros add.
template <class T, class R, int PANELS>
static inline void soften(const Workspace<T>& work, int64_t row, float scale, int64_t first,
                          int64_t last, float& top, int64_t value_width) {
  const float* scores = work.scores + row * kKeys;
  float *total = work.totals + row * kLanes, *sums = work.sums + row * value_width;
  float* offset = work.offsets + row * kLanes;
  T* weights = work.weights + row * kKeys;
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
    if constexpr (kIsQuantised<T, R>) s[n] = p[n] * load16(work.value_scales + n * kLanes);
    else p[n] = store_rounded(weights + n * kLanes, p[n]);
    if constexpr (kIsQuantised<T, R> && !kUsesDigits<T, R>)
      store_rounded(weights + n * kLanes, s[n]);
  }
#if HAS_DIGITS
  if constexpr (kUsesDigits<T, R>) {
    int8_t* digits = work.weight_digits + row * 2 * kKeys;
    work.weight_scales[row] = put_weights<PANELS>(s, digits, digits + kKeys);
  }
#endif
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

// The products of a block: queries with packed keys into `scores`, weights with packed values onto
// `sums`. Those of digits are whole numbers until they are scaled.
template <class T, class R>
class BlockProducts {
 public:
  BlockProducts(const AttentionPlan& p, Workspace<T>& work, int64_t split)
      : p_(p), work_(work), split_(split), rest_(p.head_dim - split) {}

  void add_row(int64_t r, const T* query) {
    queries_[r] = query, rests_[r] = query + split_, weights_[r] = work_.weights + r * kKeys;
    if (kHasZeros<R>) work_.query_sums[r] = sum_of(query, p_.head_dim);
#if HAS_DIGITS
    if constexpr (kUsesDigits<T, R>) {
      int64_t step = work_.query_step(p_), second = (split_ + kLanes - 1) / kLanes * kLanes;
      int8_t *high = work_.query_digits + r * step, *low = high + step / 2;
      QueryDigits made = put_query(query, p_.head_dim, split_, high, low);
      work_.query_scales[r] = made.scale;
      memcpy(work_.query_biases + 2 * r, made.biases, sizeof made.biases);
      digits_[0][r] = {high, low}, digits_[1][r] = {high + second, low + second};
      weight_digits_[r].high = work_.weight_digits + r * 2 * kKeys;
      weight_digits_[r].low = weight_digits_[r].high + kKeys;
    }
#endif
  }

  void with_keys(int64_t num_rows, int64_t num_panels) {
    const uint32_t* second = work_.keys + key_units<T, R>(split_) * kKeys;
    if constexpr (kUsesDigits<T, R>) {
#if HAS_DIGITS
      multiply_digits<true>(digits_[0], num_rows, digit_units(split_), work_.keys, kKeys, num_panels,
                            (int32_t*)work_.scores, kKeys);
      if (rest_)
        multiply_digits<true>(digits_[1], num_rows, digit_units(rest_), second, kKeys, num_panels,
                              (int32_t*)work_.second_scores, kKeys);
#endif
    } else {
      multiply_rows(queries_, num_rows, split_, work_.keys, kKeys, num_panels, work_.scores, kKeys,
                    false);
      if (rest_)
        multiply_rows(rests_, num_rows, rest_, second, kKeys, num_panels, work_.second_scores,
                      kKeys, false);
    }
  }

  void with_values(int64_t num_rows, int64_t num_panels, int64_t value_width) {
    int64_t num_keys = num_panels * kLanes, num_columns = value_width / kLanes;
    if constexpr (kUsesDigits<T, R>) {
#if HAS_DIGITS
      multiply_digits<false>(weight_digits_, num_rows, num_keys / kDigitUnit, work_.values,
                             value_width, num_columns, work_.products, value_width);
      for (int64_t r = 0; r < num_rows; ++r)
        for (int64_t at = r * value_width; at < (r + 1) * value_width; at += kLanes) {
          f32x16 product = to_floats((i32x16)load_units16((uint32_t*)work_.products + at));
          store16(work_.sums + at, multiply_add(product, splat(work_.weight_scales[r]),
                                                load16(work_.sums + at)));
        }
#endif
    } else {
      multiply_rows(weights_, num_rows, num_keys, work_.values, value_width, num_columns,
                    work_.sums, value_width, true);
    }
  }

 private:
  const AttentionPlan& p_;
  Workspace<T>& work_;
  const int64_t split_, rest_;  // widths of the two parts of a key
  const T *queries_[kQueryRows], *rests_[kQueryRows], *weights_[kQueryRows];
  DigitRow digits_[2][kUsesDigits<T, R> ? kQueryRows : 1];
  DigitRow weight_digits_[kUsesDigits<T, R> ? kQueryRows : 1];
};

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
  BlockProducts<T, R> products(p, work, pages.key_split);
  for (int64_t r = 0; r < num_rows; ++r) {
    int64_t head = heads.first + r % count, token = block.first + r / count;
    const float* top = p.own ? (const float*)p.own[3 * token + 2] : sinks;
    products.add_row(r, q + token * q_step + head * p.head_dim);
    f32x16 total = {};
    work.tops[r] = -1e30f;  // finite, so that a block in which a row sees nothing changes nothing
    if (top) work.tops[r] = top[head], total[0] = 1;
    store16(work.totals + r * kLanes, total);
    if (kHasZeros<R>) store16(work.offsets + r * kLanes, f32x16{});
  }
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
    products.with_keys(num_rows, num_panels);
    for (int64_t r = 0; r < num_rows; ++r) {
      int64_t position = positions[block.first + r / count];
      if constexpr (kIsQuantised<T, R>)
        scale_scores<T, R>(work, r, num_panels, pages.key_split < p.head_dim);
      soften<T, R>(num_panels, work, r, p.scale, first_visible(p, position) - at,
                   position + 1 - at, work.tops[r], value_width);
    }
    products.with_values(num_rows, num_panels, value_width);
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
