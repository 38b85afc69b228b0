// What Python calls through ctypes, which lets go of the interpreter's lock meanwhile. Nothing here raises.
#include "cost.h"
#include "device.h"
#include "generator.h"
#include "pinned.h"

using namespace sim;

namespace {

struct Counted {
  const char* name;
  Counter counter;
};

constexpr Counted kCounted[] = {
#define SIM_COUNTER(name, what) {#name, Counter::name},
    SIM_COUNTERS(SIM_COUNTER)
#undef SIM_COUNTER
};

Generator& generator(int index) {
  return *static_cast<Generator*>(defaultGenerator(c10::DeviceIndex(index)).unsafeGetGeneratorImpl());
}

}  // namespace

extern "C" {

// Before anything else; the sizes hold for each device.
void sim_configure(int devices, size_t capacity_bytes, size_t segment_bytes, size_t context_bytes) {
  settings().devices = devices;
  settings().capacity_bytes = capacity_bytes;
  settings().segment_bytes = segment_bytes;
  settings().context_bytes = context_bytes;
}

int sim_most_devices() { return kMaxDevices; }
int sim_device_count() { return isInBadFork() ? 0 : settings().devices; }
int sim_current_device() { return currentDevice(); }
int sim_in_bad_fork() { return isInBadFork(); }
int sim_has_context(int index) { return device(c10::DeviceIndex(index)).hasContext(); }

void sim_set_limit(int index, size_t bytes) { device(c10::DeviceIndex(index)).heap().setLimit(bytes); }
void sim_empty_cache() { c10::getDeviceAllocator(kDeviceType)->emptyCache(); }

int sim_host_register(uintptr_t address, size_t bytes) {
  try {
    return registerHost(address, bytes);
  } catch (const std::exception&) {
    return latchError(2);  // out of memory
  }
}
int sim_host_unregister(uintptr_t address) {
  try {
    return unregisterHost(address);
  } catch (const std::exception&) {
    return latchError(3);  // not initialized: a forked child
  }
}
int sim_take_error() { return takeError(); }
int64_t sim_registered_ranges() { return registeredRanges(); }
int64_t sim_registered_bytes() { return registeredBytes(); }

void sim_seed(int index, uint64_t seed) { generator(index).set_current_seed(seed); }
uint64_t sim_current_seed(int index) { return generator(index).current_seed(); }
uint64_t sim_offset(int index) { return generator(index).get_offset(); }
void sim_set_random_state(int index, uint64_t seed, uint64_t offset) {
  generator(index).set_current_seed(seed);
  generator(index).set_offset(offset);
}

int sim_counters() { return int(Counter::kNumber); }
const char* sim_counter_name(int which) { return kCounted[which].name; }
int64_t sim_counter(int index, int which) { return device(c10::DeviceIndex(index)).counted(kCounted[which].counter); }
double sim_busy_seconds(int index, int engine) { return device(c10::DeviceIndex(index)).busySeconds(Engine(engine)); }
void sim_reset_counters(int index) { device(c10::DeviceIndex(index)).resetCounters(); }

void sim_set_jitter(int64_t most_us, uint64_t seed, int side) {
  settings().jitter_seed = seed;
  settings().slow_side = SlowSide(side);
  settings().jitter_us = most_us;
}
void sim_set_launch_queue(int64_t most) { settings().launch_queue = most; }
void sim_set_poison(int on) { settings().poison = on != 0; }
void sim_set_computing(int on) { settings().computing = on != 0; }
void sim_set_sync_mode(int mode) { settings().sync_mode = SyncMode(mode); }
int sim_sync_mode() { return int(settings().sync_mode.load()); }
void sim_set_cost(const CostModel* model) { settings().cost = model ? *model : CostModel{}; }

// A kernel that was compiled at run time, in the current stream: arguments of 8 bytes each, of which `pointers` has the
// addresses as bits. It reads and writes so many bytes.
void sim_launch(void (*kernel)(const uint64_t*, int64_t, int64_t), const uint64_t* arguments, int number,
                uint64_t pointers, int64_t grid, int64_t block, double bytes) {
  const LaunchTimer timer;
  Device& here = device(-1);
  here.touch();
  std::vector<uint64_t> seen(arguments, arguments + number);
  for (int k = 0; k < number; ++k) {
    if (pointers >> k & 1) seen[size_t(k)] = uint64_t(here.heap().real(reinterpret_cast<void*>(seen[size_t(k)])));
  }
  here.count(Counter::launches);
  Work work;
  work.engine = Engine::kCompute;
  work.seconds = memorySeconds(bytes);
  if (settings().computing) work.run = [=, seen = std::move(seen)] { kernel(seen.data(), grid, block); };
  currentStream(-1).enqueue(std::move(work));
}

// A stream that is held does nothing that it is given from now on until it is released.
void* sim_hold(int index, int64_t stream) {
  auto* gate = new MomentPtr(std::make_shared<Moment>());
  device(c10::DeviceIndex(index)).stream(stream).waitFor(*gate);
  return gate;
}
void sim_release(void* gate) {
  auto* moment = static_cast<MomentPtr*>(gate);
  (*moment)->reach(Clock::now());
  delete moment;
}

}  // extern "C"
