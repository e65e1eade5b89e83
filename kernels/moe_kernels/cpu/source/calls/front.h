// Declares the functions of the other files that front.cpp calls, as Python calls them.
#pragma once

#include <cstdint>

struct Linear;
struct Router;
struct AttentionPlan;
struct KVPages;
struct RowAdapters;

struct Front {  // mirrored in native_kernels.py
  const void *attention_norm, *moe_norm, *q_norm, *k_norm;
  const float *sinks, *cos, *sin, *query_scale, *selection_bias;
  const Linear *qkv, *output, *router;  // router: null in a dense layer
  const Router* route;
  int64_t width, qkv_width, attended_width, num_experts, top_k, threads;
  double eps;
};

template <class T>
struct Parts {
  void (*rms_norm)(const T*, int64_t, const T*, T*, int64_t, int64_t, double, int64_t);
  void (*linear)(const Linear*, const T*, int64_t, const T*, T*, int64_t);
  void (*attend)(const AttentionPlan*, T*, const T*, const T*, const float*, const float*,
                 const float*, const float*, const int64_t*, const int64_t*, const KVPages*, T*);
  void (*router_linear)(const Linear*, const T*, int64_t, float*, int64_t);
  void (*low_rank)(const RowAdapters*, int64_t, int64_t, const T*, int64_t, T*, int64_t);
  void (*row_signs)(const RowAdapters*, int64_t, int64_t, const T*, int64_t, T*, int64_t);
};

#define DECLARE(T, suffix)                                                                        \
  void moe_rms_norm_##suffix(const T*, int64_t, const T*, T*, int64_t, int64_t, double, int64_t); \
  void moe_linear_##suffix(const Linear*, const T*, int64_t, const T*, T*, int64_t);              \
  void moe_attend_##suffix(const AttentionPlan*, T*, const T*, const T*, const float*,            \
                           const float*, const float*, const float*, const int64_t*,              \
                           const int64_t*, const KVPages*, T*);                                   \
  void moe_router_linear_##suffix(const Linear*, const T*, int64_t, float*, int64_t);             \
  void moe_low_rank_##suffix(const RowAdapters*, int64_t, int64_t, const T*, int64_t, T*, int64_t); \
  void moe_row_signs_##suffix(const RowAdapters*, int64_t, int64_t, const T*, int64_t, T*, int64_t);

extern "C" {
DECLARE(uint16_t, bf16)
DECLARE(float, f32)
void moe_route(const Router*, const float*, const float*, int64_t*, float*, int64_t);
}
