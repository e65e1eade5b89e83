// Causal attention over KV pages, one (token, KV head) at a time, in fp32.
//
// A row walks its own keys in order, sixteen at a time, so its arithmetic does not depend on what
// else the step holds. The G query heads of a KV head share every key and value that is loaded.

#include <cmath>
#include <vector>

#include "vectors.h"

struct AttentionShape {
  int64_t num_heads, num_kv_heads, head_dim, page_size, max_pages;
  float scale;
  int64_t window;  // 0: none
};

// Scores of one block of 16 keys for G query rows: scores[g] lanes are the keys.
template <class T>
static inline void score_block(const float* q, const T* keys, int64_t group, int64_t dim,
                               float* scores, int64_t stride) {
  f32x16 products[16];
  for (int64_t g = 0; g < group; ++g) {
    for (int key = 0; key < 16; ++key) {
      f32x16 sum = {};
      for (int64_t d = 0; d < dim; d += 16)
        sum += load_up_to(q + g * dim + d, dim - d) * load_up_to(keys + key * dim + d, dim - d);
      products[key] = sum;
    }
    store16(scores + g * stride, sum_lanes(products));
  }
}

// The common head widths, unrolled: keys are widened once for up to four query rows.
template <class T, int DIM, int G>
static inline void score_block_of(const float* q, const T* keys, float* scores, int64_t stride) {
  f32x16 products[G][16];
  for (int key = 0; key < 16; ++key) {
    f32x16 sums[G] = {};
#pragma GCC unroll 8
    for (int d = 0; d < DIM; d += 16) {
      f32x16 k = load16(keys + key * DIM + d);
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) sums[g] += load16(q + g * DIM + d) * k;
    }
    for (int g = 0; g < G; ++g) products[g][key] = sums[g];
  }
  for (int g = 0; g < G; ++g) store16(scores + g * stride, sum_lanes(products[g]));
}

template <class T, int DIM>
static inline void score_group(const float* q, const T* keys, int64_t group, float* scores,
                               int64_t stride) {
  int64_t g = 0;
  for (; g + 4 <= group; g += 4)
    score_block_of<T, DIM, 4>(q + g * DIM, keys, scores + g * stride, stride);
  for (; g + 2 <= group; g += 2)
    score_block_of<T, DIM, 2>(q + g * DIM, keys, scores + g * stride, stride);
  if (g < group) score_block_of<T, DIM, 1>(q + g * DIM, keys, scores + g * stride, stride);
}

// out[g][d .. d + 16 W) += p[g][key] * v[key][...] for `count` keys.
template <class T, int G, int W>
static inline void weigh_block(const float* p, int64_t stride, const T* values, int64_t count,
                               int64_t dim, float* out) {
  f32x16 sums[G][W];
  for (int g = 0; g < G; ++g)
    for (int w = 0; w < W; ++w) sums[g][w] = load16(out + g * dim + 16 * w);
  for (int64_t key = 0; key < count; ++key) {
    f32x16 v[W];
#pragma GCC unroll 4
    for (int w = 0; w < W; ++w) v[w] = load16(values + key * dim + 16 * w);
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g)
#pragma GCC unroll 4
      for (int w = 0; w < W; ++w) sums[g][w] += v[w] * p[g * stride + key];
  }
  for (int g = 0; g < G; ++g)
    for (int w = 0; w < W; ++w) store16(out + g * dim + 16 * w, sums[g][w]);
}

template <class T, int W>
static inline void weigh_group(const float* p, int64_t stride, const T* values, int64_t count,
                               int64_t dim, int64_t group, float* out) {
  int64_t g = 0;
  for (; g + 4 <= group; g += 4)
    weigh_block<T, 4, W>(p + g * stride, stride, values, count, dim, out + g * dim);
  for (; g + 2 <= group; g += 2)
    weigh_block<T, 2, W>(p + g * stride, stride, values, count, dim, out + g * dim);
  if (g < group) weigh_block<T, 1, W>(p + g * stride, stride, values, count, dim, out + g * dim);
}

template <class T>
static inline void weigh(const float* p, int64_t stride, const T* values, int64_t count,
                         int64_t dim, int64_t group, float* out) {
  int64_t d = 0;
  for (; d + 64 <= dim; d += 64)
    weigh_group<T, 4>(p, stride, values + d, count, dim, group, out + d);
  for (; d + 16 <= dim; d += 16)
    weigh_group<T, 1>(p, stride, values + d, count, dim, group, out + d);
  for (; d < dim; ++d)
    for (int64_t g = 0; g < group; ++g)
      for (int64_t key = 0; key < count; ++key)
        out[g * dim + d] += load_some(values + key * dim + d, 1)[0] * p[g * stride + key];
}

