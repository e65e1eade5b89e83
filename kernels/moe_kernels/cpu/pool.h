// Threads that help the caller through a list of jobs.
//
// The caller takes jobs like everybody else and waits only for jobs that a helper has begun, never
// for a helper that is asleep or that the system has not scheduled: on a machine with other work to
// do, a call costs at most what it costs alone. Which thread runs a job must not matter to its
// result.
#pragma once

#include <cstdint>

// Runs job(context, i) for i in [0, count) on the caller and up to threads - 1 others. Calls that
// come while another thread's are under way run on their caller alone.
void run_jobs(int64_t threads, int64_t count, void (*job)(void*, int64_t), void* context);

// job(i) for i in [0, count).
template <class Job>
static inline void parallel_for(int64_t threads, int64_t count, const Job& job) {
  if (threads <= 1 || count <= 1) {
    for (int64_t i = 0; i < count; ++i) job(i);
    return;
  }
  run_jobs(
      threads, count,
      [](void* context, int64_t i) { (*(const Job*)context)(i); },
      (void*)&job);
}

// job(i) for i in [0, count), `rows` of them at a time.
template <class Job>
static inline void parallel_rows(int64_t threads, int64_t count, int64_t rows, const Job& job) {
  parallel_for(threads, (count + rows - 1) / rows, [&](int64_t block) {
    int64_t last = block * rows + rows < count ? block * rows + rows : count;
    for (int64_t i = block * rows; i < last; ++i) job(i);
  });
}
