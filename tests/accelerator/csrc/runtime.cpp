// What torch asks a backend for, other than operations: devices, streams and events (the guard), allocators and
// generators. Which of these make a context on the thread's current device, whatever they are about, follows CUDA.
#include "device.h"
#include "generator.h"
#include "pinned.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>

namespace sim {

namespace {

class Allocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const DeviceIndex index = currentDevice();
    void* address = device(index).heap().allocate(bytes, currentStreamId(index));
    return {address, address, &drop, c10::Device(kDeviceType, index)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &drop; }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    Device& here = device(-1);
    Work work;
    work.engine = Engine::kCompute;
    char* to = here.heap().real(target);
    const char* from = here.heap().real(source);
    work.run = [to, from, bytes] { std::memcpy(to, from, bytes); };
    currentStream(-1).enqueue(std::move(work));
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    for (int i = 0; i < settings().devices; ++i) {
      device(DeviceIndex(i)).heap().emptyCache();
    }
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    if (data.get()) {
      device(stream.device_index()).heap().recordStream(data.get(), stream.id());
    }
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex index) override {
    return device(index).heap().stats();
  }
  void resetAccumulatedStats(DeviceIndex index) override { device(index).heap().resetAccumulated(); }
  void resetPeakStats(DeviceIndex index) override { device(index).heap().resetPeaks(); }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex index) override {
    device(index).touch();
    return {device(index).heap().freeBytes(), settings().capacity_bytes};
  }

 private:
  static void drop(void* address) {
    for (int i = 0; address && i < settings().devices; ++i) {
      if (device(DeviceIndex(i)).heap().holds(address)) {
        return device(DeviceIndex(i)).heap().free(address);
      }
    }
  }
};

Allocator& allocator() {
  static auto* one = new Allocator;
  return *one;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static DeviceIndex indexOf(c10::Device found) { return found.has_index() ? found.index() : currentDevice(); }
  struct Event {
    Device* device = nullptr;
    MomentPtr moment;
  };
  static Event& asEvent(void* event) { return *static_cast<Event*>(event); }

  c10::DeviceType type() const override { return kDeviceType; }
  DeviceIndex deviceCount() const noexcept override { return isInBadFork() ? 0 : DeviceIndex(settings().devices); }
  c10::Device getDevice() const override { return {kDeviceType, currentDevice()}; }
  void setDevice(c10::Device to) const override { setCurrentDevice(to.index()); }
  void uncheckedSetDevice(c10::Device to) const noexcept override {
    if (to.index() >= 0 && to.index() < settings().devices) {
      setCurrentDevice(to.index());
    }
  }
  c10::Device exchangeDevice(c10::Device to) const override {
    const c10::Device before = getDevice();
    setCurrentDevice(to.index());
    return before;
  }

  c10::Stream getStream(c10::Device of) const override { return asStream(indexOf(of), currentStreamId(indexOf(of))); }
  c10::Stream getDefaultStream(c10::Device of) const override { return asStream(indexOf(of), 0); }
  c10::Stream getNewStream(c10::Device of, int) const override {
    Device& found = device(indexOf(of));
    found.touch();
    return asStream(found.index(), found.nextFromPool());
  }
  c10::Stream getStreamFromGlobalPool(c10::Device of, bool) const override { return getNewStream(of, 0); }
  c10::Stream exchangeStream(c10::Stream to) const override {
    const c10::Stream before = getStream(to.device());
    setCurrentStreamId(to.device_index(), to.id());
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override { return streamOf(stream).isIdle(); }
  void synchronizeStream(const c10::Stream& stream) const override {
    checkSyncMode("Stream.synchronize");
    synchronize(streamOf(stream));
  }
  void synchronizeDevice(const DeviceIndex index) const override { device(index).synchronize(); }

  // An event that was never recorded is over.
  void record(void** event, const c10::Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    device(stream.device_index()).touch();
    if (!*event) {
      *event = new Event;
    }
    asEvent(*event) = {&device(stream.device_index()), streamOf(stream).record()};
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) {
      streamOf(stream).waitFor(asEvent(event).moment);
    }
  }
  bool queryEvent(void* event) const override {
    device(-1).touch();
    return !event || asEvent(event).moment->isReached();
  }
  void synchronizeEvent(void* event) const override {
    device(-1).touch();
    if (event) {
      waitFor(*asEvent(event).device, asEvent(event).moment);
    }
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* begin, void* end, const DeviceIndex) const override {
    const Moment &from = *asEvent(begin).moment, &to = *asEvent(end).moment;
    TORCH_CHECK(from.isReached() && to.isReached(), "device not ready: an event is not reached yet");
    return std::chrono::duration<double, std::milli>(to.at() - from.at()).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    allocator().recordStream(data, stream);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return !isInBadFork(); }
  bool hasPrimaryContext(DeviceIndex index) const override { return device(index).hasContext(); }
  DeviceIndex deviceCount() const override { return DeviceIndex(settings().devices); }
  DeviceIndex getCurrentDevice() const override { return currentDevice(); }
  void setCurrentDevice(DeviceIndex index) const override { sim::setCurrentDevice(index); }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    const DeviceIndex before = currentDevice();
    sim::setCurrentDevice(index);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchangeDevice(index); }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override { return defaultGenerator(index); }
  at::Generator getNewGenerator(DeviceIndex index) const override { return makeGenerator(index); }
  c10::Device getDeviceFromPtr(void* address) const override {
    for (int i = 0; i < settings().devices; ++i) {
      if (device(DeviceIndex(i)).heap().holds(address)) {
        return {kDeviceType, DeviceIndex(i)};
      }
    }
    TORCH_CHECK(false, address, " is no memory of a simulated device");
  }
  bool isPinnedPtr(const void* address) const override { return isPinned(address); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &hostAllocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    c10::StorageImpl* old = storage.unsafeGetStorageImpl();
    const c10::DeviceGuard on(old->device());
    auto fresh = allocator().allocate(bytes);
    if (const size_t kept = std::min(bytes, old->nbytes())) {
      allocator().copy_data(fresh.get(), old->data(), kept);
    }
    old->set_data_ptr(std::move(fresh));
    old->set_nbytes(bytes);
  }
};

const int registered = [] {
  c10::SetAllocator(kDeviceType, &allocator());
  at::setHostAllocator(kDeviceType, &hostAllocator());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return 0;
}();

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

}  // namespace

}  // namespace sim
