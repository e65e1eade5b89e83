// Attention with keys and values of their own: norm, clip, rotate, store, attend.

#include "attention.h"
#include "norm.h"

enum Norm : int64_t { kNoNorm, kNormByHead, kNormByRow, kNormAfterRotation };

struct Rotary {
  const float *cos, *sin, *query_scale;  // [P, R], [P, R], [P] or null
};

// A head of q or k, normed, rotated and scaled, into `out` (which may be x).
template <class T>
static inline void shape_head(const AttentionPlan& p, T* x, const T* weight, const Rotary& rotary,
                              int64_t position, float scale, T* out) {
  alignas(64) float head[kMaxHeadDim];
  int64_t at = position * p.rotary_dim;
  if (p.norm == kNormByHead) norm_row(x, weight, x, p.head_dim, p.eps);
  rotate(x, rotary.cos + at, rotary.sin + at, head, p.rotary_dim, p.head_dim);
  if (p.norm == kNormAfterRotation) norm_row(head, weight, head, p.head_dim, p.eps);
  store_row(head, scale, out, p.head_dim);
}

// One token's qkv [(H + Hkv) D + Hkv Dv]: the queries in place, keys and values into the pages.
template <class T>
static void shape_token(const AttentionPlan& p, T* qkv, const T* q_norm, const T* k_norm,
                        const Rotary& rotary, int64_t position, const int64_t* kv_rows, T* keys,
                        T* values) {
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
    shape_head(p, q, q_norm, rotary, position, scale, q);
  }
  for (int64_t h = 0; h < p.num_kv_heads; ++h) {
    shape_head(p, k + h * p.head_dim, k_norm, rotary, position, 1.0f,
               keys + kv_rows[h] * p.head_dim);
    memcpy(values + kv_rows[h] * p.value_dim, v + h * p.value_dim, p.value_dim * sizeof(T));
  }
}

template <class T>
static void attend(const AttentionPlan& p, T* qkv, const T* q_norm, const T* k_norm,
                   const float* sinks, const Rotary& rotary, const int64_t* positions,
                   const int64_t* kv_rows, T* keys, T* values, T* out) {
  int64_t row = (p.num_heads + p.num_kv_heads) * p.head_dim + p.num_kv_heads * p.value_dim;
  AttentionJobs jobs(p, positions);
  constexpr int64_t kTokens = 4;  // in one job
  int64_t threads = p.num_tokens >= 2 * kTokens ? p.threads : 1;
  parallel_for((p.num_tokens + kTokens - 1) / kTokens, threads, [&](int64_t j) {
    for (int64_t t = j * kTokens; t < std::min(p.num_tokens, (j + 1) * kTokens); ++t)
      shape_token(p, qkv + t * row, q_norm, k_norm, rotary, positions[t],
                  kv_rows + t * p.num_kv_heads, keys, values);
  });
  attend_jobs<T>(p, jobs, qkv, row, positions, {keys, p.head_dim}, {values, p.value_dim}, sinks,
                 out);
}

#define EXPORT(T, suffix)                                                                         \
  void moe_attend_##suffix(const AttentionPlan* p, T* qkv, const T* q_norm, const T* k_norm,      \
                           const float* sinks, const float* cos, const float* sin,                \
                           const float* query_scale, const int64_t* positions,                    \
                           const int64_t* kv_rows, T* keys, T* values, T* out) {                  \
    attend<T>(*p, qkv, q_norm, k_norm, sinks, {cos, sin, query_scale}, positions, kv_rows, keys,  \
              values, out);                                                                       \
  }

extern "C" {
// qkv [T, (H + Hkv) D + Hkv Dv] is overwritten; kv_rows [T, Hkv]; keys [pages, Hkv, page_size, D],
// values [.., Dv]; out [T, H, Dv]. page_size is a multiple of 16.
EXPORT(bf16, bf16)
EXPORT(float, f32)
}
