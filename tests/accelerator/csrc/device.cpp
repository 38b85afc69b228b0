#include "device.h"

#include <ATen/Context.h>
#include <c10/util/Exception.h>

#include <pthread.h>

namespace sim {

namespace {

constexpr StreamId kPoolStreams = 32;  // as many as torch.cuda has; further ones share their queues

std::atomic<bool> has_any_context{false};
std::atomic<bool> is_in_bad_fork{false};

thread_local DeviceIndex current_device = 0;  // a new thread begins on device 0, whatever its parent had
thread_local std::array<StreamId, kMaxDevices> current_streams{};
thread_local int latched_error = 0;

const char* describe(int error) {
  switch (error) {
    case kInvalidValue:
      return "invalid argument";
    case kAlreadyRegistered:
      return "part or all of the requested memory range is already mapped";
    case kNotRegistered:
      return "pointer does not correspond to a registered memory region";
    default:
      return "unknown error";
  }
}

[[noreturn]] void raise(int error, const std::string& what) {
  throw c10::AcceleratorError({__func__, __FILE__, uint32_t(__LINE__)}, error, what);
}

}  // namespace

Settings& settings() {
  static auto* all = new Settings;
  return *all;
}

Device::Device(DeviceIndex index) : index_(index), heap_(*this) {
  for (StreamId id = 0; id <= kPoolStreams; ++id) {
    streams_.push_back(std::make_unique<Stream>(*this, id));
  }
}

void Device::touch() {
  TORCH_CHECK(!isInBadFork(), "Cannot re-initialize the simulated accelerator in a forked subprocess: use the 'spawn' "
              "start method, or fork before the first use.");
  if (has_context_) {
    return;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  if (!has_context_) {
    at::globalContext().lazyInitDevice(kDeviceType);  // without which torch takes no memory for pinned
    heap_.open();
    has_context_ = has_any_context = true;
  }
}

Stream& Device::stream(StreamId id) {
  TORCH_CHECK(id >= 0 && size_t(id) < streams_.size(), "device ", int(index_), " has no stream ", id);
  return *streams_[size_t(id)];
}

StreamId Device::nextFromPool() { return 1 + num_from_pool_++ % kPoolStreams; }

std::vector<Stream*> Device::usedStreams() {
  const StreamId number = std::min<StreamId>(num_from_pool_, kPoolStreams);
  std::vector<Stream*> found;
  for (StreamId id = 0; id <= number; ++id) {
    found.push_back(streams_[size_t(id)].get());
  }
  return found;
}

void Device::synchronize() {
  touch();
  count(Counter::waits);
  std::vector<MomentPtr> ends;
  for (Stream* stream : usedStreams()) {
    if (!stream->isIdle()) {
      ends.push_back(stream->record());
    }
  }
  for (const auto& end : ends) {
    end->wait();
  }
  raiseError();
}

void Device::noteError(std::string what) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (error_.empty()) {
    error_ = std::move(what);
  }
}

void Device::raiseError() {
  std::string error;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    error.swap(error_);
  }
  if (!error.empty()) {
    raise(710, "an earlier kernel of device " + std::to_string(index_) + " failed: " + error);
  }
}

double Device::busySeconds(Engine engine) {
  std::lock_guard<std::mutex> lock(mutex_);
  return busy_s_[int(engine)];
}

void Device::resetCounters() {
  for (auto& counter : counters_) {
    counter = 0;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  busy_s_.fill(0);
}

Time Device::takeEngine(Engine engine, Time earliest, double seconds) {
  std::lock_guard<std::mutex> lock(mutex_);
  Time& free = engines_[int(engine)];
  const Time begin = std::max(free, earliest);
  free = begin + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  busy_s_[int(engine)] += seconds;
  return begin;
}

Device& device(DeviceIndex index) {
  static auto* all = [] {
    auto* made = new std::vector<std::unique_ptr<Device>>;
    for (int i = 0; i < settings().devices; ++i) {
      made->push_back(std::make_unique<Device>(DeviceIndex(i)));
    }
    pthread_atfork(nullptr, nullptr, [] { is_in_bad_fork = is_in_bad_fork || has_any_context; });
    return made;
  }();
  const DeviceIndex found = index < 0 ? current_device : index;
  TORCH_CHECK(size_t(found) < all->size(), "invalid device ordinal: ", int(found), ", and there are ", all->size());
  return *(*all)[size_t(found)];
}

DeviceIndex currentDevice() { return current_device; }

void setCurrentDevice(DeviceIndex index) {
  if (index >= 0) {
    current_device = device(index).index();
  }
}

StreamId currentStreamId(DeviceIndex index) { return current_streams[size_t(index < 0 ? current_device : index)]; }

void setCurrentStreamId(DeviceIndex index, StreamId id) {
  current_streams[size_t(index < 0 ? current_device : index)] = id;
}

Stream& currentStream(DeviceIndex index) { return device(index).stream(currentStreamId(index)); }

void waitFor(Device& device, const MomentPtr& moment) {
  device.count(Counter::waits);
  moment->wait();
  device.raiseError();
}

void synchronize(Stream& stream) { waitFor(stream.device(), stream.record()); }

void checkSyncMode(const char* name) {
  switch (settings().sync_mode.load()) {
    case SyncMode::kDefault:
      break;
    case SyncMode::kWarn:
      TORCH_WARN("called a synchronizing operation of the simulated accelerator: ", name);
      break;
    case SyncMode::kError:
      TORCH_CHECK(false, "called a synchronizing operation of the simulated accelerator: ", name);
  }
}

void synchronizeInOperation(Stream& stream, const char* name) {
  checkSyncMode(name);
  stream.device().count(Counter::operation_waits);
  synchronize(stream);
}

bool isInBadFork() { return is_in_bad_fork; }

int latchError(int error) {
  if (error) {
    latched_error = error;
  }
  return error;
}

int takeError() {
  const int error = latched_error;
  latched_error = 0;
  return error;
}

void raiseLatchedError() {
  if (const int error = takeError()) {
    raise(error, std::string("simulated accelerator error: ") + describe(error));
  }
}

}  // namespace sim
