// An attention rank between two messages in one call: it adds the sums that the experts sent, runs
// the next layer up to its router's choice, and fills in the frames for the experts.
//
// It calls the kernel of each part, so the results are the same bit for bit; it saves the calls
// through Python between them. Where ranks share memory, `moe_turn_step` runs all layers of a step so,
// with the messages between them.

#include <algorithm>
#include <chrono>
#include <type_traits>
#include <vector>

#include "../scratch.h"
#include "../vectors.h"
#include "frames.h"
#include "front.h"
#include "lanes.h"

struct Experts;

// T rows of a micro-batch, R expert ranks, K choices per row, D model width.
struct Turn {  // mirrored in native_rank_calls.py
  const FrameShape* shape;
  const uint8_t* const* sums;  // [R] frames that arrived; null: a rank got no rows
  const float* shared;         // [T, D]: of the shared expert, or null
  const Front* front;          // null: there is no next layer
  const AttentionPlan* plan;
  const KVPages* pages;
  const Copies* copies;  // null: one rank, or the experts' side chooses
  uint8_t* const* rows;  // [R] frames to fill in
  const int64_t *positions, *kv_rows;
  void *hidden, *out, *x;  // [T, D]; `out`: the stream behind the next layer's attention
  int64_t* ids;            // [T, K]
  float* weights;          // [T, K]
  int64_t* numbers;        // [R, T]: the rows that each rank has got
  int64_t* counts;         // [R]: their number
  int64_t* sizes;          // [R]: bytes of the frames
  int64_t* times;          // [3] in ns since the call began: summed, attended, filled in; or null
  int64_t num_rows, threads, is_taking;
  uint8_t keys[2][64];  // of the sums that arrive, of the frames to fill in
};

// Layers of a step whose exchanges follow each other: M micro-batches, S shapes of attention.
struct TurnLayer {  // mirrored in native_rank_steps.py
  const Front* front;
  const KVPages* pages;
  const Copies* copies;
  const Experts* shared;  // null: no shared expert
  int64_t number, shape;
};

struct TurnStep {  // mirrored in native_rank_steps.py
  Lane* const* lanes;      // [R]
  Turn* const* turns;      // [M]
  const TurnLayer* layers; // [layers]; the rows of the one before are with the experts
  const AttentionPlan* const* plans;  // [M, S]
  float* const* shared;    // [M] memory for [T, D]: outputs of shared experts
  int64_t num_layers, num_batches, num_shapes, before;  // before: number of the layer before
  int64_t done;  // exchanges that were sent; other threads read it
  int64_t rank;  // that is waited for, or that failed; -1: none
  StepKey key;
};

#define DECLARE_TURN(T, suffix)                                                                   \
  void moe_front_##suffix(const Front*, const AttentionPlan*, const T*, const int64_t*,           \
                          const int64_t*, const KVPages*, T*, T*, int64_t*, float*, int64_t,      \
                          const RowAdapters*, int64_t);                                           \
  int64_t moe_experts_##suffix(const Experts*, const T*, const int64_t*, const float*, float*,    \
                               int64_t, int64_t, const RowAdapters*, int64_t, int64_t);           \
  void moe_add_##suffix(const T*, const float*, const float*, T*, int64_t, int64_t);

extern "C" {
DECLARE_TURN(bf16, bf16)
DECLARE_TURN(float, f32)
}

template <class T>
struct TurnParts {
  void (*front)(const Front*, const AttentionPlan*, const T*, const int64_t*, const int64_t*,
                const KVPages*, T*, T*, int64_t*, float*, int64_t, const RowAdapters*, int64_t);
  void (*add)(const T*, const float*, const float*, T*, int64_t, int64_t);
  int64_t (*experts)(const Experts*, const T*, const int64_t*, const float*, float*, int64_t,
                     int64_t, const RowAdapters*, int64_t, int64_t);
};

// Whether a frame with sums has all the rows that its rank has got, or says which ones it has.
static bool is_expected(const Turn& t, int64_t rank) {
  const FrameShape& s = *t.shape;
  const uint8_t* frame = t.sums[rank];
  if (!is_frame_of(s, frame, t.keys[0], t.counts[rank])) return false;
  int64_t count = frame_rows(s, frame);
  if (s.has_choices || s.num_ranks == 1) return count == t.counts[rank];
  const auto* numbers = reinterpret_cast<const int32_t*>(frame + s.header_bytes);
  auto is_row = [&](int32_t number) { return number >= 0 && number < t.num_rows; };
  return std::all_of(numbers, numbers + count, is_row);
}

