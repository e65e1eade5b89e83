// One end of a link between two ranks of a host: frames in shared memory, notices on a socket.
//
// It speaks the protocol of moe_kernels/interface/rank_lanes.py, which Python speaks too. Whatever
// is not the usual case is left to Python: new memory, signals, a full table.
#pragma once

#include <cstdint>

constexpr int64_t kSlots = 16, kShortBytes = 256, kMaxMessages = 64;
constexpr uint32_t kNew = 1 << 8, kInline = 1 << 9;  // flags of a slot

struct LaneMessage {  // mirrored in native_rank_steps.py
  uint32_t tag, slot;  // the slot with its flags
  int64_t size;
  double sent;
  uint8_t content[kShortBytes];  // of a frame that travelled in the notice
};

struct Lane {  // mirrored in native_rank_steps.py
  int64_t socket, timeout_ns;
  uint8_t* out[kSlots];       // memory of the slots, null: not mapped yet
  int64_t out_bytes[kSlots];
  const uint8_t* in[kSlots];
  int64_t num_messages, num_unread, num_descriptors, error;
  int64_t waited_ns;
  LaneMessage messages[kMaxMessages];  // that have arrived, in this order
  int32_t descriptors[kMaxMessages];   // that came with them
  uint8_t unread[4096];                // the beginning of a notice
};

// Why a rank's part of a step stops before its end. `kPython`: Python goes on.
enum LaneStatus : int64_t { kDone, kPython, kSilent, kClosed, kFailed };

static inline int64_t slot_of(uint32_t tag) { return tag % kSlots; }

// Waits for a message, which stays in the table.
LaneStatus await_message(Lane& lane, uint32_t tag, const LaneMessage** found);

static inline const uint8_t* content_of(const Lane& lane, const LaneMessage& message) {
  return message.slot & kInline ? message.content : lane.in[message.slot % kSlots];
}

// Removes the first message with a tag, as its content was used.
void drop_message(Lane& lane, uint32_t tag);

// Tells the peer of the frame that lies in the tag's slot.
LaneStatus send_message(Lane& lane, uint32_t tag, int64_t size);
