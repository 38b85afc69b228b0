// What the simulated accelerator is told from outside. Devices and sizes are fixed once a context exists, the cost
// model while there is work; the rest may be changed at any time.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace sim {

constexpr int kMaxDevices = 16;

// Rates of a device that is played. All zero, or `on` false: kernels take the time they take.
struct CostModel {
  bool on = false;
  double half_flops_per_s = 0;         // of matrix products in 16 bits
  double single_flops_per_s = 0;       // of all others
  double memory_bytes_per_s = 0;       // the device's own memory
  double to_device_bytes_per_s = 0;    // the link, from the host
  double to_host_bytes_per_s = 0;      // the link, to the host
  double peer_bytes_per_s = 0;         // between devices
  double kernel_latency_s = 0;         // on the device, for each kernel
  double copy_latency_s = 0;           // on the link, for each copy
  double launch_latency_s = 0;         // on the calling thread, for each kernel and copy
  double flops_scale = 1;              // small shapes count as large ones: each FLOP, and each byte, this many times
  double bytes_scale = 1;
};

// Which work the random delays hold up.
enum class SlowSide : int { kAll = 0, kCompute = 1, kCopies = 2, kToHost = 3 };

// What an operation that makes the host wait does, as torch.cuda.set_sync_debug_mode has it.
enum class SyncMode : int { kDefault = 0, kWarn = 1, kError = 2 };

struct Settings {
  int devices = 1;
  size_t capacity_bytes = size_t(2) << 30;  // of each device
  size_t segment_bytes = size_t(2) << 20;   // the allocator asks the driver for multiples of this
  size_t context_bytes = 0;                 // of device memory that a context takes
  CostModel cost;
  std::atomic<bool> poison{true};    // freed and fresh memory is filled with NaN
  std::atomic<bool> computing{true};  // false: kernels and copies do nothing, in no time but the cost model's
  std::atomic<int64_t> launch_queue{0};  // launches that a stream holds before its caller blocks; 0: without end
  std::atomic<int64_t> jitter_us{0};  // before each piece of work, at most
  std::atomic<uint64_t> jitter_seed{0};
  std::atomic<SlowSide> slow_side{SlowSide::kAll};
  std::atomic<SyncMode> sync_mode{SyncMode::kDefault};
};

Settings& settings();

}  // namespace sim
