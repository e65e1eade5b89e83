// See pool.h.

#include "pool.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
static inline void relax() { _mm_pause(); }
#else
static inline void relax() { std::this_thread::yield(); }
#endif

namespace {

// The list under way, in one word, so that a job is taken in one step: which list it is (20 bits),
// how many threads may work on it (8), how many jobs it has (18), and how many are taken (18).
constexpr int kCountBits = 18, kThreadBits = 8;
constexpr uint64_t kMostJobs = (1u << kCountBits) - 1, kMostThreads = (1u << kThreadBits) - 1;
constexpr int kSpins = 20000;  // about half a millisecond: longer than the gaps within a step

uint64_t list_of(uint64_t word) { return word >> (2 * kCountBits + kThreadBits); }
uint64_t threads_of(uint64_t word) { return word >> (2 * kCountBits) & kMostThreads; }
uint64_t count_of(uint64_t word) { return word >> kCountBits & kMostJobs; }
uint64_t taken_of(uint64_t word) { return word & kMostJobs; }

uint64_t next_list(uint64_t word, uint64_t threads, uint64_t count) {
  return ((list_of(word) + 1) << kThreadBits | threads) << (2 * kCountBits) | count << kCountBits;
}

struct List {
  void (*job)(void*, int64_t);
  void* context;
  int64_t first;
};

class Pool {
 public:
  explicit Pool(pid_t owner) : owner_(owner) {}

  bool is_of(pid_t process) const { return owner_ == process; }

  void run(int64_t threads, int64_t first, int64_t count, void (*job)(void*, int64_t),
           void* context) {
    while (num_helpers_ < threads - 1) start_helper();
    list_ = List{job, context, first};
    done_.store(0, std::memory_order_relaxed);
    word_.store(next_list(word_.load(), (uint64_t)threads, (uint64_t)count));
    if (num_asleep_.load() > 0) {
      { std::lock_guard<std::mutex> lock(mutex_); }
      wake_.notify_all();
    }
    while (take(0)) {
    }
    for (int spin = 0; done_.load(std::memory_order_acquire) < count; ++spin) {
      if (spin < kSpins) relax();
      else std::this_thread::yield();
    }
  }

 private:
  // Runs one job, if there is one left. `list_` belongs to the list that the job was taken from:
  // it cannot change before that job is done.
  bool take(int64_t worker) {
    uint64_t word = word_.load(std::memory_order_acquire);
    do {
      if (taken_of(word) >= count_of(word) || worker >= (int64_t)threads_of(word)) return false;
    } while (!word_.compare_exchange_weak(word, word + 1, std::memory_order_acq_rel));
    list_.job(list_.context, list_.first + (int64_t)taken_of(word));
    done_.fetch_add(1, std::memory_order_release);
    return true;
  }

  void start_helper() {
    int64_t worker = ++num_helpers_;
    std::thread([this, worker] { help(worker); }).detach();
  }

  void help(int64_t worker) {
    int spin = 0;
    for (;;) {
      if (take(worker)) {
        spin = 0;
      } else if (++spin < kSpins) {
        relax();
      } else {
        sleep();
        spin = 0;
      }
    }
  }

  void sleep() {
    std::unique_lock<std::mutex> lock(mutex_);
    ++num_asleep_;
    uint64_t word = word_.load();
    if (taken_of(word) >= count_of(word))
      wake_.wait(lock, [&] { return list_of(word_.load()) != list_of(word); });
    --num_asleep_;
  }

  const pid_t owner_;
  int64_t num_helpers_ = 0;
  List list_{};
  alignas(64) std::atomic<uint64_t> word_{0};
  alignas(64) std::atomic<int64_t> done_{0};
  alignas(64) std::atomic<int64_t> num_asleep_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
};

std::mutex busy;
Pool* pool = nullptr;  // never destroyed: its helpers run until the process ends

}  // namespace

void run_jobs(int64_t threads, int64_t count, void (*job)(void*, int64_t),
              void* context) {
  std::unique_lock<std::mutex> lock(busy, std::try_to_lock);
  if (!lock.owns_lock()) {
    for (int64_t i = 0; i < count; ++i) job(context, i);
    return;
  }
  if (!pool || !pool->is_of(getpid())) pool = new Pool(getpid());  // helpers do not survive a fork
  for (int64_t first = 0; first < count; first += (int64_t)kMostJobs)
    pool->run(std::min(threads, (int64_t)kMostThreads), first, std::min(count - first, (int64_t)kMostJobs), job, context);
}
