// Host memory that the device's driver knows: ranges that were registered, by the rules of cudaHostRegister, and
// torch's allocator of pinned memory.
#pragma once

#include "stream.h"

#include <ATen/core/CachingHostAllocator.h>

#include <cstdint>
#include <memory>

namespace sim {

// A range that is registered. The driver pins pages, not addresses: a copy reads and writes the pages that were there
// when the range was registered, whatever has been mapped at its addresses since.
class PinnedRange {
 public:
  virtual ~PinnedRange() = default;
  uintptr_t begin() const { return begin_; }
  uintptr_t end() const { return end_; }
  virtual void read(void* target, uintptr_t address, size_t bytes) const = 0;
  virtual void write(uintptr_t address, const void* source, size_t bytes) const = 0;
  // A copy of this range goes into a stream. What torch allocated is not handed out again before it is over.
  virtual void use(Stream&) {}

 protected:
  PinnedRange(uintptr_t begin, size_t bytes) : begin_(begin), end_(begin + bytes) {}

 private:
  const uintptr_t begin_, end_;
};

// Errors are CUDA's numbers, 0 for none, and are latched for the calling thread.
int registerHost(uintptr_t address, size_t bytes);
int unregisterHost(uintptr_t address);
int64_t registeredRanges();  // how many, of registerHost's
int64_t registeredBytes();

// Returns the range that a host buffer lies in; null for pageable memory. Raises where it lies there only in part, or
// in two: "invalid argument" to a real driver.
std::shared_ptr<PinnedRange> findPinned(const void* address, size_t bytes);
bool isPinned(const void* address);

at::HostAllocator& hostAllocator();

}  // namespace sim
