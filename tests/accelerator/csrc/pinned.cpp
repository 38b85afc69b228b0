#include "pinned.h"

#include "device.h"

#include <c10/util/Exception.h>

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

namespace sim {

namespace {

constexpr int kOutOfMemory = 2;  // CUDA's number

struct Registry {
  std::mutex mutex;
  std::map<uintptr_t, std::shared_ptr<PinnedRange>> ranges;
  int64_t num_registered = 0;
  int64_t registered_bytes = 0;
  int64_t allocated_bytes = 0;

  // Whether the driver pins so many more bytes. SIM_PIN_MIB is all it pins, as in WSL; without it there is no end.
  bool hasRoom(size_t bytes) const {
    static const char* told = std::getenv("SIM_PIN_MIB");
    static const int64_t most = told ? std::atoll(told) << 20 : INT64_MAX;
    return registered_bytes + allocated_bytes + int64_t(bytes) <= most;
  }

  // The range that holds any byte of these, the first if there are several.
  std::shared_ptr<PinnedRange> touching(uintptr_t begin, uintptr_t end) const {
    auto next = ranges.upper_bound(begin);
    if (next != ranges.begin() && std::prev(next)->second->end() > begin) {
      return std::prev(next)->second;
    }
    return next != ranges.end() && next->first < end ? next->second : nullptr;
  }
};

Registry& registry() {
  static auto* one = new Registry;
  return *one;
}

size_t pageBytes() {
  static const size_t bytes = size_t(sysconf(_SC_PAGESIZE));
  return bytes;
}

// To have the pages of ordinary memory at a second place, they are replaced by those of a file in memory with the same
// contents, which is mapped at both. That goes for whole pages: the rest of the first and of the last may be anybody's,
// and are used where they are. (The memory stays a shared mapping when it is unregistered: a child made by fork writes
// to it too.)
class RegisteredRange final : public PinnedRange {
 public:
  RegisteredRange(uintptr_t begin, size_t bytes) : PinnedRange(begin, bytes) {
    const size_t page = pageBytes();
    first_page_ = (begin + page - 1) / page * page;
    last_page_ = std::max(first_page_, (begin + bytes) / page * page);
    if (last_page_ > first_page_) {
      replacePages(last_page_ - first_page_);
    }
  }

  ~RegisteredRange() override {
    if (pages_) {
      munmap(pages_, last_page_ - first_page_);
    }
  }

  void read(void* target, uintptr_t address, size_t bytes) const override {
    forPieces(address, bytes, [target](char* place, size_t offset, size_t number) {
      std::memcpy(static_cast<char*>(target) + offset, place, number);
    });
  }

  void write(uintptr_t address, const void* source, size_t bytes) const override {
    forPieces(address, bytes, [source](char* place, size_t offset, size_t number) {
      std::memcpy(place, static_cast<const char*>(source) + offset, number);
    });
  }

 private:
  void replacePages(size_t bytes) {
    const int file = memfd_create("pinned", MFD_CLOEXEC);
    TORCH_CHECK(file >= 0 && ftruncate(file, off_t(bytes)) == 0, "no memory to pin");
    void* pages = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    TORCH_CHECK(pages != MAP_FAILED, "no addresses to pin");
    pages_ = static_cast<char*>(pages);
    static const std::vector<char> zeros(pageBytes());
    auto* old = reinterpret_cast<const char*>(first_page_);
    for (size_t at = 0; at < bytes; at += pageBytes()) {
      if (std::memcmp(old + at, zeros.data(), pageBytes()) != 0) {  // zero pages need not become resident
        std::memcpy(pages_ + at, old + at, pageBytes());
      }
    }
    void* place = reinterpret_cast<void*>(first_page_);
    TORCH_CHECK(mmap(place, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) == place, "cannot pin");
    close(file);
  }

  template <typename Function>
  void forPieces(uintptr_t address, size_t bytes, Function&& function) const {
    const uintptr_t end = address + bytes;
    for (uintptr_t at = address; at < end;) {
      uintptr_t next = end;
      char* place = reinterpret_cast<char*>(at);
      if (at < first_page_) {
        next = std::min(end, first_page_);
      } else if (at < last_page_) {
        next = std::min(end, last_page_);
        place = pages_ + (at - first_page_);
      }
      function(place, at - address, next - at);
      at = next;
    }
  }

  uintptr_t first_page_, last_page_;
  char* pages_ = nullptr;
};

// A block of torch's pinned allocator, which keeps it for ever: its addresses always mean the same pages.
class AllocatedRange final : public PinnedRange {
 public:
  AllocatedRange(void* begin, size_t bytes) : PinnedRange(reinterpret_cast<uintptr_t>(begin), bytes) {}
  void read(void* target, uintptr_t address, size_t bytes) const override {
    std::memcpy(target, reinterpret_cast<const void*>(address), bytes);
  }
  void write(uintptr_t address, const void* source, size_t bytes) const override {
    std::memcpy(reinterpret_cast<void*>(address), source, bytes);
  }
  void use(Stream& stream) override {
    auto moment = stream.record();
    std::lock_guard<std::mutex> lock(mutex_);
    uses_.push_back(std::move(moment));
  }
  bool isIdle() {
    std::lock_guard<std::mutex> lock(mutex_);
    while (!uses_.empty() && uses_.back()->isReached()) {
      uses_.pop_back();
    }
    return uses_.empty();
  }

