// The rows of adapters in a bank of experts: experts in place of the bank's, and additions to its
// experts. A row without an adapter, or whose adapter changes none of its experts, passes as if
// there were none.
//
//     gate, up = W x + B (A x), each sum in a chain of its own; A x is rounded to T
//     out = W hidden + B (A hidden)
//
// or with signs in place of B A.
#pragma once

#include <algorithm>

#include "adapters.h"
#include "experts.h"
#include "threads.h"

// A bank with the adapters' own experts behind its own: those of the i-th adapter that has some
// are at (1 + i) * E, and `ids` names them.
class WideBank {
 public:
  WideBank(const Experts& bank, const int64_t* ids, int64_t num_rows, int64_t top_k,
           const int64_t* adapter, const std::vector<const ExpertChanges*>& changes)
      : table_(bank), ids_(ids) {
    std::vector<int64_t> first(changes.size());
    int64_t size = bank.num_experts, count = 0;
    for (size_t a = 0; a < changes.size(); ++a)
      if (changes[a] && changes[a]->own) first[a] = size * ++count;
    if (!count) return;
    append(bank, size);
    for (const ExpertChanges* each : changes)
      if (each && each->own) append(*each->own, size);
    own_ids_.assign(ids, ids + num_rows * top_k);
    for (int64_t s = 0; s < num_rows * top_k; ++s) {
      int64_t a = adapter[s / top_k], id = ids[s];
      if (a >= 0 && id >= 0 && first[a] && changes[a]->own->gate_up[id]) own_ids_[s] += first[a];
    }
    ids_ = own_ids_.data();
    table_.gate_up = gate_up_.data(), table_.down = down_.data();
    if (bank.gate_up_bias)
      table_.gate_up_bias = gate_up_bias_.data(), table_.down_bias = down_bias_.data();
    table_.num_experts = size * (1 + count);
  }

  const Experts& table() const { return table_; }
  const int64_t* ids() const { return ids_; }

 private:
  void append(const Experts& e, int64_t size) {
    gate_up_.insert(gate_up_.end(), e.gate_up, e.gate_up + size);
    down_.insert(down_.end(), e.down, e.down + size);
    if (!e.gate_up_bias) return;
    gate_up_bias_.insert(gate_up_bias_.end(), e.gate_up_bias, e.gate_up_bias + size);
    down_bias_.insert(down_bias_.end(), e.down_bias, e.down_bias + size);
  }

  Experts table_;
  const int64_t* ids_;
  std::vector<int64_t> own_ids_;
  std::vector<const uint32_t*> gate_up_, down_;
  std::vector<const float*> gate_up_bias_, down_bias_;
};

// The additions to the slots of a call. Slots of one expert and adapter are multiplied together.
template <class T>
class Additions {
 public:
  explicit Additions(const Experts& e)
      : e_(e), padded_(panels(e.expert_width) * kLanes) {}

  // Returns 0, or 1 + e if an adapter changes expert e and that change is not here.
  int64_t find(const Slots& slots, int64_t num_experts, int64_t top_k, const int64_t* adapter,
               const std::vector<const ExpertChanges*>& changes) {
    std::vector<int64_t> own;
    for (int64_t e = 0; e < num_experts; ++e) {
      own.clear();
      for (int64_t i = slots.starts[e]; i < slots.starts[e + 1]; ++i) {
        int64_t a = adapter[slots.order[i] / top_k];
        if (a < 0 || !changes[a] || !changes[a]->is_changed[e]) continue;
        if (!changes[a]->has_up(e) && !changes[a]->has_down(e)) return 1 + e;
        own.push_back(slots.order[i]);
      }
      auto of = [&](int64_t slot) { return adapter[slot / top_k]; };
      std::stable_sort(own.begin(), own.end(), [&](int64_t a, int64_t b) { return of(a) < of(b); });
      for (size_t i = 0, end; i < own.size(); i = end) {
        for (end = i + 1; end < own.size() && end - i < (size_t)kAdapterRows; ++end)
          if (of(own[end]) != of(own[i])) break;
        parts_.push_back({changes[of(own[i])], e, (int64_t)(order_.size() + i), (int64_t)(end - i)});
      }
      order_.insert(order_.end(), own.begin(), own.end());
    }
    if (order_.empty()) return 0;
    up_place_.assign(slots.order.size(), -1), has_down_.assign(slots.order.size(), 0);
    for (const Part& part : parts_)
      for (int64_t i = part.first; i < part.first + part.count; ++i) {
        if (part.changes->has_up(part.expert)) up_place_[order_[i]] = i;
        if (part.changes->has_down(part.expert)) has_down_[order_[i]] = 1;
      }
    return 0;
  }

