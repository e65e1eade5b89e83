// Row by row: RMSNorm, what happens to q, k and v between projection and attention, the router.

#include <cmath>
#include <vector>

#include "vectors.h"

static inline float fold(f32x16 v) {
  float sum = 0;
  for (int i = 0; i < 16; ++i) sum += v[i];
  return sum;
}

static inline f32x16 round_to(const float*, f32x16 v) { return v; }
static inline f32x16 round_to(const bf16*, f32x16 v) {
  bf16 h[16];
  store16(h, v);
  return load16(h);
}

// x / sqrt(mean(x^2) + eps) rounded to T, times weight, rounded to T.
template <class T>
static void norm_row(const T* x, const T* weight, T* out, int64_t width, float eps) {
  f32x16 squares = {};
  for (int64_t d = 0; d < width; d += 16) {
    f32x16 v = load_up_to(x + d, width - d);
    squares += v * v;
  }
  float scale = 1.0f / std::sqrt(fold(squares) / (float)width + eps);
  for (int64_t d = 0; d < width; d += 16) {
    f32x16 normed = round_to(x, load_up_to(x + d, width - d) * scale);
    store_up_to(out + d, normed * load_up_to(weight + d, width - d), width - d);
  }
}

template <class T>
static void rms_norm(const T* x, const T* weight, T* out, int64_t num_rows, int64_t width,
                     float eps, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (num_rows * width > 65536)
  for (int64_t t = 0; t < num_rows; ++t)
    norm_row(x + t * width, weight, out + t * width, width, eps);
}

struct HeadShape {
  int64_t num_heads, num_kv_heads, head_dim, norm;  // norm: 0 none, 1 by head, 2 by row
  float eps, clip;                                  // clip: 0 is none
};

template <class T>
static void clip_row(T* row, int64_t count, float bound) {
  for (int64_t d = 0; d < count; d += 16) {
    f32x16 v = load_up_to(row + d, count - d);
    v = select(v > splat(bound), splat(bound), v);
    v = select(v < splat(-bound), splat(-bound), v);
    store_up_to(row + d, v, count - d);
  }
}

// Rotate by halves: out = x cos + swap(x) sin, the minus sign being in the sine's first half.
template <class T, class Out>
static void rotate_head(const T* x, const float* cos, const float* sin, Out* out, int64_t dim) {
  int64_t half = dim / 2;
  for (int64_t d = 0; d < dim; ++d) {
    float swapped = load_some(x + (d < half ? d + half : d - half), 1)[0];
    f32x16 v = splat(load_some(x + d, 1)[0] * cos[d] + swapped * sin[d]);
    store_some(out + d, v, 1);
  }
}

template <class T, class Out>
static void rotate_head_by_16(const T* x, const float* cos, const float* sin, Out* out,
                              int64_t dim) {
  int64_t half = dim / 2;
  for (int64_t d = 0; d < dim; d += 16) {
    f32x16 swapped = load16(x + (d < half ? d + half : d - half));
    store16(out + d, load16(x + d) * load16(cos + d) + swapped * load16(sin + d));
  }
}

template <class T, class Out>
static void rotate(const T* x, const float* cos, const float* sin, Out* out, int64_t dim) {
  if (dim % 32 == 0) rotate_head_by_16(x, cos, sin, out, dim);
  else rotate_head(x, cos, sin, out, dim);
}

// Split qkv [T, (H + 2 Hkv) D] (changed in place), norm, clip and rotate; q goes out in fp32, k and
// v into the cache at kv_rows [T, Hkv].
template <class T>
static void split_heads(T* qkv, const T* q_norm, const T* k_norm, const float* cos,
                        const float* sin, const int64_t* positions, const int64_t* kv_rows,
                        T* k_cache, T* v_cache, float* q_out, int64_t num_rows, HeadShape s,
                        int threads) {
  int64_t dim = s.head_dim, q_size = s.num_heads * dim, kv_size = s.num_kv_heads * dim;
#pragma omp parallel for num_threads(threads) schedule(static) if (num_rows >= 16)
  for (int64_t t = 0; t < num_rows; ++t) {
    T* q = qkv + t * (q_size + 2 * kv_size);
    T *k = q + q_size, *v = k + kv_size;
    if (s.norm == 2) {
      norm_row(q, q_norm, q, q_size, s.eps);
      norm_row(k, k_norm, k, kv_size, s.eps);
    }
    if (s.clip > 0) clip_row(q, q_size + 2 * kv_size, s.clip);
    const float *c = cos + positions[t] * dim, *si = sin + positions[t] * dim;
    for (int64_t h = 0; h < s.num_heads; ++h) {
      if (s.norm == 1) norm_row(q + h * dim, q_norm, q + h * dim, dim, s.eps);
      rotate(q + h * dim, c, si, q_out + (t * s.num_heads + h) * dim, dim);
    }
    for (int64_t h = 0; h < s.num_kv_heads; ++h) {
      if (s.norm == 1) norm_row(k + h * dim, k_norm, k + h * dim, dim, s.eps);
      int64_t row = kv_rows[t * s.num_kv_heads + h];
      rotate(k + h * dim, c, si, k_cache + row * dim, dim);
      memcpy(v_cache + row * dim, v + h * dim, dim * sizeof(T));
    }
  }
}

