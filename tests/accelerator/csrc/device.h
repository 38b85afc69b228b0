// A device: its streams, its memory, what it has counted, and whether this process has a context on it. Which device
// and stream are current is a matter of the calling thread, as it is with CUDA.
#pragma once

#include "heap.h"
#include "stream.h"

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace sim {

using c10::DeviceIndex;
using c10::StreamId;

constexpr auto kDeviceType = c10::DeviceType::PrivateUse1;

// NAME(what Python calls it, what it counts)
#define SIM_COUNTERS(NAME)                                                       \
  NAME(launches, "kernels that were launched")                                   \
  NAME(copies, "copies that were given to a copy engine")                        \
  NAME(to_device_bytes, "bytes from the host")                                   \
  NAME(to_host_bytes, "bytes to the host")                                       \
  NAME(peer_bytes, "bytes from other devices")                                   \
  NAME(pageable_copies, "copies from or to host memory that is not pinned")      \
  NAME(pageable_bytes, "bytes of those")                                         \
  NAME(waits, "times that the host waited, for whatever reason")                 \
  NAME(operation_waits, "of those, within an operation: item, nonzero, a copy")  \
  NAME(delays, "pieces of work that were held up at random")                     \
  NAME(signatures, "operations whose results had to be found out first")

enum class Counter : int {
#define SIM_COUNTER(name, what) name,
  SIM_COUNTERS(SIM_COUNTER)
#undef SIM_COUNTER
      kNumber
};

class Device {
 public:
  explicit Device(DeviceIndex index);

  DeviceIndex index() const { return index_; }
  Heap& heap() { return heap_; }

  // Has to come before all else that would make a context on a real device.
  void touch();
  bool hasContext() const { return has_context_; }

  Stream& stream(StreamId id);
  StreamId nextFromPool();
  std::vector<Stream*> usedStreams();
  void synchronize();

  // The first failure of a kernel stays until somebody synchronises.
  void noteError(std::string what);
  void raiseError();

  void count(Counter counter, int64_t number = 1) { counters_[int(counter)] += number; }
  int64_t counted(Counter counter) const { return counters_[int(counter)]; }
  double busySeconds(Engine engine);
  void resetCounters();

  // Returns when a piece of work that could begin at `earliest` has its turn on an engine.
  Time takeEngine(Engine engine, Time earliest, double seconds);

 private:
  const DeviceIndex index_;
  std::atomic<bool> has_context_{false};
  std::atomic<StreamId> num_from_pool_{0};
  std::array<std::atomic<int64_t>, int(Counter::kNumber)> counters_{};
  std::mutex mutex_;
  std::vector<std::unique_ptr<Stream>> streams_;
  std::array<Time, kEngines> engines_{};
  std::array<double, kEngines> busy_s_{};
  std::string error_;
  Heap heap_;
};

// Devices live as long as the process: their threads may outlive all destructors.
Device& device(DeviceIndex index);  // a negative index: the current one

DeviceIndex currentDevice();
void setCurrentDevice(DeviceIndex index);

StreamId currentStreamId(DeviceIndex index);
void setCurrentStreamId(DeviceIndex index, StreamId id);
Stream& currentStream(DeviceIndex index);
inline c10::Stream asStream(DeviceIndex index, StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDeviceType, index), id);
}
inline Stream& streamOf(const c10::Stream& stream) {
  return device(stream.device_index()).stream(stream.id());
}

// Lets the calling thread wait until a stream has done all that it was given, and raises what failed there.
void synchronize(Stream& stream);
void waitFor(Device& device, const MomentPtr& moment);
// For an operation that cannot but wait: counted as such, and set_sync_debug_mode may warn of it or refuse it.
void synchronizeInOperation(Stream& stream, const char* name);
void checkSyncMode(const char* name);

// True in a child of a process that had a context: the threads that did the work are the parent's.
bool isInBadFork();

// The driver keeps the error of a refused call for the thread that made it, until it is taken. torch takes it after a
// launch, and raises it there.
constexpr int kInvalidValue = 1;
constexpr int kAlreadyRegistered = 712;
constexpr int kNotRegistered = 713;
int latchError(int error);  // returns it
int takeError();
void raiseLatchedError();

}  // namespace sim