// One token and KV head: keys [first, last), page by page.
template <class T>
static void attend(const float* q, const T* k_cache, const T* v_cache, const int64_t* pages,
                   int64_t head, int64_t first, int64_t last, const AttentionShape& s,
                   std::vector<float>& scores, std::vector<float>& sums, T* out) {
  int64_t group = s.num_heads / s.num_kv_heads, dim = s.head_dim, size = s.page_size;
  int64_t begin = first / 16 * 16, stride = (last - begin + 15) / 16 * 16;
  scores.resize(group * stride);
  sums.assign(group * dim, 0.0f);
  for (int64_t at = begin; at < last; at += 16) {
    const T* keys = k_cache + ((pages[at / size] * s.num_kv_heads + head) * size + at % size) * dim;
    float* block = scores.data() + at - begin;
    if (dim == 64) score_group<T, 64>(q, keys, group, block, stride);
    else if (dim == 128) score_group<T, 128>(q, keys, group, block, stride);
    else score_block<T>(q, keys, group, dim, block, stride);
  }
  for (int64_t g = 0; g < group; ++g) {
    float* row = scores.data() + g * stride;
    for (int64_t i = 0; i < first - begin; ++i) row[i] = -INFINITY;
    for (int64_t i = last - begin; i < stride; ++i) row[i] = -INFINITY;
    f32x16 top = splat(-INFINITY), total = {};
    for (int64_t i = 0; i < stride; i += 16) top = maximum(load16(row + i), top);
    float largest = top[0];
    for (int i = 1; i < 16; ++i) largest = top[i] > largest ? top[i] : largest;
    for (int64_t i = 0; i < stride; i += 16) {
      f32x16 p = exp16((load16(row + i) - largest) * s.scale);
      store16(row + i, p);
      total += p;
    }
    float sum = 0;
    for (int i = 0; i < 16; ++i) sum += total[i];
    for (int64_t i = 0; i < stride; i += 16) store16(row + i, load16(row + i) * (1.0f / sum));
  }
  for (int64_t at = begin; at < last; at += 16) {
    const T* values =
        v_cache + ((pages[at / size] * s.num_kv_heads + head) * size + at % size) * dim;
    int64_t count = last - at < 16 ? last - at : 16;
    weigh(scores.data() + at - begin, stride, values, count, dim, group, sums.data());
  }
  for (int64_t d = 0; d < group * dim; d += 16)
    store_up_to(out + d, load_up_to(sums.data() + d, group * dim - d), group * dim - d);
}

template <class T>
static void attention(const float* q, const T* k_cache, const T* v_cache, const int64_t* sequences,
                      const int64_t* positions, const int64_t* tables, T* out, int64_t num_tokens,
                      const AttentionShape& s, int threads) {
  int64_t group = s.num_heads / s.num_kv_heads;
#pragma omp parallel num_threads(threads) if (num_tokens > 1 || positions[0] > 256)
  {
    std::vector<float> scores, sums;
#pragma omp for collapse(2) schedule(dynamic, 4)
    for (int64_t t = 0; t < num_tokens; ++t)
      for (int64_t h = 0; h < s.num_kv_heads; ++h) {
        int64_t last = positions[t] + 1;
        int64_t first = s.window && last > s.window ? last - s.window : 0;
        int64_t at = (t * s.num_heads + h * group) * s.head_dim;
        attend(q + at, k_cache, v_cache, tables + sequences[t] * s.max_pages, h, first, last, s,
               scores, sums, out + at);
      }
  }
}

#define EXPORT(T, suffix)                                                                         \
  void moe_attention_##suffix(                                                                    \
      const float* q, const T* k_cache, const T* v_cache, const int64_t* sequences,               \
      const int64_t* positions, const int64_t* tables, T* out, int64_t num_tokens,                \
      int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, int64_t page_size,               \
      int64_t max_pages, double scale, int64_t window, int64_t threads) {                         \
    AttentionShape shape{num_heads, num_kv_heads, head_dim,     page_size,                        \
                         max_pages, (float)scale, window};                                        \
    attention<T>(q, k_cache, v_cache, sequences, positions, tables, out, num_tokens, shape,       \
                 (int)threads);                                                                   \
  }

extern "C" {
// q [T, H, D] fp32; caches [pages, Hkv, page_size, D]; sequences and positions [T]; tables
// [S, max_pages]; out [T, H, D]. page_size is a multiple of 16.
EXPORT(bf16, bf16)
EXPORT(float, f32)
}
