#include "thread_pool.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

namespace offload {
namespace {

class ThreadPool {
 public:
  void run(int64_t num_tasks, int threads, void (*task)(void*, int64_t), void* context) {
    std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
    const int helpers = static_cast<int>(std::min<int64_t>(threads, num_tasks)) - 1;
    if (!turn.owns_lock() || helpers <= 0) {
      for (int64_t i = 0; i < num_tasks; ++i) task(context, i);
      return;
    }
    {
      std::lock_guard<std::mutex> lock(mutex_);
      grow(helpers);
      task_ = task, context_ = context, num_tasks_ = num_tasks;
      next_.store(0, std::memory_order_relaxed);  // the mutex publishes it to the workers
      seats_ = helpers;
    }
    wake_.notify_all();
    drain();
    std::unique_lock<std::mutex> lock(mutex_);
    seats_ = 0;  // whoever has not woken up by now is not needed; waiting for it would cost a time slice
    done_.wait(lock, [this] { return active_ == 0; });
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
      wake_.wait(lock, [this] { return seats_ > 0; });
      --seats_, ++active_;
      lock.unlock();
      drain();
      lock.lock();
      if (--active_ == 0) done_.notify_one();
    }
  }

  void drain() {
    // Relaxed: the counter only deals out indices; results are published by mutex_ when active_ falls to zero.
    for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < num_tasks_;) task_(context_, i);
  }

  std::mutex turn_;   // held by the caller whose job runs
  std::mutex mutex_;  // guards everything below but next_
  std::condition_variable wake_, done_;
  void (*task_)(void*, int64_t) = nullptr;
  void* context_ = nullptr;
  int64_t num_tasks_ = 0;
  int seats_ = 0;   // workers still wanted for the job
  int active_ = 0;  // workers inside drain()
  int num_workers_ = 0;
  std::atomic<int64_t> next_{0};
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