// The first rank whose frame is not the expected one, or -1.
static int64_t wrong_rank(const Turn& t) {
  for (int64_t r = 0; r < t.shape->num_ranks; ++r)
    if (t.sums[r] && !is_expected(t, r)) return r;
  return -1;
}

// The sum of all ranks' parts: exact in fp64, so their order does not matter.
static const float* total(const Turn& t) {
  static thread_local Scratch wide_scratch, scratch;
  const FrameShape& s = *t.shape;
  int64_t size = t.num_rows * s.width, at = sums_at(s, t.num_rows);
  if (!s.has_wide_sums) return reinterpret_cast<const float*>(t.sums[0] + at);
  double* wide = wide_scratch.get<double>(size);
  std::fill_n(wide, size, 0.0);
  for (int64_t r = 0; r < s.num_ranks; ++r) {
    if (!t.sums[r]) continue;
    const auto* sums = reinterpret_cast<const double*>(t.sums[r] + at);
    const auto* numbers = reinterpret_cast<const int32_t*>(t.sums[r] + s.header_bytes);
    for (int64_t n = 0, count = frame_rows(s, t.sums[r]); n < count; ++n) {
      int64_t row = s.has_choices ? t.numbers[r * t.num_rows + n] : numbers[n];
      double* to = wide + row * s.width;
      for (int64_t d = 0; d < s.width; ++d) to[d] += sums[n * s.width + d];
    }
  }
  float* sum = scratch.get<float>(size);
  for (int64_t i = 0; i < size; ++i) sum[i] = (float)wide[i];
  return sum;
}

// Fills in a rank's frame: all rows, or those with a choice there.
template <class T>
static void fill_in(const Turn& t, int64_t rank) {
  const FrameShape& s = *t.shape;
  Dispatch<T, uint8_t> frame{s, t.rows[rank], t.num_rows};
  const T* x = static_cast<const T*>(t.x);
  int64_t count = 0, *numbers = t.numbers + rank * t.num_rows;
  for (int64_t row = 0; row < t.num_rows; ++row) {
    if (s.has_choices) {
      bool is_here = !t.copies;
      const int64_t* ids = t.ids + row * s.top_k;
      int32_t* to = frame.ids() + count * s.top_k;
      for (int64_t k = 0; k < s.top_k; ++k) {
        bool is_chosen = !t.copies || t.copies->rank(ids[k], row) == rank;
        to[k] = is_chosen ? ids[k] : -1;
        is_here |= is_chosen;
      }
      if (!is_here) continue;
      std::copy_n(t.weights + row * s.top_k, s.top_k, frame.weights() + count * s.top_k);
    }
    std::copy_n(x + row * s.width, s.width, frame.x() + count * s.width);
    numbers[count++] = row;
  }
  write_header(s, t.keys[1], count, t.rows[rank]);
  t.counts[rank] = count;
  t.sizes[rank] = count ? frame.bytes(count) : s.header_bytes;
}

static int64_t nanoseconds() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// 0, or 1 + the rank whose frame is not the expected one; then nothing has changed.
template <class T>
static int64_t turn(Turn& t, const TurnParts<T>& parts) {
  static thread_local Scratch scratch;
  const FrameShape& s = *t.shape;
  int64_t began = t.times ? nanoseconds() : 0, size = t.num_rows * s.width;
  auto clock = [&](int64_t place) {
    if (t.times) t.times[place] = nanoseconds() - began;
  };
  T* hidden = static_cast<T*>(t.hidden);
  if (t.is_taking) {
    if (int64_t rank = wrong_rank(t); rank >= 0) return 1 + rank;
    T* to = t.front ? scratch.get<T>(size) : static_cast<T*>(t.out);
    parts.add(hidden, total(t), t.shared, to, size, t.threads);
    hidden = to;
  }
  clock(0);
  if (!t.front) return 0;
  parts.front(t.front, t.plan, hidden, t.positions, t.kv_rows, t.pages, static_cast<T*>(t.out),
              static_cast<T*>(t.x), t.ids, t.weights, t.num_rows, nullptr, 0);
  clock(1);
  for (int64_t r = 0; r < s.num_ranks; ++r) fill_in<T>(t, r);
  std::copy_n(t.keys[1], s.key_bytes, t.keys[0]);
  clock(2);
  return 0;
}

template <class T>
class StepRun {
 public:
  StepRun(TurnStep& step, const TurnParts<T>& parts)
      : step_(step), shape_(*step.turns[0]->shape), parts_(parts) {}

