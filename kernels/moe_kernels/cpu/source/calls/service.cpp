// An expert rank between two messages in one call: from the frames with rows to those with sums.
//
// It calls the kernel of each part, so the results are the same bit for bit; it saves the calls
// through Python between them. Where ranks share memory, `moe_service_step` serves all exchanges of a
// step so, with the messages between them.

#include <algorithm>
#include <type_traits>
#include <vector>

#include "../scratch.h"
#include "../vectors.h"
#include "frames.h"
#include "front.h"
#include "lanes.h"

struct Experts;

// S attention ranks that have rows in the exchange, K choices per row, D model width.
struct Service {  // mirrored in native_rank_calls.py
  const FrameShape* shape;
  const uint8_t* const* rows;  // [S] frames that arrived
  uint8_t* const* sums;        // [S] frames to fill in
  const int64_t* planned;      // [S] rows
  int64_t* counts;             // [S]: rows that arrived
  int64_t* sizes;              // [S]: bytes of the frames to send, 0 if there were no rows
  const Linear* router;        // null: rows come with their choices
  const Router* route;
  const float* selection_bias;
  const Copies* copies;  // null: one expert rank
  int64_t num_senders, num_experts, rank;
  uint8_t key[64];
};

// Exchanges of a step that follow each other: A attention ranks, M micro-batches.
struct ServiceLayer {  // mirrored in native_rank_steps.py
  Service* service;
  const Experts* bank;
  int64_t number;
};

struct ServiceStep {  // mirrored in native_rank_steps.py
  Lane* const* lanes;  // [A]
  const int64_t* rows; // [A, M] planned
  const ServiceLayer* layers;
  int64_t num_lanes, num_layers, num_batches;
  int64_t done;  // exchanges that were answered; other threads read it
  int64_t rank;  // that is waited for, or that failed; -1: none
  StepKey key;
};

#define DECLARE_SERVICE(T, suffix)                                                                \
  int64_t moe_experts_##suffix(const Experts*, const T*, const int64_t*, const float*, float*,    \
                               int64_t, int64_t, const RowAdapters*, int64_t, int64_t);           \
  int64_t moe_experts_partial_##suffix(const Experts*, const T*, const int64_t*, const float*,    \
                                       double*, int64_t, int64_t, const RowAdapters*, int64_t,    \
                                       int64_t);

extern "C" {
DECLARE_SERVICE(bf16, bf16)
DECLARE_SERVICE(float, f32)
}

template <class T>
struct ServiceParts {
  void (*router_linear)(const Linear*, const T*, int64_t, float*, int64_t);
  int64_t (*experts)(const Experts*, const T*, const int64_t*, const float*, float*, int64_t,
                     int64_t, const RowAdapters*, int64_t, int64_t);
  int64_t (*partial)(const Experts*, const T*, const int64_t*, const float*, double*, int64_t,
                     int64_t, const RowAdapters*, int64_t, int64_t);
};

// The rows of all senders, one sender after the other.
template <class T>
struct Joined {
  std::vector<int64_t> ids, counts;
  std::vector<float> weights;
  std::vector<int32_t> numbers;  // of the rows among their sender's
  std::vector<const T*> x;

  void clear() { ids.clear(), counts.clear(), weights.clear(), numbers.clear(), x.clear(); }
};

template <class T>
class ServiceRun {
 public:
  ServiceRun(const Service& s, const ServiceParts<T>& parts, Joined<T>& joined)
      : s_(s), shape_(*s.shape), parts_(parts), joined_(joined) {}

  // 0; 1 if a frame is not the expected one; 2 if rows chose an expert that is not here. Then
  // nothing was written.
  int64_t run(const Experts* bank) {
    for (int64_t i = 0; i < s_.num_senders; ++i)
      if (!is_frame_of(shape_, s_.rows[i], s_.key, s_.planned[i])) return 1;
    joined_.clear();
    for (int64_t i = 0; i < s_.num_senders; ++i) {
      int64_t before = joined_.x.size(), count = frame_rows(shape_, s_.rows[i]);
      s_.counts[i] = count;
      Dispatch<T, const uint8_t> frame{shape_, s_.rows[i], s_.planned[i]};
      if (s_.router) choose(frame, count);
      else if (!take(frame, count)) return 2;
      joined_.counts.push_back(joined_.x.size() - before);
    }
    if (shape_.has_wide_sums) return multiply<double>(bank, parts_.partial);
    return multiply<float>(bank, parts_.experts);
  }

