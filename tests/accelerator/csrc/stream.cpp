#include "stream.h"

#include "device.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>

#include <thread>

namespace sim {

namespace {

// A worker may be this far ahead of the device that is played: sleeping for less is not exact anyway. More would let it
// take an engine's turn before work of another stream that belongs before it.
constexpr auto kLookahead = std::chrono::microseconds(50);

Time after(Time time, double seconds) {
  return time + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

}  // namespace

void Moment::reach(Time at) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (is_reached_) {
      return;
    }
    is_reached_ = true;
    at_ = at;
  }
  changed_.notify_all();
}

void Moment::wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return is_reached_; });
}

bool Moment::isReached() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return is_reached_;
}

Time Moment::at() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return at_;
}

// A launch blocks where the queue is full, and counts from when it got in. Marks and waits always find room: who makes
// them may hold the allocator's lock.
void Stream::enqueue(Work work) {
  const int64_t most = settings().launch_queue;
  std::unique_lock<std::mutex> lock(mutex_);
  if (!is_started_) {
    start();
  }
  if (work.engine != Engine::kNone) {
    room_.wait(lock, [this, most] { return most <= 0 || launches_ < most; });
    ++launches_;
  }
  work.enqueued = Clock::now();
  queue_.push_back(std::move(work));
  if (!is_busy_) {
    changed_.notify_one();
  }
}

MomentPtr Stream::record() {
  auto moment = std::make_shared<Moment>();
  Work work;
  work.reaches = moment;
  enqueue(std::move(work));
  return moment;
}

void Stream::waitFor(MomentPtr moment) {
  Work work;
  work.awaits = std::move(moment);
  enqueue(std::move(work));
}

bool Stream::isIdle() {
  std::lock_guard<std::mutex> lock(mutex_);
  return queue_.empty() && !is_busy_ && clock_ <= Clock::now();
}

// Each worker computes with one thread, so that results have the bits of torch on a CPU with one thread. torch sets a
// new thread's number from a value for the whole process, and setting a thread's own sets that value too: so it is put
// back by the thread that starts the worker, which waits for it.
void Stream::start() {
  is_started_ = true;
  const int num_threads = at::get_num_threads();
  Moment ready;
  std::thread([this, &ready] {
    at::get_num_threads();  // from here on torch does not set it again in this thread
    at::set_num_threads(1);
    ready.reach(Clock::now());
    serve();
  }).detach();
  ready.wait();
  at::set_num_threads(num_threads);
}

void Stream::serve() {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  at::NoGradGuard no_grad;
  std::deque<Work> taken;
  for (;;) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      is_busy_ = false;
      changed_.wait(lock, [this] { return !queue_.empty(); });
      is_busy_ = true;
      taken.swap(queue_);
    }
    while (!taken.empty()) {
      perform(taken.front());
      taken.pop_front();
    }
  }
}

void Stream::perform(Work& work) {
  if (work.awaits) {
    work.awaits->wait();
  }
  delay(work.engine);
  const bool is_played = settings().cost.on;
  Time clock = std::max(clock_, work.enqueued);
  if (work.awaits) {
    clock = std::max(clock, work.awaits->at());
  }
  if (is_played && work.engine != Engine::kNone) {
    std::this_thread::sleep_until(clock - kLookahead);
    clock = after(device_.takeEngine(work.engine, clock, work.seconds), work.seconds);
  }
  if (work.run) {
    try {
      work.run();
    } catch (const c10::Error& error) {
      device_.noteError(error.what_without_backtrace());
    } catch (const std::exception& error) {
      device_.noteError(error.what());
    }
  }
  if (!is_played) {
    clock = Clock::now();
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    clock_ = clock;
  }
  if (work.engine != Engine::kNone) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      --launches_;
    }
    room_.notify_one();
  }
  if (work.reaches) {
    std::this_thread::sleep_until(clock);
    work.reaches->reach(clock);
  }
}

void Stream::delay(Engine engine) {
  const auto& set = settings();
  const int64_t most_us = set.jitter_us;
  if (most_us <= 0 || engine == Engine::kNone) {
    return;
  }
  const SlowSide side = set.slow_side;
  const bool computes = engine == Engine::kCompute;
  if ((side == SlowSide::kCompute && !computes) || (side == SlowSide::kCopies && computes) ||
      (side == SlowSide::kToHost && engine != Engine::kToHost)) {
    return;
  }
  if (random_seed_ != set.jitter_seed) {
    random_seed_ = set.jitter_seed;
    std::seed_seq seeds{random_seed_, uint64_t(device_.index()), uint64_t(id_)};
    random_.seed(seeds);
  }
  device_.count(Counter::delays);
  std::this_thread::sleep_for(std::chrono::microseconds(random_() % uint64_t(most_us)));
}

}  // namespace sim
