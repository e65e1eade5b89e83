// Attention with keys and values of their own: norm, clip, rotate, store, attend.

#include "attention.h"
#include "../norm.h"

enum Norm : int64_t { kNoNorm, kNormByHead, kNormByRow, kNormAfterRotation };

struct Rotary {
  const float *cos, *sin, *query_scale;  // [P, R], [P, R], [P] or null
};

// A head of q or k, normed and rotated, in fp32.
template <class T>
static inline void shape_head(const AttentionPlan& p, T* x, const T* weight, const Rotary& rotary,
                              int64_t position, float* head) {
  int64_t at = position * p.rotary_dim;
  if (p.norm == kNormByHead) norm_row(x, weight, x, p.head_dim, p.eps);
  rotate(x, rotary.cos + at, rotary.sin + at, head, p.rotary_dim, p.head_dim);
  if (p.norm == kNormAfterRotation) norm_row(head, weight, head, p.head_dim, p.eps);
}

// A head's key and value, written to a row of the pages.
template <class T, class R>
static inline void store_head(const AttentionPlan& p, const KVPages& pages, int64_t row,
                              const float* key, const T* value) {
  R* keys = static_cast<R*>(pages.keys) + row * row_size<R>(p.head_dim);
  R* values = static_cast<R*>(pages.values) + row * row_size<R>(p.value_dim);
  if constexpr (kIsQuantised<T, R>) {
    alignas(64) float wide_value[kMaxHeadDim];
    for (int64_t d = 0; d < p.value_dim; d += kLanes)
      store16(wide_value + d, load_up_to(value + d, p.value_dim - d));
    int64_t at = row * pages.scales_per_row;
    store_quantised(key, p.head_dim, keys, pages.key_scales + at);
    store_quantised(wide_value, p.value_dim, values, pages.value_scales + at);
  } else {
    store_row(key, 1.0f, keys, p.head_dim);
    memcpy(values, value, p.value_dim * sizeof(T));
  }
}

// One token's qkv [(H + Hkv) D + Hkv Dv]: the queries in place, keys and values into the pages.
template <class T, class R>
static void shape_token(const AttentionPlan& p, T* qkv, const T* q_norm, const T* k_norm,
                        const Rotary& rotary, int64_t position, const int64_t* kv_rows,
                        const KVPages& pages) {
  alignas(64) float head[kMaxHeadDim];
  int64_t q_size = p.num_heads * p.head_dim, k_size = p.num_kv_heads * p.head_dim;
  T *k = qkv + q_size, *v = k + k_size;
  if (p.norm == kNormByRow) {
    norm_row(qkv, q_norm, qkv, q_size, p.eps);
    norm_row(k, k_norm, k, k_size, p.eps);
  }
  if (p.clip > 0) clip_row(qkv, q_size + k_size + p.num_kv_heads * p.value_dim, p.clip);
  float scale = rotary.query_scale ? rotary.query_scale[position] : 1.0f;
  for (int64_t h = 0; h < p.num_heads; ++h) {
    T* q = qkv + h * p.head_dim;
    shape_head(p, q, q_norm, rotary, position, head);
    if (pages.rotation) hadamard(head, p.head_dim, pages.rotation);
    store_row(head, scale, q, p.head_dim);
  }
  for (int64_t h = 0; h < p.num_kv_heads; ++h) {
    shape_head(p, k + h * p.head_dim, k_norm, rotary, position, head);
    if (pages.rotation) hadamard(head, p.head_dim, pages.rotation);
    store_head<T, R>(p, pages, kv_rows[h], head, v + h * p.value_dim);
  }
}

template <class T, class R>
static void attend(const AttentionPlan& p, T* qkv, const T* q_norm, const T* k_norm,
                   const float* sinks, const Rotary& rotary, const int64_t* positions,
                   const int64_t* kv_rows, const KVPages& pages, T* out) {
  int64_t row = (p.num_heads + p.num_kv_heads) * p.head_dim + p.num_kv_heads * p.value_dim;
  const int64_t* places = p.places ? p.places : positions;
  AttentionJobs jobs(p, places);
  constexpr int64_t kTokens = 4;  // in one job
  int64_t threads = p.num_tokens >= 2 * kTokens ? p.threads : 1;
  parallel_for((p.num_tokens + kTokens - 1) / kTokens, threads, [&](int64_t j) {
    for (int64_t t = j * kTokens; t < std::min(p.num_tokens, (j + 1) * kTokens); ++t)
      shape_token<T, R>(p, qkv + t * row, p.own ? (const T*)p.own[3 * t] : q_norm,
                        p.own ? (const T*)p.own[3 * t + 1] : k_norm, rotary, positions[t],
                        kv_rows + t * p.num_kv_heads, pages);
  });
  auto rows = [&](const void* data, int64_t width, const bf16* scales) {
    return Rows<R>{static_cast<const R*>(data), row_size<R>(width), scales};
  };
  attend_jobs<T, R>(p, jobs, qkv, row, places,
                    {rows(pages.keys, p.head_dim, pages.key_scales),
                     rows(pages.values, p.value_dim, pages.value_scales), p.head_dim,
                     pages.scales_per_row},
                    sinks, out);
}

#define EXPORT(T, suffix)                                                                         \
  void moe_attend_##suffix(const AttentionPlan* p, T* qkv, const T* q_norm, const T* k_norm,      \
                           const float* sinks, const float* cos, const float* sin,                \
                           const float* query_scale, const int64_t* positions,                    \
                           const int64_t* kv_rows, const KVPages* pages, T* out) {                \
    auto function = pages->bits == 8   ? attend<T, int8_t>                                        \
                    : pages->bits == 4 ? attend<T, Nibbles>                                       \
                                       : attend<T, T>;                                            \
    function(*p, qkv, q_norm, k_norm, sinks, {cos, sin, query_scale}, positions, kv_rows, *pages, \
             out);                                                                                \
  }

extern "C" {
// qkv [T, (H + Hkv) D + Hkv Dv] is overwritten; kv_rows [T, Hkv]; out [T, H, Dv]. The page size is a
// multiple of 16.
EXPORT(bf16, bf16)
EXPORT(float, f32)
}
