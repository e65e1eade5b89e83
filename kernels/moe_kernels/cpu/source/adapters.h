// The adapters of a step's rows, and the products behind their additions (scale B) (A x).
#pragma once

#include "low_bits/signs.h"
#include "panels.h"

struct Linear;
struct Experts;

// What an adapter changes in a bank of experts. Arrays by expert, null where nothing is changed.
struct ExpertChanges {  // mirrored in native_changes.py
  const uint8_t* is_changed;   // by expert; an expert that is changed and not here is an error
  const Experts* own;          // whole experts in place of the bank's, or null
  const uint32_t* const* up_a;    // [up_width, D]: A of gate, then of up; one for both if shared
  const uint32_t* const* gate_b;  // [F, gate_rank]
  const uint32_t* const* up_b;    // [F, up_rank]
  const uint32_t* const* down_a;  // [down_width, F]
  const uint32_t* const* down_b;  // [D, down_rank]
  int64_t up_width, up_first, gate_rank, up_rank, down_width, down_rank;  // up_first: A of up
  const SignedExpert* signs;  // by expert, in place of A and B; or null

  bool has_up(int64_t e) const {
    return signs ? signs[e].gate.bits || signs[e].up.bits : up_a[e] != nullptr;
  }
  bool has_down(int64_t e) const { return (signs ? signs[e].down.bits : down_a[e]) != nullptr; }
};

struct LowRankPart {  // B of some neighbouring outputs; mirrored in native_adapters.py
  const Linear* b;
  int64_t first_rank, first_output;
};

struct LowRank {  // the addition to a linear layer; mirrored in native_adapters.py
  const Linear* a;
  const LowRankPart* parts;
  int64_t num_parts, num_outputs;  // of the layer
};

// The linear layers of attention, and the norms and up-projections that a fine-tune may have of its
// own. Latent attention has its queries' layer in the place of kQKV. Numbered as in native_changes.py.
enum Matrix : int64_t { kQKV, kOutput, kQueryDown, kLatent, kNumMatrices };
enum RowNorm : int64_t { kAttentionNorm, kMoeNorm, kQueryNorm, kNumNorms };
enum HeadMatrix : int64_t { kKeyUp, kValueUp, kNumHeadMatrices };

struct LayerTune {  // of a whole fine-tune, null: the base model's; mirrored in native_changes.py
  const Signs* signs[kNumMatrices];  // added to the base model's
  const void* norms[kNumNorms];
  const void* attended[3];  // see AttentionPlan::own
  const Linear* heads[kNumHeadMatrices];
  const Linear* router;
  const float* selection_bias;  // of its router; may be null
};

struct ModelTune {  // likewise, outside of the layers
  const void *embedding, *final_norm;
  const Linear* head;
};

struct LayerChanges {  // of one adapter, null: no change; mirrored in native_changes.py
  const LowRank* linears[kNumMatrices];
  const ExpertChanges *experts, *mlp;
  const LayerTune* tune;
};

struct RowAdapters {  // mirrored in native_rows.py
  const int64_t* adapter;           // of each row, or -1
  const int64_t *order, *starts;    // the rows of adapter a: order[starts[a] .. starts[a + 1])
  const LayerChanges* const* layers;  // by adapter and layer
  const ModelTune* const* models;     // by adapter; null: none has one
  int64_t num_adapters;

  const ModelTune* model(int64_t a) const { return a < 0 || !models ? nullptr : models[a]; }
};

constexpr int64_t kAdapterRows = 48;  // of one adapter, in one job

// Rows `row(m)` of `width` values times a packed matrix: store(m, n, c) gets the sums n, n + 1 ...
// of its groups of columns.
template <class T, class Row, class Store>
static void multiply_packed(const uint32_t* packed, int64_t num_outputs, int64_t width,
                            int64_t count, const Row& row, const Store& store) {
  int64_t num_panels = panels(num_outputs);
  for (int64_t g = 0; g < groups(num_panels); ++g)
    multiply_group<T>(group_of<T>(packed, num_panels, g, width), nullptr, width, count, row,
                      [&](int64_t m, const float* c) { store(m, g * kGroupColumns, c); });
}

// The same with results of T: out[m] is a row of `num_outputs`, a multiple of 16.
template <class T, class Row>
static void multiply_rounded(const uint32_t* packed, int64_t num_outputs, int64_t width,
                             int64_t count, const Row& row, T* out) {
  auto store = [&](int64_t m, int64_t n, const float* c) {
    T* to = out + m * num_outputs;
    for (int64_t end = std::min(num_outputs, n + kGroupColumns); n < end; n += kLanes, c += kLanes)
      store16(to + n, load16(c));
  };
  multiply_packed<T>(packed, num_outputs, width, count, row, store);
}