// Softmax over all experts, the k largest (the lower id where equal), optionally renormalised, in
// ascending order of id.
template <class T>
static void route(const T* logits, int64_t* ids, float* weights, int64_t num_rows,
                  int64_t num_experts, int64_t top_k, int64_t is_renormalised,
                  int threads) {
#pragma omp parallel num_threads(threads) if (num_rows >= 64)
  {
    std::vector<float> scores(num_experts + 16);
    std::vector<char> is_chosen(num_experts);
#pragma omp for schedule(static)
    for (int64_t t = 0; t < num_rows; ++t) {
      const T* row = logits + t * num_experts;
      float top = -INFINITY;
      for (int64_t e = 0; e < num_experts; ++e) top = std::fmax(top, load_some(row + e, 1)[0]);
      f32x16 total = {};
      for (int64_t e = 0; e < num_experts; e += 16) {
        int64_t count = num_experts - e;
        f32x16 p = exp16(load_up_to(row + e, count) - top);
        store_up_to(&scores[e], p, count);
        total += load_up_to(&scores[e], count);
      }
      float sum = fold(total), chosen = 0;
      std::fill(is_chosen.begin(), is_chosen.end(), 0);
      for (int64_t k = 0; k < top_k; ++k) {
        int64_t best = -1;
        for (int64_t e = 0; e < num_experts; ++e)
          if (!is_chosen[e] && (best < 0 || scores[e] > scores[best])) best = e;
        is_chosen[best] = 1;
        chosen += scores[best];
      }
      float divisor = is_renormalised ? chosen : sum;
      for (int64_t e = 0, k = 0; e < num_experts && k < top_k; ++e)
        if (is_chosen[e]) {
          ids[t * top_k + k] = e;
          weights[t * top_k + k++] = scores[e] / divisor;
        }
    }
  }
}

#define EXPORT(T, suffix)                                                                         \
  void moe_rms_norm_##suffix(const T* x, const T* weight, T* out, int64_t num_rows,               \
                             int64_t width, double eps, int64_t threads) {                        \
    rms_norm<T>(x, weight, out, num_rows, width, (float)eps, (int)threads);                       \
  }                                                                                               \
  void moe_split_heads_##suffix(T* qkv, const T* q_norm, const T* k_norm, const float* cos,       \
                                const float* sin, const int64_t* positions,                       \
                                const int64_t* kv_rows, T* k_cache, T* v_cache, float* q_out,     \
                                int64_t num_rows, int64_t num_heads, int64_t num_kv_heads,        \
                                int64_t head_dim, int64_t norm, double eps, double clip,          \
                                int64_t threads) {                                                \
    HeadShape shape{num_heads, num_kv_heads, head_dim, norm, (float)eps, (float)clip};            \
    split_heads<T>(qkv, q_norm, k_norm, cos, sin, positions, kv_rows, k_cache, v_cache, q_out,    \
                   num_rows, shape, (int)threads);                                                \
  }                                                                                               \
  void moe_route_##suffix(const T* logits, int64_t* ids, float* weights, int64_t num_rows,        \
                          int64_t num_experts, int64_t top_k, int64_t is_renormalised,            \
                          int64_t threads) {                                                      \
    route<T>(logits, ids, weights, num_rows, num_experts, top_k, is_renormalised, (int)threads);  \
  }

extern "C" {
EXPORT(bf16, bf16)
EXPORT(float, f32)
}
