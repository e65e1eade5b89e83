// Threads that help the caller through a list of jobs.
//
// The caller takes jobs like everybody else and waits only for jobs that a helper has begun, never
// for a helper that is asleep or that the system has not scheduled: on a machine with other work to
// do, a call costs at most what it costs alone. Which thread runs a job must not matter to its
// result.
#pragma once

#include <cstdint>

// Runs job(context, i, worker) for i in [0, count), with worker in [0, threads): 0 is the caller.
// Calls that come while another thread's are under way run on their caller alone.
void run_jobs(int64_t threads, int64_t count, void (*job)(void*, int64_t, int64_t), void* context);

template <class Job>
static inline void parallel_for(int64_t threads, int64_t count, const Job& job) {
  if (threads <= 1 || count <= 1) {
    for (int64_t i = 0; i < count; ++i) job(i, (int64_t)0);
    return;
  }
  run_jobs(
      threads, count,
      [](void* context, int64_t i, int64_t worker) { (*(const Job*)context)(i, worker); },
      (void*)&job);
}
