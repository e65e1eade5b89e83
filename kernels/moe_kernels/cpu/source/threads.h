// The worker threads of every parallel loop. Our own and not OpenMP's, because a loop here ends
// when its jobs are done: it does not wait for a worker that the system wakes late or has preempted,
// and idle workers sleep after a short spin instead of holding a core for milliseconds.
#pragma once

#include <cstdint>

using Job = void (*)(const void* context, int64_t index);

// Calls job(context, i) for i in [0, count), each once, in ascending order of start, by up to
// `threads` threads, the caller among them. Returns when all have ended. Within a job, or while
// another thread runs a loop, it is a plain loop.
void run_jobs(int64_t count, int64_t threads, Job job, const void* context);

template <class Work>
static inline void parallel_for(int64_t count, int64_t threads, const Work& work) {
  if (threads <= 1 || count <= 1) {
    for (int64_t i = 0; i < count; ++i) work(i);
    return;
  }
  Job job = [](const void* context, int64_t i) { (*static_cast<const Work*>(context))(i); };
  run_jobs(count, threads, job, &work);
}
