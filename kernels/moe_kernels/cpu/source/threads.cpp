#include "threads.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#if defined(__unix__)
#include <pthread.h>
#endif

static inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

constexpr int kWorkerSpins = 4000;  // some 50-100 us: longer than the gap between two calls
constexpr int kCallerSpins = 2000;

// One loop at a time. A worker enters the loop only while its gate is open, so the caller may close
// the gate and wait only for the workers inside.
class Pool {
 public:
  void run(int64_t count, int64_t threads, Job job, const void* context) {
    if (!is_free_.try_lock()) {
      for (int64_t i = 0; i < count; ++i) job(context, i);
      return;
    }
    threads = std::min(threads, count);
    for (; num_workers_ < threads - 1; ++num_workers_)
      std::thread([this] { work(); }).detach();
    job_ = job, context_ = context, count_ = count;
    next_.store(0, std::memory_order_relaxed);
    uint32_t epoch = epoch_.load(std::memory_order_relaxed) + 1;
    gate_.store(Gate{epoch, (uint16_t)(threads - 1), 0}.pack(), std::memory_order_release);
    epoch_.store(epoch);
    if (num_asleep_.load()) {
      std::lock_guard<std::mutex> lock(sleep_);
      wake_.notify_all();
    }
    take_jobs();
    uint64_t gate = gate_.fetch_and(Gate::kInside);
    for (int spins = 0; gate & Gate::kInside; gate = gate_.load(std::memory_order_acquire))
      if (++spins < kCallerSpins) relax();
      else std::this_thread::yield();
    is_free_.unlock();
  }

 private:
  struct Gate {  // 0 in all but `inside`: closed
    uint32_t epoch;
    uint16_t room, inside;
    static constexpr uint64_t kInside = 0xffff;
    uint64_t pack() const { return (uint64_t)epoch << 32 | (uint64_t)room << 16 | inside; }
  };

  void take_jobs() {
    for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count_;)
      job_(context_, i);
  }

  bool enter(uint32_t epoch) {
    uint64_t gate = gate_.load(std::memory_order_relaxed);
    do {
      bool is_open = gate >> 32 == epoch, has_room = (gate >> 16 & 0xffff) > (gate & 0xffff);
      if (!is_open || !has_room) return false;
    } while (!gate_.compare_exchange_weak(gate, gate + 1, std::memory_order_acquire));
    return true;
  }

  uint32_t wait_for_change(uint32_t seen) {
    for (int spins = 0; spins < kWorkerSpins; ++spins) {
      uint32_t epoch = epoch_.load(std::memory_order_acquire);
      if (epoch != seen) return epoch;
      relax();
    }
    std::unique_lock<std::mutex> lock(sleep_);
    ++num_asleep_;
    wake_.wait(lock, [&] { return epoch_.load() != seen; });
    --num_asleep_;
    return epoch_.load();
  }

  void work() {
    for (uint32_t epoch = 0;;) {
      epoch = wait_for_change(epoch);
      if (!enter(epoch)) continue;
      take_jobs();
      gate_.fetch_sub(1, std::memory_order_release);
    }
  }

  std::mutex is_free_, sleep_;
  std::condition_variable wake_;
  int64_t num_workers_ = 0, count_ = 0;
  Job job_ = nullptr;
  const void* context_ = nullptr;
  std::atomic<int> num_asleep_{0};
  alignas(64) std::atomic<uint32_t> epoch_{0};
  alignas(64) std::atomic<uint64_t> gate_{0};
  alignas(64) std::atomic<int64_t> next_{0};
};

static Pool* pool = nullptr;  // never destroyed: its workers outlive everything

static void make_pool() { pool = new Pool; }

void run_jobs(int64_t count, int64_t threads, Job job, const void* context) {
  static std::once_flag once;
  std::call_once(once, [] {
    make_pool();
#if defined(__unix__)
    pthread_atfork(nullptr, nullptr, make_pool);  // a child has none of the parent's workers
#endif
  });
  pool->run(count, threads, job, context);
}
