// A step's attention: the shape of its heads, the sequence of each token, and their page tables.
#pragma once

#include <cstdint>

struct AttentionPlan {  // mirrored in native_attention.py
  const int64_t *sequences, *tables;  // [T], [S, max_pages]
  const int64_t* places;              // [T]: of a row among its keys; null: its position
  int64_t num_tokens, max_pages, page_size, num_heads, num_kv_heads, head_dim, value_dim;
  int64_t rotary_dim, norm, window, chunk, threads;  // window, chunk: 0 means none
  float scale, eps, clip;                            // clip: 0 means none
  // [T, 3] norms of q and k, sinks; of latents the latent's norm; null: all tokens have the layer's
  const void* const* own;
};
