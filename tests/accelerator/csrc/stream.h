// A stream: a queue of work and the thread that does it, in order. Moments are what events stand for.
#pragma once

#include "settings.h"

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>

namespace sim {

using Clock = std::chrono::steady_clock;
using Time = Clock::time_point;

class Device;

// A place in a stream. It is reached once, at a time that under a cost model is that of the device that is played.
class Moment {
 public:
  void reach(Time at);
  void wait();
  bool isReached() const;
  Time at() const;  // when it was reached

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool is_reached_ = false;
  Time at_{};
};

using MomentPtr = std::shared_ptr<Moment>;

// What a piece of work keeps busy. Pieces for the same engine of a device take turns under a cost model.
enum class Engine : int { kNone = 0, kCompute = 1, kToDevice = 2, kToHost = 3, kPeer = 4 };
constexpr int kEngines = 5;

struct Work {
  Engine engine = Engine::kNone;
  double seconds = 0;          // under the cost model
  std::function<void()> run;   // may be empty
  MomentPtr awaits = nullptr;   // nothing behind this piece begins before
  MomentPtr reaches = nullptr;  // once all before is done
  Time enqueued{};
};

class Stream {
 public:
  Stream(Device& device, int64_t id) : device_(device), id_(id) {}
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  int64_t id() const { return id_; }
  Device& device() const { return device_; }

  void enqueue(Work work);
  MomentPtr record();
  void waitFor(MomentPtr moment);
  bool isIdle();

 private:
  void start();
  void serve();
  void perform(Work& work);
  void delay(Engine engine);

  Device& device_;
  const int64_t id_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Work> queue_;
  bool is_started_ = false;
  bool is_busy_ = false;
  int64_t launches_ = 0;  // given, and not done
  std::condition_variable room_;
  Time clock_{};  // when all that was performed is over
  // The worker's own.
  std::mt19937_64 random_;
  uint64_t random_seed_ = ~uint64_t(0);
};

}  // namespace sim