 private:
  // Whether all choices are numbers of experts, or -1.
  bool take(const Dispatch<T, const uint8_t>& frame, int64_t count) {
    int64_t num_choices = count * shape_.top_k;
    auto is_expert = [&](int64_t id) { return id >= -1 && id < s_.num_experts; };
    if (!std::all_of(frame.ids(), frame.ids() + num_choices, is_expert)) return false;
    joined_.ids.insert(joined_.ids.end(), frame.ids(), frame.ids() + num_choices);
    joined_.weights.insert(joined_.weights.end(), frame.weights(), frame.weights() + num_choices);
    for (int64_t row = 0; row < count; ++row) add_row(frame, row);
    return true;
  }

  void add_row(const Dispatch<T, const uint8_t>& frame, int64_t row) {
    joined_.x.push_back(frame.x() + row * shape_.width);
    joined_.numbers.push_back(row);
  }

  // The router runs here, on all rows; rows with a choice on this rank are kept.
  void choose(const Dispatch<T, const uint8_t>& frame, int64_t count) {
    static thread_local Scratch logits_scratch, ids_scratch, weights_scratch;
    float* logits = logits_scratch.get<float>(count * s_.num_experts);
    int64_t* ids = ids_scratch.get<int64_t>(count * shape_.top_k);
    float* weights = weights_scratch.get<float>(count * shape_.top_k);
    parts_.router_linear(s_.router, frame.x(), shape_.width, logits, count);
    moe_route(s_.route, logits, s_.selection_bias, ids, weights, count);
    for (int64_t row = 0; row < count; ++row) {
      bool is_here = !s_.copies;
      int64_t* chosen = ids + row * shape_.top_k;
      for (int64_t k = 0; s_.copies && k < shape_.top_k; ++k) {
        if (s_.copies->rank(chosen[k], row) == s_.rank) is_here = true;
        else chosen[k] = -1;
      }
      if (!is_here) continue;
      joined_.ids.insert(joined_.ids.end(), chosen, chosen + shape_.top_k);
      const float* from = weights + row * shape_.top_k;
      joined_.weights.insert(joined_.weights.end(), from, from + shape_.top_k);
      add_row(frame, row);
    }
  }

  // The products of all rows together; their sums go into the senders' frames.
  template <class Sum, class Multiply>
  int64_t multiply(const Experts* bank, Multiply multiply) {
    static thread_local Scratch x_scratch, sums_scratch;
    int64_t width = shape_.width, num_rows = joined_.x.size();
    if (num_rows) {
      const T* x = joined_.x[0];
      if (!is_one_piece()) {
        T* copy = x_scratch.get<T>(num_rows * width);
        for (int64_t row = 0; row < num_rows; ++row)
          std::copy_n(joined_.x[row], width, copy + row * width);
        x = copy;
      }
      Sum* sums = sums_scratch.get<Sum>(num_rows * width);
      if (multiply(bank, x, joined_.ids.data(), joined_.weights.data(), sums, num_rows,
                   shape_.top_k, nullptr, 0, 0))  // rows with adapters take another way
        return 2;
      fill_in(sums);
      return 0;
    }
    fill_in<Sum>(nullptr);
    return 0;
  }

  // Whether the rows lie one after the other in one sender's frame.
  bool is_one_piece() const {
    int64_t num_rows = joined_.x.size();
    auto is_all = [&](int64_t count) { return count == num_rows; };
    return std::any_of(joined_.counts.begin(), joined_.counts.end(), is_all) &&
           joined_.numbers.back() - joined_.numbers.front() == num_rows - 1;
  }

  template <class Sum>
  void fill_in(const Sum* sums) {
    const int32_t* numbers = joined_.numbers.data();
    for (int64_t i = 0; i < s_.num_senders; ++i) {
      int64_t count = joined_.counts[i], at = sums_at(shape_, s_.planned[i]);
      s_.sizes[i] = s_.counts[i] ? at + count * shape_.width * (int64_t)sizeof(Sum) : 0;
      if (!s_.counts[i]) continue;
      uint8_t* frame = s_.sums[i];
      write_header(shape_, s_.key, count, frame);
      if (s_.router)
        std::copy_n(numbers, count, reinterpret_cast<int32_t*>(frame + shape_.header_bytes));
      if (count) std::copy_n(sums, count * shape_.width, reinterpret_cast<Sum*>(frame + at));
      numbers += count;
      if (count) sums += count * shape_.width;
    }
  }

