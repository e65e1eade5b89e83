// A bank of experts, and rows sorted by expert.
#pragma once

#include <numeric>
#include <vector>

#include "low_bits/weights.h"

struct Experts {  // mirrored in native_experts.py
  const uint32_t* const* gate_up;    // by expert: gate and up panels alternate; null: absent
  const uint32_t* const* down;       // by expert
  const float* const* gate_up_bias;  // by expert: [2][F], null if there are none
  const float* const* down_bias;     // by expert: [D]
  int64_t num_experts, width, expert_width, threads;
  float alpha, limit, up_offset;  // limit: infinity if there is none
  Form gate_up_form, down_form;
};

// Slots (t * top_k + k) sorted by expert: those of e are order[starts[e] .. starts[e + 1]). Those of
// expert -1, which is elsewhere, are left out.
struct Slots {
  std::vector<int64_t> starts, order;

  Slots(const int64_t* ids, int64_t num_slots, int64_t num_experts)
      : starts(num_experts + 1), order(num_slots) {
    for (int64_t s = 0; s < num_slots; ++s)
      if (ids[s] >= 0) ++starts[ids[s] + 1];
    std::partial_sum(starts.begin(), starts.end(), starts.begin());
    std::vector<int64_t> next(starts.begin(), starts.end() - 1);
    for (int64_t s = 0; s < num_slots; ++s)
      if (ids[s] >= 0) order[next[ids[s]]++] = s;
  }

  int64_t count(int64_t expert) const { return starts[expert + 1] - starts[expert]; }
};
