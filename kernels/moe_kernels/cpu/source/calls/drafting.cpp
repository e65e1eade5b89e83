// A drafting head in one call: several tokens for each of several sequences.
//
// It calls the kernel of each part, so the results are the same bit for bit; it saves the calls
// through Python between them.

#include <algorithm>

#include "../largest.h"
#include "../norm.h"
#include "../scratch.h"

struct Linear;
struct Experts;

struct RowAdapters;

struct DraftBlock {  // mirrored in native_drafting.py
  const void* norm;
  const Experts* mlp;  // a bank of one expert
};

struct Drafting {  // mirrored in native_drafting.py
  const void *embedding, *state_norm, *token_norm, *output_norm;
  const Linear *state_in, *token_in, *output;
  const DraftBlock* blocks;
  int64_t num_blocks, width, vocab_size, threads;
  double eps;
};

template <class T>
struct Parts {
  void (*linear)(const Linear*, const T*, int64_t, const T*, T*, int64_t);
  int64_t (*experts)(const Experts*, const T*, const int64_t*, const float*, float*, int64_t,
                     int64_t, const RowAdapters*, int64_t, int64_t);
  void (*add)(const T*, const float*, const float*, T*, int64_t, int64_t);
};

#define DECLARE(T, suffix)                                                                        \
  void moe_linear_##suffix(const Linear*, const T*, int64_t, const T*, T*, int64_t);              \
  int64_t moe_experts_##suffix(const Experts*, const T*, const int64_t*, const float*, float*,    \
                               int64_t, int64_t, const RowAdapters*, int64_t, int64_t);           \
  void moe_add_##suffix(const T*, const float*, const float*, T*, int64_t, int64_t);

extern "C" {
DECLARE(bf16, bf16)
DECLARE(float, f32)
}

template <class T>
static void norm_rows(const T* x, const void* weight, T* out, int64_t num_rows, const Drafting& d) {
  for (int64_t s = 0; s < num_rows; ++s)
    norm_row(x + s * d.width, (const T*)weight, out + s * d.width, d.width, (float)d.eps);
}

// The probability of the token `place`, which has the largest of these logits.
template <class T>
static float probability(const T* logits, int64_t count, int64_t place) {
  const float most = load_some(logits + place, 1)[0];
  f32x16 sums = splat(0.0f);
  for (int64_t n = 0; n < count; n += 16) {
    f32x16 terms = exp16(load_up_to(logits + n, count - n) - splat(most));
    if (n + 16 > count)
      for (int64_t i = count - n; i < 16; ++i) terms[i] = 0.0f;
    sums = sums + terms;
  }
  float sum = 0.0f;
  for (int64_t i = 0; i < 16; ++i) sum += sums[i];
  return 1.0f / sum;
}

// state [S, D], tokens [S], drafts [S, most], confidences [S, most]. A row ends where the product
// of its confidences falls below `least`; what it does not draft stays as it is.
template <class T>
static void draft(const Drafting& d, const Parts<T>& parts, const T* state, const int64_t* tokens,
                  int64_t* drafts, float* confidences, int64_t num_rows, int64_t most,
                  float least) {
  static thread_local Scratch state_scratch, x_scratch, y_scratch, token_scratch, logits_scratch,
      ids_scratch, weights_scratch, rows_scratch, left_scratch;
  int64_t size = num_rows * d.width;
  T *own = state_scratch.get<T>(size), *x = x_scratch.get<T>(size);
  T *token_rows = token_scratch.get<T>(size), *logits = logits_scratch.get<T>(num_rows * d.vocab_size);
  float* y = y_scratch.get<float>(size);
  int64_t *ids = ids_scratch.get<int64_t>(num_rows), *rows = rows_scratch.get<int64_t>(num_rows);
  float *weights = weights_scratch.get<float>(num_rows), *left = left_scratch.get<float>(num_rows);
  std::fill_n(ids, num_rows, 0);
  std::fill_n(weights, num_rows, 1.0f);
  std::fill_n(left, num_rows, 1.0f);
  for (int64_t s = 0; s < num_rows; ++s) rows[s] = s;
  for (int64_t j = 0; j < most && num_rows; ++j, state = own) {
    for (int64_t s = 0; s < num_rows; ++s) {
      int64_t token = j ? drafts[rows[s] * most + j - 1] : tokens[s];
      norm_row((const T*)d.embedding + token * d.width, (const T*)d.token_norm, x + s * d.width,
               d.width, (float)d.eps);
    }
    parts.linear(d.token_in, x, d.width, nullptr, token_rows, num_rows);
    norm_rows(state, d.state_norm, x, num_rows, d);
    parts.linear(d.state_in, x, d.width, token_rows, own, num_rows);
    for (int64_t b = 0; b < d.num_blocks; ++b) {
      norm_rows(own, d.blocks[b].norm, x, num_rows, d);
      parts.experts(d.blocks[b].mlp, x, ids, weights, y, num_rows, 1, nullptr, 0, 0);
      parts.add(own, y, nullptr, own, num_rows * d.width, d.threads);
    }
    norm_rows(own, d.output_norm, x, num_rows, d);
    parts.linear(d.output, x, d.width, nullptr, logits, num_rows);
    int64_t num_kept = 0;
    for (int64_t s = 0; s < num_rows; ++s) {
      const T* of_row = logits + s * d.vocab_size;
      int64_t token = first_largest(of_row, d.vocab_size), at = rows[s] * most + j;
      float confidence = probability(of_row, d.vocab_size, token), product = left[s] * confidence;
      if (least > 0.0f && !(product >= least)) continue;  // of NaN too
      drafts[at] = token, confidences[at] = confidence;
      rows[num_kept] = rows[s], left[num_kept] = product;
      if (num_kept < s) std::copy_n(own + s * d.width, d.width, own + num_kept * d.width);
      ++num_kept;
    }
    num_rows = num_kept;
  }
}

#define EXPORT(T, suffix)                                                                         \
  void moe_draft_##suffix(const Drafting* d, const T* state, const int64_t* tokens,               \
                          int64_t* drafts, float* confidences, int64_t num_rows, int64_t most,    \
                          double least) {                                                         \
    Parts<T> parts{moe_linear_##suffix, moe_experts_##suffix, moe_add_##suffix};                  \
    draft<T>(*d, parts, state, tokens, drafts, confidences, num_rows, most, (float)least);        \
  }

extern "C" {
EXPORT(bf16, bf16)
EXPORT(float, f32)
}