  const Service& s_;
  const FrameShape& shape_;
  const ServiceParts<T>& parts_;
  Joined<T>& joined_;
};

template <class T>
class ServiceStepRun {
 public:
  ServiceStepRun(ServiceStep& step, const ServiceParts<T>& parts, Joined<T>& joined)
      : step_(step), parts_(parts), joined_(joined) {}

  LaneStatus run() {
    int64_t end = step_.num_layers * step_.num_batches;
    for (step_.done = 0; step_.done < end; ++step_.done) {
      int64_t batch = step_.done % step_.num_batches;
      const ServiceLayer& layer = step_.layers[step_.done / step_.num_batches];
      if (LaneStatus status = serve(layer, batch); status != kDone) return status;
    }
    step_.rank = -1;
    return kDone;
  }

 private:
  LaneStatus serve(const ServiceLayer& layer, int64_t batch) {
    Service s = *layer.service;
    uint32_t rows = rows_tag(layer.number, batch);
    if (LaneStatus status = await_rows(s, rows, batch); status != kDone) return status;
    if (senders_.empty()) return kDone;
    counts_.resize(senders_.size()), sizes_.resize(senders_.size());
    s.rows = rows_.data(), s.sums = sums_.data(), s.planned = planned_.data();
    s.counts = counts_.data(), s.sizes = sizes_.data(), s.num_senders = senders_.size();
    step_.key.write(*s.shape, layer.number, batch, s.key);
    if (ServiceRun<T>(s, parts_, joined_).run(layer.bank)) return kPython;
    for (int64_t a : senders_) drop_message(*step_.lanes[a], rows);
    for (size_t i = 0; i < senders_.size(); ++i) {
      step_.rank = senders_[i];
      if (!sizes_[i]) continue;
      LaneStatus status = send_message(*step_.lanes[step_.rank], rows + 1, sizes_[i]);
      if (status != kDone) return status;
    }
    return kDone;
  }

  // Waits for the frames of all attention ranks that have rows in an exchange.
  LaneStatus await_rows(const Service& s, uint32_t tag, int64_t batch) {
    const FrameShape& shape = *s.shape;
    senders_.clear(), rows_.clear(), sums_.clear(), planned_.clear();
    for (int64_t& a = step_.rank = 0; a < step_.num_lanes; ++a) {
      int64_t planned = step_.rows[a * step_.num_batches + batch];
      if (!planned) continue;
      Lane& lane = *step_.lanes[a];
      int64_t slot = slot_of(tag + 1), sum_bytes = shape.has_wide_sums ? 8 : 4;
      if (!lane.out[slot] ||
          lane.out_bytes[slot] < sums_at(shape, planned) + planned * shape.width * sum_bytes)
        return kPython;
      const LaneMessage* message;
      if (LaneStatus status = await_message(lane, tag, &message); status != kDone) return status;
      int64_t most = Dispatch<T, uint8_t>{shape, nullptr, planned}.bytes(planned);
      if (message->size < shape.header_bytes || message->size > most) return kPython;
      senders_.push_back(a), planned_.push_back(planned);
      rows_.push_back(content_of(lane, *message)), sums_.push_back(lane.out[slot]);
    }
    return kDone;
  }

  ServiceStep& step_;
  const ServiceParts<T>& parts_;
  Joined<T>& joined_;
  std::vector<int64_t> senders_, planned_, counts_, sizes_;
  std::vector<const uint8_t*> rows_;
  std::vector<uint8_t*> sums_;
};

#define EXPORT(T, suffix)                                                                         \
  int64_t moe_service_##suffix(const Service* s, const Experts* bank) {                           \
    static thread_local Joined<T> joined;                                                         \
    ServiceParts<T> parts{moe_router_linear_##suffix, moe_experts_##suffix,                       \
                          moe_experts_partial_##suffix};                                          \
    return ServiceRun<T>(*s, parts, joined).run(bank);                                            \
  }                                                                                               \
  int64_t moe_service_step_##suffix(ServiceStep* step) {                                          \
    static thread_local Joined<T> joined;                                                         \
    ServiceParts<T> parts{moe_router_linear_##suffix, moe_experts_##suffix,                       \
                          moe_experts_partial_##suffix};                                          \
    return ServiceStepRun<T>(*step, parts, joined).run();                                         \
  }

extern "C" {
EXPORT(bf16, bf16)
EXPORT(float, f32)
}
