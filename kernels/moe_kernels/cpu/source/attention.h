// Causal attention over KV pages: blocks of query rows against blocks of 64 keys.
//
// The query heads of a KV head, for some tokens of one sequence, are the rows of a product with the
// block's keys, and then with its values (panels.h). Blocks begin at multiples of 64 positions, and
// a row meets its blocks in order; a key that it must not see has probability 0, which changes no
// sum. So a row's arithmetic depends on its own position and keys only.
#pragma once

#include <cmath>
#include <vector>

#include "attention_plan.h"
#include "panels.h"
#include "scratch.h"
#include "threads.h"

constexpr int64_t kKeys = kGroupColumns, kQueryRows = 64, kMaxHeadDim = 1024;

// Where a layer's keys and values lie: rows of pages [pages, Hkv, page_size], row_step values apart.
template <class T>
struct Rows {
  T* data;
  int64_t row_step;
};

// Neighbouring tokens of one sequence that are computed together.
struct TokenBlock {
  int64_t first, count;
  int64_t first_key, last_key;  // the keys that any of them may see: [first_key, last_key)
};

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

// A thread's scratch memory for one block of rows.
template <class T>
struct Workspace {
  Scratch memory[7];
  uint32_t *keys, *values;        // packed
  float *scores, *sums, *totals;  // [rows, kKeys], [rows, Dv], [rows, 16]
  T* weights;                     // [rows, kKeys]
  float* tops;                    // [rows]: the largest score so far

  void reserve(const AttentionPlan& p) {
    int64_t value_width = panels(p.value_dim) * kLanes;
    keys = memory[0].get<uint32_t>(units<T>(p.head_dim) * kKeys);
    values = memory[1].get<uint32_t>(units<T>(kKeys) * value_width);
    scores = memory[2].get<float>(kQueryRows * kKeys);
    sums = memory[3].get<float>(kQueryRows * value_width);
    totals = memory[4].get<float>(kQueryRows * kLanes);
    weights = memory[5].get<T>(kQueryRows * kKeys);
    tops = memory[6].get<float>(kQueryRows);
  }
};

static inline u32x16 value_units(const float* const* rows, int64_t d, int64_t count) {
  return (u32x16)load_up_to(rows[0] + d, count);
}

static inline u32x16 value_units(const bf16* const* rows, int64_t d, int64_t count) {
  return (u32x16)load_up_to(rows[0] + d, count) >> 16 | (u32x16)load_up_to(rows[1] + d, count);
}

// One unit of each of `width` columns, from one or two rows of values.
template <class T>
static inline void pack_values(const T* const* rows, int64_t width, uint32_t* out) {
  int64_t d = 0;
  for (; d + kLanes <= width; d += kLanes) {
    u32x16 v = value_units(rows, d, kLanes);
    memcpy(out + d, &v, sizeof v);
  }
  if (d == width) return;
  u32x16 v = value_units(rows, d, width - d);
  memcpy(out + d, &v, sizeof v);
}

// Up to 64 keys of a sequence and KV head, from position `at`, a multiple of 64.
struct KeyBlock {
  int64_t head, at, count;
};

// Row of the pages where a head's keys from position `at` (a multiple of 16) lie.
static inline int64_t page_row(const AttentionPlan& p, int64_t sequence, int64_t head, int64_t at) {
  int64_t page = p.tables[sequence * p.max_pages + at / p.page_size];
  return (page * p.num_kv_heads + head) * p.page_size + at % p.page_size;
}

template <class T>
static inline void fetch_rows(Rows<const T> rows, int64_t row, int64_t width) {
  constexpr int64_t kLineBytes = 64;
  const char* first = (const char*)(rows.data + row * rows.row_step);
  const char* last = (const char*)(rows.data + (row + kLanes - 1) * rows.row_step + width);
  for (; first < last; first += kLineBytes) __builtin_prefetch(first);
}