 private:
  std::mutex mutex_;
  std::vector<MomentPtr> uses_;
};

// Blocks of powers of two, as torch.cuda's, that are used again once no copy is under way.
class PinnedAllocator final : public at::HostAllocator {
 public:
  at::DataPtr allocate(size_t bytes) override {
    if (!bytes) {
      return {nullptr, nullptr, &drop, at::Device(at::kCPU)};
    }
    device(-1).touch();
    size_t size = pageBytes();
    while (size < bytes) {
      size *= 2;
    }
    std::lock_guard<std::mutex> lock(mutex_);
    auto& free = free_[size];
    auto found = std::find_if(free.begin(), free.end(), [](auto& range) { return range->isIdle(); });
    std::shared_ptr<AllocatedRange> range;
    if (found != free.end()) {
      range = *found;
      free.erase(found);
    } else {
      auto& all = registry();
      std::lock_guard<std::mutex> registry_lock(all.mutex);
      if (!all.hasRoom(size)) {
        throw c10::AcceleratorError({__func__, __FILE__, uint32_t(__LINE__)}, kOutOfMemory,
                                    "simulated accelerator error: out of memory to pin");
      }
      void* made = nullptr;
      TORCH_CHECK(posix_memalign(&made, pageBytes(), size) == 0, "no memory for ", size, " pinned bytes");
      range = std::make_shared<AllocatedRange>(made, size);
      all.ranges[range->begin()] = range;
      all.allocated_bytes += int64_t(size);
      stats_.allocated_bytes.increase(size);
    }
    void* address = reinterpret_cast<void*>(range->begin());
    taken_[address] = range;
    stats_.active_bytes.increase(size);
    return {address, address, &drop, at::Device(at::kCPU)};
  }

  at::DeleterFnPtr raw_deleter() const override { return &drop; }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    std::memcpy(target, source, bytes);
  }
  bool record_event(void* address, void*, c10::Stream stream) override {
    auto range = findPinned(address, 1);
    if (range) {
      range->use(streamOf(stream));
    }
    return range != nullptr;
  }
  void empty_cache() override {}
  at::HostStats get_stats() override {
    std::lock_guard<std::mutex> lock(mutex_);
    return stats_;
  }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

 private:
  static void drop(void* address);

  void giveBack(void* address) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = taken_.find(address);
    if (found != taken_.end()) {
      const size_t size = found->second->end() - found->second->begin();
      stats_.active_bytes.decrease(size);
      free_[size].push_back(std::move(found->second));
      taken_.erase(found);
    }
  }

  std::mutex mutex_;
  std::map<void*, std::shared_ptr<AllocatedRange>> taken_;
  std::map<size_t, std::vector<std::shared_ptr<AllocatedRange>>> free_;
  at::HostStats stats_;
};

PinnedAllocator& pinnedAllocator() {
  static auto* one = new PinnedAllocator;
  return *one;
}

void PinnedAllocator::drop(void* address) { pinnedAllocator().giveBack(address); }

bool isMapped(uintptr_t address, size_t bytes) {
  const uintptr_t first = address / pageBytes() * pageBytes();
  return msync(reinterpret_cast<void*>(first), address + bytes - first, MS_ASYNC) == 0;
}

}  // namespace

int registerHost(uintptr_t address, size_t bytes) {
  device(-1).touch();
  if (!address || !bytes || !isMapped(address, bytes)) {
    return latchError(kInvalidValue);
  }
  auto& all = registry();
  std::lock_guard<std::mutex> lock(all.mutex);
  if (all.touching(address, address + bytes)) {
    return latchError(kAlreadyRegistered);
  }
  if (!all.hasRoom(bytes)) {
    return latchError(kOutOfMemory);
  }
  all.ranges[address] = std::make_shared<RegisteredRange>(address, bytes);
  ++all.num_registered;
  all.registered_bytes += int64_t(bytes);
  return 0;
}

int unregisterHost(uintptr_t address) {
  device(-1).touch();
  auto& all = registry();
  std::lock_guard<std::mutex> lock(all.mutex);
  auto found = all.ranges.find(address);
  if (found == all.ranges.end() || !dynamic_cast<RegisteredRange*>(found->second.get())) {
    return latchError(kNotRegistered);
  }
  --all.num_registered;
  all.registered_bytes -= int64_t(found->second->end() - found->second->begin());
  all.ranges.erase(found);  // its pages stay as long as a copy under way needs them
  return 0;
}

int64_t registeredRanges() {
  std::lock_guard<std::mutex> lock(registry().mutex);
  return registry().num_registered;
}

int64_t registeredBytes() {
  std::lock_guard<std::mutex> lock(registry().mutex);
  return registry().registered_bytes;
}

std::shared_ptr<PinnedRange> findPinned(const void* address, size_t bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(address);
  std::lock_guard<std::mutex> lock(registry().mutex);
  auto range = registry().touching(begin, begin + bytes);
  TORCH_CHECK(!range || (range->begin() <= begin && begin + bytes <= range->end()),
              "simulated accelerator error: invalid argument: of the ", bytes,
              " bytes of host memory that a copy is for, some are registered, and not all of them in one range");
  return range;
}

bool isPinned(const void* address) {
  const auto begin = reinterpret_cast<uintptr_t>(address);
  std::lock_guard<std::mutex> lock(registry().mutex);
  return registry().touching(begin, begin + 1) != nullptr;
}

at::HostAllocator& hostAllocator() { return pinnedAllocator(); }

}  // namespace sim
