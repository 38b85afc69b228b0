#include "thread_pool.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace offload {
namespace {

// One call of parallel_for, on the caller's stack.
struct Job {
  void (*task)(void*, int64_t);
  void* context;
  int64_t num_tasks;
  int seats;  // workers still wanted
  int active = 0;  // workers inside drain()
  std::atomic<int64_t> next{0};
  std::condition_variable done{};

  void drain() {
    // Relaxed: the counter only deals out indices; results are published by mutex_ when active falls to zero.
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < num_tasks;) task(context, i);
  }

  bool wants_workers() const { return seats > 0 && next.load(std::memory_order_relaxed) < num_tasks; }
};

class ThreadPool {
 public:
  // Each caller works on its own job, so a call never waits for another one, not even a call inside a task. Workers join
  // the oldest job that wants some, and go on to the next job after its last task.
  void run(int64_t num_tasks, int threads, void (*task)(void*, int64_t), void* context) {
    const int helpers = static_cast<int>(std::min<int64_t>(threads, num_tasks)) - 1;
    if (helpers <= 0) {
      for (int64_t i = 0; i < num_tasks; ++i) task(context, i);
      return;
    }
    Job job{task, context, num_tasks, helpers};
    {
      std::lock_guard<std::mutex> lock(mutex_);
      grow(helpers);
      jobs_.push_back(&job);
    }
    wake_.notify_all();
    job.drain();
    std::unique_lock<std::mutex> lock(mutex_);
    // Whoever has not woken up by now is not needed; waiting for it would cost a time slice.
    jobs_.erase(std::find(jobs_.begin(), jobs_.end(), &job));
    job.done.wait(lock, [&job] { return job.active == 0; });
  }

 private:
  void grow(int helpers) {  // under mutex_
    try {
      for (; num_workers_ < helpers; ++num_workers_) std::thread([this] { work(); }).detach();
    } catch (const std::system_error&) {
      // The system refuses another thread: fewer threads give the same result, later.
    }
  }

  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      Job* job = nullptr;
      wake_.wait(lock, [this, &job] { return (job = wanting()) != nullptr; });
      --job->seats, ++job->active;
      lock.unlock();
      job->drain();
      lock.lock();
      if (--job->active == 0) job->done.notify_one();  // under the lock: the job lives on the waiting caller's stack
    }
  }

  Job* wanting() const {  // under mutex_
    const auto job = std::find_if(jobs_.begin(), jobs_.end(), [](const Job* each) { return each->wants_workers(); });
    return job == jobs_.end() ? nullptr : *job;
  }

  std::mutex mutex_;  // guards everything below, and the fields of jobs but next
  std::condition_variable wake_;
  std::vector<Job*> jobs_;  // running, the oldest first
  int num_workers_ = 0;
};

std::atomic<ThreadPool*> g_pool{nullptr};

// The pool is never destroyed: its workers sleep on it until the process ends, and a destructor that ran at exit while a
// daemon thread still computes would pull it from under that thread. A fork's child has none of the workers and perhaps
// a locked mutex, so it forgets the parent's pool and starts its own.
ThreadPool& pool() {
  if (ThreadPool* ready = g_pool.load(std::memory_order_acquire)) return *ready;
  static std::once_flag registered;
  std::call_once(registered, [] { pthread_atfork(nullptr, nullptr, [] { g_pool.store(nullptr); }); });
  auto* fresh = new ThreadPool;
  ThreadPool* expected = nullptr;
  if (g_pool.compare_exchange_strong(expected, fresh, std::memory_order_acq_rel)) return *fresh;
  delete fresh;  // another thread was faster; this one has no workers yet
  return *expected;
}

}  // namespace

void parallel_for(int64_t num_tasks, int threads, void (*task)(void*, int64_t), void* context) {
  pool().run(num_tasks, threads, task, context);
}

}  // namespace offload