  // What is added to a slot's gate, and `padded` values later to its up; null: nothing.
  const float* up(int64_t slot) const {
    return up_place_.empty() || up_place_[slot] < 0 ? nullptr : up_ + up_place_[slot] * 2 * padded_;
  }
  int64_t padded() const { return padded_; }

  // Whether y of a slot holds what is to be added to its output.
  bool has_down(int64_t slot) const { return !has_down_.empty() && has_down_[slot]; }

  void add_up(const T* x, int64_t top_k, int64_t threads) {
    static thread_local Scratch scratch;
    if (order_.empty()) return;
    up_ = scratch.get<float>(order_.size() * 2 * padded_);
    float* up = up_;
    parallel_for(parts_.size(), threads, [&, up](int64_t j) {
      static thread_local Scratch narrow;
      const Part& part = parts_[j];
      const ExpertChanges& c = *part.changes;
      if (!c.has_up(part.expert)) return;
      const int64_t* slots = order_.data() + part.first;
      if (c.signs) return add_signs_up(c.signs[part.expert], x, top_k, part);
      const uint32_t* a = c.up_a[part.expert];
      T* t = narrow.get<T>(part.count * c.up_width);
      multiply_rounded<T>(a, c.up_width, e_.width, part.count,
                          [&](int64_t m) { return x + slots[m] / top_k * e_.width; }, t);
      float* out = up + part.first * 2 * padded_;
      widen(c.gate_b[part.expert], c.gate_rank, part.count, t, c.up_width, out);
      widen(c.up_b[part.expert], c.up_rank, part.count, t + c.up_first, c.up_width, out + padded_);
    });
  }

  void add_down(const T* hidden, float* y, int64_t threads) {
    if (order_.empty()) return;
    parallel_for(parts_.size(), threads, [&](int64_t j) {
      static thread_local Scratch narrow;
      const Part& part = parts_[j];
      const ExpertChanges& c = *part.changes;
      if (!c.has_down(part.expert)) return;
      const int64_t* slots = order_.data() + part.first;
      if (c.signs) return add_signs_down(c.signs[part.expert].down, hidden, y, part);
      const uint32_t* a = c.down_a[part.expert];
      T* t = narrow.get<T>(part.count * c.down_width);
      multiply_rounded<T>(a, c.down_width, e_.expert_width, part.count,
                          [&](int64_t m) { return hidden + slots[m] * e_.expert_width; }, t);
      auto store = [&](int64_t m, int64_t n, const float* sums) {
        float* to = y + slots[m] * e_.width;
        for (int64_t end = std::min(e_.width, n + kGroupColumns); n < end; n += kLanes, sums += kLanes)
          store_up_to(to + n, load16(sums), e_.width - n);
      };
      multiply_packed<T>(c.down_b[part.expert], e_.width, c.down_rank, part.count,
                         [&](int64_t m) { return t + m * c.down_width; }, store);
    });
  }

 private:
  struct Part {  // some slots of one expert and adapter
    const ExpertChanges* changes;
    int64_t expert, first, count;  // of order_
  };

  void add_signs_up(const SignedExpert& s, const T* x, int64_t top_k, const Part& part) {
    for (int64_t i = part.first; i < part.first + part.count; ++i) {
      const float* sums = sign_sums(x + order_[i] / top_k * e_.width, e_.width);
      float* to = up_ + i * 2 * padded_;
      for (const Signs* each : {&s.gate, &s.up}) {
        if (each->bits)
          add_signs(*each, sums, 0, padded_ / kLanes,
                    [&](int64_t n, f32x16 v) { store16(to + n, v); });
        else
          std::fill_n(to, padded_, 0.0f);
        to += padded_;
      }
    }
  }

  void add_signs_down(const Signs& s, const T* hidden, float* y, const Part& part) {
    for (int64_t i = part.first; i < part.first + part.count; ++i) {
      const float* sums = sign_sums(hidden + order_[i] * e_.expert_width, e_.expert_width);
      float* to = y + order_[i] * e_.width;
      add_signs(s, sums, 0, panels(e_.width),
                [&](int64_t n, f32x16 v) { store_up_to(to + n, v, e_.width - n); });
    }
  }

  // Rows of gate's or up's additions, 2 * padded values apart.
  void widen(const uint32_t* b, int64_t rank, int64_t count, const T* t, int64_t step, float* out) {
    auto store = [&](int64_t m, int64_t n, const float* sums) {
      float* to = out + m * 2 * padded_;
      for (int64_t end = std::min(padded_, n + kGroupColumns); n < end; n += kLanes, sums += kLanes)
        store16(to + n, load16(sums));
    };
    multiply_packed<T>(b, e_.expert_width, rank, count, [&](int64_t m) { return t + m * step; },
                       store);
  }

  const Experts& e_;
  const int64_t padded_;
  std::vector<Part> parts_;
  std::vector<int64_t> order_, up_place_;
  std::vector<char> has_down_;
  float* up_ = nullptr;
};
