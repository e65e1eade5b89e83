#include "lanes.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#if defined(__linux__)
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <cerrno>

namespace {

#pragma pack(push, 1)
struct Notice {
  uint32_t tag, slot;
  uint64_t size;
  double sent;
};
#pragma pack(pop)
static_assert(sizeof(Notice) == 24, "as Python packs it");

int64_t nanoseconds() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

LaneStatus failed(Lane& lane) {
  lane.error = errno;
  return kFailed;
}

// Waits until the socket can be read or written.
LaneStatus wait_for(Lane& lane, short events, int64_t deadline) {
  int64_t left_ms = (deadline - nanoseconds() + 999999) / 1000000;
  if (left_ms <= 0) return kSilent;
  pollfd each{(int)lane.socket, events, 0};
  int ready = poll(&each, 1, (int)std::min<int64_t>(left_ms, 1 << 30));
  if (ready > 0) return kDone;
  if (ready == 0) return kSilent;
  return errno == EINTR ? kPython : failed(lane);
}

LaneMessage* find(Lane& lane, uint32_t tag) {
  LaneMessage* end = lane.messages + lane.num_messages;
  LaneMessage* at = std::find_if(lane.messages, end, [&](auto& m) { return m.tag == tag; });
  return at == end ? nullptr : at;
}

// Moves the notices that are whole into the table.
LaneStatus parse(Lane& lane) {
  LaneStatus status = kDone;
  int64_t start = 0;
  while (lane.num_unread - start >= (int64_t)sizeof(Notice)) {
    Notice notice;
    memcpy(&notice, lane.unread + start, sizeof notice);
    bool is_inline = notice.slot & kInline;
    if (is_inline && notice.size > (uint64_t)kShortBytes) return kPython;
    int64_t size = is_inline ? (int64_t)notice.size : 0;
    if (lane.num_unread - start < (int64_t)sizeof notice + size) break;
    if (lane.num_messages == kMaxMessages) {
      status = kPython;
      break;
    }
    LaneMessage& message = lane.messages[lane.num_messages++];
    message.tag = notice.tag, message.slot = notice.slot;
    message.size = notice.size, message.sent = notice.sent;
    memcpy(message.content, lane.unread + start + sizeof notice, size);
    if (notice.slot & kNew) status = kPython;  // Python maps the memory
    start += sizeof notice + size;
  }
  lane.num_unread -= start;
  memmove(lane.unread, lane.unread + start, lane.num_unread);
  return status;
}

LaneStatus read_messages(Lane& lane, int64_t deadline) {
  int64_t began = nanoseconds();
  LaneStatus status = wait_for(lane, POLLIN, deadline);
  lane.waited_ns += nanoseconds() - began;
  if (status != kDone) return status;
  alignas(cmsghdr) char control[CMSG_SPACE(kSlots * sizeof(int))];
  iovec part{lane.unread + lane.num_unread, sizeof lane.unread - lane.num_unread};
  msghdr header{};
  header.msg_iov = &part, header.msg_iovlen = 1;
  header.msg_control = control, header.msg_controllen = sizeof control;
  ssize_t count = recvmsg((int)lane.socket, &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (count < 0) return errno == EAGAIN || errno == EINTR ? kDone : failed(lane);
  for (cmsghdr* c = CMSG_FIRSTHDR(&header); c; c = CMSG_NXTHDR(&header, c)) {
    if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
    int64_t num = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    num = std::min(num, kMaxMessages - lane.num_descriptors);
    memcpy(lane.descriptors + lane.num_descriptors, CMSG_DATA(c), num * sizeof(int));
    lane.num_descriptors += num;
  }
  if (count == 0) return kClosed;
  lane.num_unread += count;
  return parse(lane);
}

}  // namespace

LaneStatus await_message(Lane& lane, uint32_t tag, const LaneMessage** found) {
  int64_t deadline = nanoseconds() + lane.timeout_ns;
  while (!(*found = find(lane, tag)))
    if (LaneStatus status = read_messages(lane, deadline); status != kDone) return status;
  return kDone;
}

void drop_message(Lane& lane, uint32_t tag) {
  LaneMessage *found = find(lane, tag), *end = lane.messages + lane.num_messages;
  if (!found) return;
  std::copy(found + 1, end, found);
  --lane.num_messages;
}

LaneStatus send_message(Lane& lane, uint32_t tag, int64_t size) {
  uint8_t bytes[sizeof(Notice) + kShortBytes];
  int64_t slot = slot_of(tag), now = nanoseconds(), deadline = now + lane.timeout_ns;
  bool is_inline = size <= kShortBytes;
  Notice notice{tag, (uint32_t)slot | (is_inline ? kInline : 0), (uint64_t)size, now * 1e-9};
  memcpy(bytes, &notice, sizeof notice);
  if (is_inline) memcpy(bytes + sizeof notice, lane.out[slot], size);
  size_t length = sizeof notice + (is_inline ? size : 0);
  for (;;) {
    if (send((int)lane.socket, bytes, length, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0) return kDone;
    if (errno == EAGAIN) {
      LaneStatus status = wait_for(lane, POLLOUT, deadline);
      if (status != kDone && status != kPython) return status;
    } else if (errno != EINTR) {
      return failed(lane);
    }
  }
}

#else  // ranks share no memory here

LaneStatus await_message(Lane&, uint32_t, const LaneMessage**) { return kPython; }
void drop_message(Lane&, uint32_t) {}
LaneStatus send_message(Lane&, uint32_t, int64_t) { return kFailed; }

#endif