// A block's keys, packed; likewise its values, with 0 for those that no row of the token block
// sees: the memory there may hold NaN. `next` is fetched meanwhile, as pages are scattered.
template <class T>
static void pack_keys_and_values(const AttentionPlan& p, Workspace<T>& work, const TokenBlock& block,
                                 KeyBlock now, KeyBlock next, Rows<const T> keys,
                                 Rows<const T> values) {
  static const T zeros[kMaxHeadDim] = {};
  int64_t sequence = p.sequences[block.first], width = p.value_dim;
  int64_t value_width = panels(width) * kLanes;
  for (int64_t k = 0; k < std::max(now.count, next.count); k += kLanes) {
    if (k < next.count) {
      int64_t row = page_row(p, sequence, next.head, next.at + k);
      fetch_rows(keys, row, p.head_dim);
      if (values.data != keys.data) fetch_rows(values, row, p.value_dim);
    }
    if (k >= now.count) continue;
    int64_t row = page_row(p, sequence, now.head, now.at + k);
    pack_panel(keys.data + row * keys.row_step, keys.row_step, kLanes, p.head_dim, work.keys + k,
               kKeys);
    int64_t first_seen = block.first_key - now.at - k, last_seen = now.count - k;
    for (int64_t i = 0; i < kLanes; i += kUnit<T>) {
      const T* pair[2];
      for (int64_t n = 0; n < kUnit<T>; ++n) {
        bool is_seen = i + n >= first_seen && i + n < last_seen;
        pair[n] = is_seen ? values.data + (row + i + n) * values.row_step : zeros;
      }
      pack_values(pair, width, work.values + (k + i) / kUnit<T> * value_width);
    }
  }
}

static inline i32x16 lanes() { return i32x16{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }

// Scores of one row and block, PANELS * 16 keys -> weights (not yet divided by their sum), rounded
// to T. [first, last): the visible keys, counted from the block's first.
template <class T, int PANELS>
static inline void soften(const float* scores, float scale, int64_t first, int64_t last,
                          float& top, float* total, float* sums, int64_t value_width,
                          T* weights) {
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
  }
  f32x16 p[4] = {};
#pragma GCC unroll 4
  for (int n = 0; n < PANELS; ++n)
    p[n] = store_rounded(weights + n * kLanes,
                         exp16(multiply_add(s[n], splat(scale), splat(-top))));
  store16(total, all + ((p[0] + p[1]) + (p[2] + p[3])));
}

template <class T, class... Rest>
static inline void soften(int64_t num_panels, Rest&&... rest) {
  if (num_panels == 4) soften<T, 4>(rest...);
  else if (num_panels == 3) soften<T, 3>(rest...);
  else if (num_panels == 2) soften<T, 2>(rest...);
  else soften<T, 1>(rest...);
}

// Query heads [first, first + count), all of one KV head.
struct HeadBlock {
  int64_t kv_head, first, count;
};

// Some query heads for a block of tokens; those of KV head `next_kv_head` come next (-1: none do).
// q: [T, H, D] with q_step values from token to token. out: [T, H, Dv]. Returns whether all results
// are finite.
template <class T>
static bool attend_block(const AttentionPlan& p, Workspace<T>& work, const TokenBlock& block,
                         HeadBlock heads, int64_t next_kv_head, const T* q, int64_t q_step,
                         const int64_t* positions, Rows<const T> keys, Rows<const T> values,
                         const float* sinks, T* out) {
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
    pack_keys_and_values(p, work, block, now, next, keys, values);
    multiply_rows(queries, num_rows, p.head_dim, work.keys, kKeys, num_panels, work.scores, kKeys,
                  false);
    for (int64_t r = 0; r < num_rows; ++r) {
      int64_t position = positions[block.first + r / count];
      soften<T>(num_panels, work.scores + r * kKeys, p.scale, first_visible(p, position) - at,
                position + 1 - at, work.tops[r], work.totals + r * kLanes,
                work.sums + r * value_width, value_width, work.weights + r * kKeys);
    }
    multiply_rows(weights, num_rows, num_panels * kLanes, work.values, value_width,
                  value_width / kLanes, work.sums, value_width, true);
  }
  f32x16 zero = {};  // NaN as soon as a result is not finite
  for (int64_t r = 0; r < num_rows; ++r) {
    T* to = out + ((block.first + r / count) * p.num_heads + heads.first + r % count) * p.value_dim;
    float total = fold(load16(work.totals + r * kLanes));
    for (int64_t d = 0; d < p.value_dim; d += kLanes) {
      f32x16 v = load16(work.sums + r * value_width + d) / total;
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
                                const int64_t* positions, Rest... rest) {
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

template <class T>
static void attend_jobs(const AttentionPlan& p, const AttentionJobs& jobs, const T* q,
                        int64_t q_step, const int64_t* positions, Rows<const T> keys,
                        Rows<const T> values, const float* sinks, T* out) {
  parallel_for(jobs.blocks.size() * jobs.jobs_per_block, jobs.threads, [&](int64_t j) {
    static thread_local Workspace<T> work;
    work.reserve(p);
    int64_t first = j % jobs.jobs_per_block * jobs.heads_per_job;
    for (int64_t h = first; h < first + jobs.heads_per_job; ++h)
      attend_block_safely(p, work, jobs.blocks[j / jobs.jobs_per_block], jobs.heads[h],
                          h + 1 < first + jobs.heads_per_job ? jobs.heads[h + 1].kv_head : -1, q,
                          q_step, positions, keys, values, sinks, out);
  });
}
