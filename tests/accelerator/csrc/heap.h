// A device's memory and the caching allocator over it.
//
// Memory is mapped twice. Tensors hold addresses in a mapping that nobody may touch, so that a stray access of the host
// faults; kernels work at the same offset of one that may be read and written.
//
// The allocator follows CUDA's in torch: a block belongs to the stream that it was allocated on, and goes back to that
// stream's cache at once when it is freed, whoever else may still be at work on it; `recordStream` says who is. Blocks
// are split from segments and merged again; segments go back to the driver when memory is short.
#pragma once

#include "stream.h"

#include <c10/core/CachingDeviceAllocator.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

namespace sim {

class Heap {
 public:
  explicit Heap(Device& device) : device_(device) {}

  void open();  // when the context is made

  void* allocate(size_t bytes, int64_t stream);  // null for no bytes; raises OutOfMemoryError
  void free(void* address);
  void recordStream(void* address, int64_t stream);
  void emptyCache();

  bool holds(const void* address) const;
  char* real(const void* address) const;  // where a kernel finds it

  size_t freeBytes();  // as the driver sees it: what the cache holds is in use
  size_t capacityBytes() const;
  void setLimit(size_t bytes);
  c10::CachingDeviceAllocator::DeviceStats stats();
  void resetPeaks();
  void resetAccumulated();

 private:
  struct Block {
    size_t size = 0;
    uintptr_t segment = 0;
    int64_t stream = 0;
    size_t asked = 0;  // by the one who holds it
    bool is_taken = false;
    std::set<int64_t> users;         // streams other than its own that were recorded
    std::vector<MomentPtr> pending;  // until these are reached, a freed block is still in use
  };
  using Blocks = std::map<uintptr_t, Block>;

  Blocks::iterator findCached(size_t size, int64_t stream);
  Blocks::iterator growBy(size_t size, int64_t stream);  // end() where the limit does not allow it
  void split(Blocks::iterator block, size_t size);
  Blocks::iterator cache(Blocks::iterator block);  // and merge it with its neighbours
  void cachePending(bool wait);
  void releaseCached();
  void poison(uintptr_t address, size_t bytes, int64_t stream);
  bool isFree(Blocks::const_iterator block) const { return !block->second.is_taken && block->second.pending.empty(); }

  Device& device_;
  uintptr_t seen_ = 0;  // where tensors point
  char* real_ = nullptr;
  size_t address_space_ = 0;
  size_t limit_bytes_ = 0;
  size_t reserved_bytes_ = 0;
  std::mutex mutex_;
  Blocks blocks_;
  std::map<int64_t, std::set<std::pair<size_t, uintptr_t>>> cached_;  // free blocks of a stream, by size
  std::map<uintptr_t, size_t> segments_;
  std::map<uintptr_t, size_t> holes_;  // addresses without a segment
  std::vector<uintptr_t> pending_;
  c10::CachingDeviceAllocator::DeviceStats stats_;
};

}  // namespace sim
