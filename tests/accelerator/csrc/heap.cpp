#include "heap.h"

#include "device.h"
#include "pinned.h"

#include <c10/util/Exception.h>

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace sim {

namespace {

constexpr size_t kBlockBytes = 512;
// A driver finds pages for a segment wherever it lies; so there are more addresses than memory.
constexpr size_t kAddressesPerByte = 8;

size_t roundUp(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace

void Heap::open() {
  const size_t page = size_t(sysconf(_SC_PAGESIZE));
  address_space_ = roundUp(settings().capacity_bytes * kAddressesPerByte, page);
  const int file = memfd_create("simulated-accelerator", MFD_CLOEXEC);
  TORCH_CHECK(file >= 0 && ftruncate(file, off_t(address_space_)) == 0, "no memory for a simulated device");
  void* real = mmap(nullptr, address_space_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
  void* seen = mmap(nullptr, address_space_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  close(file);
  TORCH_CHECK(real != MAP_FAILED && seen != MAP_FAILED, "no addresses for a simulated device");
  real_ = static_cast<char*>(real);
  seen_ = reinterpret_cast<uintptr_t>(seen);
  holes_[seen_] = address_space_;
  if (!limit_bytes_) {
    limit_bytes_ = capacityBytes();
  }
}

bool Heap::holds(const void* address) const {
  const auto at = reinterpret_cast<uintptr_t>(address);
  return seen_ && at >= seen_ && at < seen_ + address_space_;
}

char* Heap::real(const void* address) const {
  if (!holds(address) && isPinned(address)) {
    return static_cast<char*>(const_cast<void*>(address));  // registered host memory, at its own address
  }
  TORCH_CHECK(holds(address), "an illegal memory access was encountered: ", address, " is no memory of device ",
              int(device_.index()));
  return real_ + (reinterpret_cast<uintptr_t>(address) - seen_);
}

size_t Heap::capacityBytes() const { return settings().capacity_bytes - settings().context_bytes; }

size_t Heap::freeBytes() {
  std::lock_guard<std::mutex> lock(mutex_);
  return capacityBytes() - std::min(capacityBytes(), reserved_bytes_);
}

void Heap::setLimit(size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  limit_bytes_ = std::min(bytes, capacityBytes());
}

void* Heap::allocate(size_t bytes, int64_t stream) {
  if (!bytes) {
    return nullptr;
  }
  device_.touch();
  const size_t size = roundUp(bytes, kBlockBytes);
  std::lock_guard<std::mutex> lock(mutex_);
  cachePending(/*wait=*/false);
  auto block = findCached(size, stream);
  if (block == blocks_.end()) {
    block = growBy(size, stream);
  }
  if (block == blocks_.end()) {
    ++stats_.num_alloc_retries;
    releaseCached();
    block = growBy(size, stream);
  }
  if (block == blocks_.end()) {
    ++stats_.num_ooms;
    const size_t allocated = size_t(stats_.allocated_bytes[0].current);
    TORCH_CHECK_WITH(OutOfMemoryError, false, "simulated accelerator out of memory. Tried to allocate ", bytes,
                     " bytes. Device ", int(device_.index()), " has a total capacity of ", capacityBytes(),
                     " bytes, of which ", limit_bytes_, " may be used; ", allocated, " are allocated, and ",
                     reserved_bytes_ - allocated, " are reserved but unallocated.");
  }
  split(block, size);
  block->second.is_taken = true;
  block->second.asked = bytes;
  stats_.allocation[0].increase(1);
  stats_.active[0].increase(1);
  stats_.requested_bytes[0].increase(bytes);
  stats_.allocated_bytes[0].increase(size);
  stats_.active_bytes[0].increase(size);
  return reinterpret_cast<void*>(block->first);
}

void Heap::free(void* address) {
  if (!address || isInBadFork()) {
    return;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = blocks_.find(reinterpret_cast<uintptr_t>(address));
  TORCH_INTERNAL_ASSERT(found != blocks_.end() && found->second.is_taken);
  Block& block = found->second;
  block.is_taken = false;
  stats_.allocation[0].decrease(1);
  stats_.requested_bytes[0].decrease(block.asked);
  stats_.allocated_bytes[0].decrease(block.size);
  for (int64_t user : block.users) {
    block.pending.push_back(device_.stream(user).record());
  }
  block.users.clear();
  if (block.pending.empty()) {
    cache(found);
  } else {
    pending_.push_back(found->first);
  }
}

void Heap::recordStream(void* address, int64_t stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = blocks_.find(reinterpret_cast<uintptr_t>(address));
  if (found != blocks_.end() && found->second.is_taken && found->second.stream != stream) {
    found->second.users.insert(stream);
  }
}

void Heap::emptyCache() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (seen_) {
    releaseCached();
  }
}

Heap::Blocks::iterator Heap::findCached(size_t size, int64_t stream) {
  auto& candidates = cached_[stream];
  auto best = candidates.lower_bound({size, 0});
  if (best == candidates.end()) {
    return blocks_.end();
  }
  auto block = blocks_.find(best->second);
  candidates.erase(best);
  return block;
}

Heap::Blocks::iterator Heap::growBy(size_t size, int64_t stream) {
  const size_t bytes = roundUp(size, settings().segment_bytes);
  if (reserved_bytes_ + bytes > limit_bytes_) {
    return blocks_.end();
  }
  const size_t page_aligned = roundUp(bytes, size_t(sysconf(_SC_PAGESIZE)));  // as pages are what it can give back
  auto hole = std::find_if(holes_.begin(), holes_.end(), [&](auto& one) { return one.second >= page_aligned; });
  if (hole == holes_.end()) {
    return blocks_.end();
  }
  const auto [address, hole_bytes] = *hole;
  holes_.erase(hole);
  if (hole_bytes > page_aligned) {
    holes_[address + page_aligned] = hole_bytes - page_aligned;
  }
  segments_[address] = bytes;
  reserved_bytes_ += bytes;
  stats_.segment[0].increase(1);
  stats_.reserved_bytes[0].increase(bytes);
  ++stats_.num_device_alloc;
  poison(address, bytes, stream);
  Block block;
  block.size = bytes;
  block.segment = address;
  block.stream = stream;
  return blocks_.emplace(address, std::move(block)).first;
}

void Heap::split(Blocks::iterator block, size_t size) {
  if (block->second.size < size + kBlockBytes) {
    return;
  }
  Block rest;
  rest.size = block->second.size - size;
  rest.segment = block->second.segment;
  rest.stream = block->second.stream;
  block->second.size = size;
  const uintptr_t address = block->first + size;
  cached_[rest.stream].insert({rest.size, address});
  blocks_.emplace(address, std::move(rest));
}

Heap::Blocks::iterator Heap::cache(Blocks::iterator block) {
  auto& mine = cached_[block->second.stream];
  stats_.active[0].decrease(1);
  stats_.active_bytes[0].decrease(block->second.size);
  poison(block->first, block->second.size, block->second.stream);
  const auto merges = [&](Blocks::iterator one) {
    return isFree(one) && one->second.segment == block->second.segment &&
           mine.erase({one->second.size, one->first}) > 0;
  };
  if (auto next = std::next(block); next != blocks_.end() && merges(next)) {
    block->second.size += next->second.size;
    blocks_.erase(next);
  }
  if (block != blocks_.begin()) {
    if (auto previous = std::prev(block); merges(previous)) {
      previous->second.size += block->second.size;
      blocks_.erase(block);
      block = previous;
    }
  }
  mine.insert({block->second.size, block->first});
  return block;
}

void Heap::cachePending(bool wait) {
  std::vector<uintptr_t> left;
  for (uintptr_t address : pending_) {
    auto block = blocks_.find(address);
    auto& moments = block->second.pending;
    const bool is_over = std::all_of(moments.begin(), moments.end(), [wait](const MomentPtr& moment) {
      if (wait) {
        moment->wait();
      }
      return moment->isReached();
    });
    if (is_over) {
      moments.clear();
      cache(block);
    } else {
      left.push_back(address);
    }
  }
  pending_.swap(left);
}

// Gives segments without a taken block back. A driver waits for the device before it unmaps.
void Heap::releaseCached() {
  ++stats_.num_sync_all_streams;
  cachePending(/*wait=*/true);
  device_.count(Counter::waits);
  for (Stream* stream : device_.usedStreams()) {
    if (!stream->isIdle()) {
      stream->record()->wait();
    }
  }
  for (auto segment = segments_.begin(); segment != segments_.end();) {
    const auto [address, bytes] = *segment;
    auto block = blocks_.find(address);
    if (!isFree(block) || block->second.size != bytes) {
      ++segment;
      continue;
    }
    cached_[block->second.stream].erase({bytes, address});
    blocks_.erase(block);
    segment = segments_.erase(segment);
    reserved_bytes_ -= bytes;
    stats_.segment[0].decrease(1);
    stats_.reserved_bytes[0].decrease(bytes);
    ++stats_.num_device_free;
    const size_t page_aligned = roundUp(bytes, size_t(sysconf(_SC_PAGESIZE)));
    madvise(real(reinterpret_cast<void*>(address)), page_aligned, MADV_REMOVE);
    auto hole = holes_.emplace(address, page_aligned).first;
    if (auto next = std::next(hole); next != holes_.end() && hole->first + hole->second == next->first) {
      hole->second += next->second;
      holes_.erase(next);
    }
    if (hole != holes_.begin()) {
      if (auto previous = std::prev(hole); previous->first + previous->second == hole->first) {
        previous->second += hole->second;
        holes_.erase(hole);
      }
    }
  }
}

// In the order of the block's stream: what that stream was given before may still use it, what comes after finds NaN.
void Heap::poison(uintptr_t address, size_t bytes, int64_t stream) {
  if (!settings().poison || !settings().computing) {
    return;
  }
  Work work;
  char* target = real(reinterpret_cast<void*>(address));
  work.run = [target, bytes] { std::memset(target, 0xff, bytes); };
  device_.stream(stream).enqueue(std::move(work));
}

c10::CachingDeviceAllocator::DeviceStats Heap::stats() {
  std::lock_guard<std::mutex> lock(mutex_);
  return stats_;
}

void Heap::resetPeaks() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto* stat : {&stats_.allocation, &stats_.segment, &stats_.active, &stats_.allocated_bytes,
                     &stats_.reserved_bytes, &stats_.active_bytes, &stats_.requested_bytes}) {
    (*stat)[0].reset_peak();
  }
}

void Heap::resetAccumulated() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto* stat : {&stats_.allocation, &stats_.segment, &stats_.active, &stats_.allocated_bytes,
                     &stats_.reserved_bytes, &stats_.active_bytes, &stats_.requested_bytes}) {
    (*stat)[0].reset_accumulated();
  }
  stats_.num_alloc_retries = stats_.num_ooms = stats_.num_sync_all_streams = 0;
  stats_.num_device_alloc = stats_.num_device_free = 0;
}

}  // namespace sim
