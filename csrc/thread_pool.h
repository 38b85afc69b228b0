// Threads for the kernels: started on first use, kept for the life of the process.
#pragma once

#include <cstdint>

namespace offload {

// Calls task(context, 0) ... task(context, num_tasks - 1), each exactly once, on at most `threads` threads of which the
// caller is one, and returns when all are done. Who runs which task is left to chance, so a task must write only what
// belongs to its index: then no result depends on the number of threads.
// Calls at the same time share the pool: each caller begins at once on its own thread, and workers help the oldest call
// first. A task may call parallel_for.
void parallel_for(int64_t num_tasks, int threads, void (*task)(void*, int64_t), void* context);

template <class Task>
void parallel_for(int64_t num_tasks, int threads, const Task& task) {
  parallel_for(
      num_tasks, threads, [](void* context, int64_t index) { (*static_cast<const Task*>(context))(index); },
      const_cast<Task*>(&task));
}

// Cuts [0, n) into chunks of `chunk` items, the same for every thread count, and calls body(begin, end) for each.
template <class Body>
void parallel_chunks(int64_t n, int64_t chunk, int threads, const Body& body) {
  if (n <= chunk) {
    if (n > 0) body(int64_t{0}, n);
    return;
  }
  auto task = [&](int64_t index) {
    const int64_t begin = index * chunk;
    body(begin, n - begin < chunk ? n : begin + chunk);
  };
  parallel_for((n + chunk - 1) / chunk, threads, task);
}

}  // namespace offload
