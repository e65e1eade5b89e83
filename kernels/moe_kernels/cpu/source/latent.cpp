// Attention over latents: one key per token for all heads, whose first values are its value.

#include "attention.h"
#include "norm.h"

template <class T>
struct HeadRows {  // [T, H, ..] with these distances between tokens and between heads
  const T* data;
  int64_t token_step, head_step;
  const T* at(int64_t t, int64_t h) const { return data + t * token_step + h * head_step; }
};

// L = value_dim, R = rotary_dim, head_dim = L + R.
template <class T>
static void attend_latent(const AttentionPlan& p, HeadRows<T> q_latent, HeadRows<T> q_rope,
                          const T* latent, int64_t latent_step, const T* norm, const float* cos,
                          const float* sin, const int64_t* positions, const int64_t* kv_rows,
                          T* keys, T* out) {
  static thread_local Scratch scratch;
  T* q = scratch.get<T>(p.num_tokens * p.num_heads * p.head_dim);
  AttentionJobs jobs(p, positions);
  auto rotate_into = [&](const T* from, int64_t position, T* to) {
    float rotated[kMaxHeadDim];
    int64_t at = position * p.rotary_dim;
    rotate(from, cos + at, sin + at, rotated, p.rotary_dim, p.rotary_dim);
    store_row(rotated, 1.0f, to, p.rotary_dim);
  };
  parallel_for(p.num_tokens, p.num_tokens * p.num_heads >= 256 ? p.threads : 1, [&](int64_t t) {
    const T* from = latent + t * latent_step;
    T* to = keys + kv_rows[t] * p.head_dim;
    norm_row(from, norm, to, p.value_dim, p.eps);
    rotate_into(from + p.value_dim, positions[t], to + p.value_dim);
    for (int64_t h = 0; h < p.num_heads; ++h) {
      to = q + (t * p.num_heads + h) * p.head_dim;
      memcpy(to, q_latent.at(t, h), p.value_dim * sizeof(T));
      rotate_into(q_rope.at(t, h), positions[t], to + p.value_dim);
    }
  });
  attend_jobs<T>(p, jobs, q, p.num_heads * p.head_dim, positions, {keys, p.head_dim},
                 {keys, p.head_dim}, nullptr, out);
}

#define EXPORT(T, suffix)                                                                         \
  void moe_attend_latent_##suffix(                                                                \
      const AttentionPlan* p, const T* q_latent, int64_t q_latent_token_step,                     \
      int64_t q_latent_head_step, const T* q_rope, int64_t q_rope_token_step,                     \
      int64_t q_rope_head_step, const T* latent, int64_t latent_step, const T* norm,              \
      const float* cos, const float* sin, const int64_t* positions, const int64_t* kv_rows,       \
      T* keys, T* out) {                                                                          \
    attend_latent<T>(*p, {q_latent, q_latent_token_step, q_latent_head_step},                     \
                     {q_rope, q_rope_token_step, q_rope_head_step}, latent, latent_step, norm,    \
                     cos, sin, positions, kv_rows, keys, out);                                    \
  }

extern "C" {
EXPORT(bf16, bf16)
EXPORT(float, f32)
}