  LaneStatus run() {
    sums_.resize(shape_.num_ranks), rows_.resize(shape_.num_ranks);
    int64_t end = step_.num_layers * step_.num_batches;
    for (step_.done = 0; step_.done < end; ++step_.done) {
      int64_t l = step_.done / step_.num_batches, batch = step_.done % step_.num_batches;
      Turn& turn = *step_.turns[batch];
      const uint8_t* const* sums = turn.sums;
      uint8_t* const* rows = turn.rows;
      turn.sums = sums_.data(), turn.rows = rows_.data();
      LaneStatus status = pass(turn, l, batch);
      turn.sums = sums, turn.rows = rows;
      if (status != kDone) return status;
    }
    step_.rank = -1;
    return kDone;
  }

 private:
  LaneStatus pass(Turn& t, int64_t l, int64_t batch) {
    const TurnLayer& layer = step_.layers[l];
    uint32_t rows = rows_tag(layer.number, batch);
    uint32_t sums = 1 + rows_tag(l ? step_.layers[l - 1].number : step_.before, batch);
    int64_t most = Dispatch<T, uint8_t>{shape_, nullptr, t.num_rows}.bytes(t.num_rows);
    for (int64_t r = 0; r < shape_.num_ranks; ++r) {
      const Lane& lane = *step_.lanes[r];
      rows_[r] = lane.out[slot_of(rows)];
      if (!rows_[r] || lane.out_bytes[slot_of(rows)] < most) return kPython;
    }
    if (LaneStatus status = await_sums(t, sums); status != kDone) return status;
    t.front = layer.front, t.pages = layer.pages, t.copies = layer.copies;
    t.plan = step_.plans[batch * step_.num_shapes + layer.shape];
    t.is_taking = 1, t.hidden = t.out;
    step_.key.write(shape_, layer.number, batch, t.keys[1]);
    if (turn<T>(t, parts_)) return kPython;  // which finds out what is wrong
    t.shared = nullptr;
    for (int64_t r = 0; r < shape_.num_ranks; ++r)
      if (sums_[r]) drop_message(*step_.lanes[r], sums);
    for (step_.rank = 0; step_.rank < shape_.num_ranks; ++step_.rank)
      if (LaneStatus status = send_message(*step_.lanes[step_.rank], rows, t.sizes[step_.rank]);
          status != kDone)
        return status;
    if (layer.shared) pass_shared(layer, t, step_.shared[batch]);
    return kDone;
  }

  LaneStatus await_sums(const Turn& t, uint32_t tag) {
    for (int64_t& r = step_.rank = 0; r < shape_.num_ranks; ++r) {
      Lane& lane = *step_.lanes[r];
      sums_[r] = nullptr;
      if (!t.counts[r]) continue;
      const LaneMessage* message;
      if (LaneStatus status = await_message(lane, tag, &message); status != kDone) return status;
      int64_t size = sums_at(shape_, t.num_rows) +
                     t.num_rows * shape_.width * (shape_.has_wide_sums ? 8 : 4);
      if (message->size < shape_.header_bytes || message->size > size) return kPython;
      sums_[r] = content_of(lane, *message);
    }
    return kDone;
  }

  // An MLP that all rows pass: a bank of one expert.
  void pass_shared(const TurnLayer& layer, Turn& t, float* out) {
    static thread_local Scratch ids_scratch, weights_scratch;
    int64_t* ids = ids_scratch.get<int64_t>(t.num_rows);
    float* weights = weights_scratch.get<float>(t.num_rows);
    std::fill_n(ids, t.num_rows, 0);
    std::fill_n(weights, t.num_rows, 1.0f);
    parts_.experts(layer.shared, static_cast<const T*>(t.x), ids, weights, out, t.num_rows, 1,
                   nullptr, 0, 0);
    t.shared = out;
  }

  TurnStep& step_;
  const FrameShape& shape_;
  const TurnParts<T>& parts_;
  std::vector<const uint8_t*> sums_;
  std::vector<uint8_t*> rows_;
};

#define EXPORT(T, suffix)                                                                         \
  int64_t moe_turn_##suffix(Turn* t) {                                                            \
    return turn<T>(*t, {moe_front_##suffix, moe_add_##suffix, moe_experts_##suffix});             \
  }                                                                                               \
  int64_t moe_turn_step_##suffix(TurnStep* step) {                                                \
    TurnParts<T> parts{moe_front_##suffix, moe_add_##suffix, moe_experts_##suffix};               \
    return StepRun<T>(*step, parts).run();                                                        \
  }

extern "C" {
EXPORT(bf16, bf16)
EXPORT(float, f32)
}
