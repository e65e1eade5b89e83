// Attention over latents: one key per token for all heads, whose first values are its value.

#include "attention.h"
#include "../norm.h"

template <class T>
struct HeadRows {  // [T, H, ..] with these distances between tokens and between heads
  const T* data;
  int64_t token_step, head_step;
  const T* at(int64_t t, int64_t h) const { return data + t * token_step + h * head_step; }
};

// L = value_dim, R = rotary_dim, head_dim = L + R.
template <class T, class R>
static void attend_latent(const AttentionPlan& p, HeadRows<T> q_latent, HeadRows<T> q_rope,
                          const T* latent, int64_t latent_step, const T* norm, const float* cos,
                          const float* sin, const int64_t* positions, const int64_t* kv_rows,
                          const KVPages& pages, T* out) {
  static thread_local Scratch scratch;
  T* q = scratch.get<T>(p.num_tokens * p.num_heads * p.head_dim);
  R* keys = static_cast<R*>(pages.keys);
  const int64_t* places = p.places ? p.places : positions;
  AttentionJobs jobs(p, places);
  auto rotate_into = [&](const T* from, int64_t position, float* rotated) {
    int64_t at = position * p.rotary_dim;
    rotate(from, cos + at, sin + at, rotated, p.rotary_dim, p.rotary_dim);
  };
  parallel_for(p.num_tokens, p.num_tokens * p.num_heads >= 256 ? p.threads : 1, [&](int64_t t) {
    float rotated[kMaxHeadDim];
    const T* from = latent + t * latent_step;
    const T* weight = p.own ? (const T*)p.own[3 * t] : norm;
    R* row = keys + kv_rows[t] * p.head_dim;
    rotate_into(from + p.value_dim, positions[t], rotated);
    if constexpr (kIsQuantised<T, R>) {
      T normed[kMaxHeadDim];
      float wide_latent[kMaxHeadDim];
      norm_row(from, weight, normed, p.value_dim, p.eps);
      for (int64_t d = 0; d < p.value_dim; d += kLanes)
        store16(wide_latent + d, load_up_to(normed + d, p.value_dim - d));
      bf16* scales = pages.key_scales + kv_rows[t] * pages.scales_per_row;
      store_quantised(wide_latent, p.value_dim, row, scales);
      store_quantised(rotated, p.rotary_dim, row + p.value_dim, scales + 1);
    } else {
      norm_row(from, weight, row, p.value_dim, p.eps);
      store_row(rotated, 1.0f, row + p.value_dim, p.rotary_dim);
    }
    for (int64_t h = 0; h < p.num_heads; ++h) {
      T* to = q + (t * p.num_heads + h) * p.head_dim;
      memcpy(to, q_latent.at(t, h), p.value_dim * sizeof(T));
      rotate_into(q_rope.at(t, h), positions[t], rotated);
      store_row(rotated, 1.0f, to + p.value_dim, p.rotary_dim);
    }
  });
  Rows<R> rows{keys, p.head_dim, pages.key_scales};
  int64_t split = kIsQuantised<T, R> ? p.value_dim : p.head_dim;
  attend_jobs<T, R>(p, jobs, q, p.num_heads * p.head_dim, places,
                    {rows, rows, split, pages.scales_per_row}, nullptr, out);
}

#define EXPORT(T, suffix)                                                                         \
  void moe_attend_latent_##suffix(                                                                \
      const AttentionPlan* p, const T* q_latent, int64_t q_latent_token_step,                     \
      int64_t q_latent_head_step, const T* q_rope, int64_t q_rope_token_step,                     \
      int64_t q_rope_head_step, const T* latent, int64_t latent_step, const T* norm,              \
      const float* cos, const float* sin, const int64_t* positions, const int64_t* kv_rows,       \
      const KVPages* pages, T* out) {                                                             \
    auto function = pages->bits == 8 ? attend_latent<T, int8_t> : attend_latent<T, T>;            \
    function(*p, {q_latent, q_latent_token_step, q_latent_head_step},                             \
             {q_rope, q_rope_token_step, q_rope_head_step}, latent, latent_step, norm, cos, sin,  \
             positions, kv_rows, *pages, out);                                                    \
  }

extern "C" {
EXPORT(bf16, bf16)
EXPORT(float, f32)
}
