// Frames between attention and expert ranks, as moe_kernels/interface/rank_kernels.py describes them.
#pragma once

#include <cstdint>
#include <cstring>

struct FrameShape {  // mirrored in native_rank_calls.py
  int64_t num_ranks, width, top_k, header_bytes, key_bytes;
  int64_t has_choices;   // of the attention side
  int64_t has_wide_sums;  // fp64; otherwise fp32
};

// The ranks of a layer's experts. Copies take turns: ranks[e][(row + first[e]) % counts[e]].
struct Copies {  // mirrored in native_rank_calls.py
  const int64_t *ranks, *counts, *first;  // [E, most], [E], [E]
  int64_t most;

  int64_t rank(int64_t expert, int64_t row) const {
    if (most == 1) return ranks[expert];
    return ranks[expert * most + (row + first[expert]) % counts[expert]];
  }
};

// The place of an exchange within its key, where two numbers of 32 bits differ.
struct StepKey {  // mirrored in native_rank_steps.py
  int64_t layer_at, batch_at;
  uint8_t first[64];

  void write(const FrameShape& s, uint32_t layer, uint32_t batch, uint8_t* key) const {
    memcpy(key, first, s.key_bytes);
    memcpy(key + layer_at, &layer, sizeof layer);
    memcpy(key + batch_at, &batch, sizeof batch);
  }
};

// The tags of an exchange's messages: rows, then sums.
static inline uint32_t rows_tag(int64_t layer, int64_t batch) { return 2 * (layer * 8 + batch); }

static inline int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

static inline int64_t frame_rows(const FrameShape& s, const uint8_t* frame) {
  uint32_t rows;
  memcpy(&rows, frame + s.key_bytes, sizeof rows);
  return rows;
}

static inline void write_header(const FrameShape& s, const uint8_t* key, int64_t rows,
                                uint8_t* frame) {
  uint32_t count = rows;
  memcpy(frame, key, s.key_bytes);
  memcpy(frame + s.key_bytes, &count, sizeof count);
}

// Whether a frame belongs to the exchange of the key, is no error, and has at most these rows.
static inline bool is_frame_of(const FrameShape& s, const uint8_t* frame, const uint8_t* key,
                               int64_t most) {
  return !memcmp(frame, key, s.key_bytes) && frame_rows(s, frame) <= most;
}

// Rows on their way to the experts, with room for `planned` ones.
template <class T, class Byte>
struct Dispatch {
  const FrameShape& shape;
  Byte* frame;
  int64_t planned;

  int64_t choices_bytes() const { return aligned(planned * shape.top_k * 4); }
  auto ids() const { return at<int32_t>(shape.header_bytes); }
  auto weights() const { return at<float>(shape.header_bytes + choices_bytes()); }
  auto x() const { return at<T>(rows_at()); }
  int64_t bytes(int64_t rows) const { return rows_at() + rows * shape.width * (int64_t)sizeof(T); }

 private:
  int64_t rows_at() const { return shape.header_bytes + 2 * choices_bytes(); }
  template <class Value>
  auto at(int64_t offset) const {
    if constexpr (std::is_const_v<Byte>) return reinterpret_cast<const Value*>(frame + offset);
    else return reinterpret_cast<Value*>(frame + offset);
  }
};

// Sums on their way back.
static inline int64_t sums_at(const FrameShape& s, int64_t planned) {
  return s.header_bytes + aligned(planned * 4);
}
