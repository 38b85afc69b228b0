// One ring and one thread that owns it: it fills the submission queue, sleeps in io_uring_enter until something
// completes, and never spins. Whoever submits wakes it through an eventfd, which the ring itself reads.
#include <cerrno>

#include "io_engine.h"

#if defined(__linux__) && __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#include <sys/syscall.h>
#endif

#if defined(IORING_FEAT_FAST_POLL) && defined(__NR_io_uring_setup)

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>

namespace offload {
namespace {

constexpr unsigned kFileSlots = 64;                 // files beyond these work by their descriptor
constexpr unsigned kMemorySlots = 256;              // memory beyond these works by its address
constexpr int64_t kMostBytesPerSlot = 1ll << 30;    // the kernel's limit for one registered buffer
constexpr uint64_t kWake = ~uint64_t{0};            // user_data of the read of the eventfd
constexpr int kNoSlot = -1;

// The rings are shared with the kernel. Whoever produces entries writes them first and then releases the tail; whoever
// consumes acquires the tail, reads the entries, and then releases the head, after which they may be overwritten.
unsigned acquire(const unsigned* shared) { return __atomic_load_n(shared, __ATOMIC_ACQUIRE); }
void release(unsigned* shared, unsigned value) { __atomic_store_n(shared, value, __ATOMIC_RELEASE); }

class IoUring final : public IoEngine {
 public:
  explicit IoUring(IoOptions options)
      : IoEngine(options), blocks_(options.depth), slot_files_(kFileSlots, kNoSlot) {
    for (int i = options.depth - 1; i >= 0; --i) free_.push_back(i);
  }
  ~IoUring() override { IoUring::close(); }

  int begin();
  int add_file(int fd) override;
  void remove_file(int fd) override;
  int add_memory(void* address, int64_t bytes, int64_t* registered_bytes) override;
  void close() override;

 private:
  struct Memory {
    char* address;
    int64_t bytes;
  };

  int set_up();
  int map(const io_uring_params& params);
  void register_tables();
  int register_call(unsigned operation, void* argument, unsigned count) {
    return syscall(__NR_io_uring_register, ring_, operation, argument, count) < 0 ? errno : 0;
  }
  int set_file_slot(unsigned slot, int fd);

  void run() override;
  void wake(int num_blocks) override;
  io_uring_sqe* next_entry();
  void prepare(int index, bool may_sleep);
  void prepare_wake();
  int enter(unsigned num_wanted);
  void give_up(int error, std::unique_lock<std::mutex>* lock);
  void reap();

  int ring_ = -1, event_ = -1;
  void* rings_ = MAP_FAILED;
  void* entries_map_ = MAP_FAILED;
  size_t rings_bytes_ = 0, entries_bytes_ = 0;
  unsigned *sq_head_ = nullptr, *sq_tail_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
  unsigned sq_mask_ = 0, cq_mask_ = 0;
  unsigned tail_ = 0;  // of the submission queue, released to the kernel in enter()
  io_uring_sqe* entries_ = nullptr;
  io_uring_cqe* completions_ = nullptr;
  uint64_t wake_count_ = 0;  // where the kernel puts what it reads from the eventfd

  // Guarded by mutex_.
  std::vector<IoBlock> blocks_;  // with the kernel, by user_data
  std::vector<int> free_;        // indices of unused blocks
  std::vector<int> slot_files_;
  std::vector<Memory> slot_memory_;
  bool has_file_slots_ = false, has_memory_slots_ = false;
  bool is_asleep_ = false;   // in the kernel, with room for more blocks: a submitter has to wake it
  bool is_armed_ = false;    // the read of the eventfd is with the kernel
  int begun_ = -1;           // the errno of the first io_uring_enter, or 0; written by run() alone
  std::condition_variable has_begun_;
};

int IoUring::begin() {
  if (const int error = set_up()) return error;
  if (const int error = start(1)) return error;
  // A sandbox may allow io_uring_setup and refuse io_uring_enter: whether this works is known after the first one.
  std::unique_lock<std::mutex> lock(mutex_);
  has_begun_.wait(lock, [this] { return begun_ >= 0; });
  return begun_;
}

int IoUring::set_up() {
  event_ = eventfd(0, EFD_CLOEXEC);  // blocking: io_uring fails a read of a non-blocking one instead of waiting
  if (event_ < 0) return errno;
  io_uring_params params;
  std::memset(&params, 0, sizeof params);
  params.flags = IORING_SETUP_CLAMP;
  // One entry more for the eventfd. The completion queue has twice as many, so it cannot overflow.
  ring_ = static_cast<int>(syscall(__NR_io_uring_setup, options_.depth + 1, &params));
  if (ring_ < 0) return errno;
  const unsigned needed = IORING_FEAT_SINGLE_MMAP | IORING_FEAT_NODROP | IORING_FEAT_FAST_POLL;
  if ((params.features & needed) != needed) return ENOSYS;
  if (params.sq_entries < static_cast<unsigned>(options_.depth) + 1) return EINVAL;
  if (const int error = map(params)) return error;
  register_tables();
  return 0;
}

int IoUring::map(const io_uring_params& params) {
  rings_bytes_ = std::max<size_t>(params.sq_off.array + params.sq_entries * sizeof(unsigned),
                                  params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe));
  entries_bytes_ = params.sq_entries * sizeof(io_uring_sqe);
  const int protection = PROT_READ | PROT_WRITE, flags = MAP_SHARED | MAP_POPULATE;
  rings_ = mmap(nullptr, rings_bytes_, protection, flags, ring_, IORING_OFF_SQ_RING);
  if (rings_ == MAP_FAILED) return errno;
  entries_map_ = mmap(nullptr, entries_bytes_, protection, flags, ring_, IORING_OFF_SQES);
  if (entries_map_ == MAP_FAILED) return errno;
  char* const base = static_cast<char*>(rings_);
  const auto field = [base](unsigned offset) { return reinterpret_cast<unsigned*>(base + offset); };
  sq_head_ = field(params.sq_off.head), sq_tail_ = field(params.sq_off.tail);
  cq_head_ = field(params.cq_off.head), cq_tail_ = field(params.cq_off.tail);
  sq_mask_ = *field(params.sq_off.ring_mask), cq_mask_ = *field(params.cq_off.ring_mask);
  completions_ = reinterpret_cast<io_uring_cqe*>(base + params.cq_off.cqes);
  entries_ = static_cast<io_uring_sqe*>(entries_map_);
  for (unsigned i = 0; i < params.sq_entries; ++i) field(params.sq_off.array)[i] = i;  // entries are used in order
  return 0;
}

// Empty tables, filled slot by slot later: changing a slot does not wait for what is in flight.
void IoUring::register_tables() {
  std::vector<int> empty(kFileSlots, -1);
  has_file_slots_ = register_call(IORING_REGISTER_FILES, empty.data(), kFileSlots) == 0;
#ifdef IORING_RSRC_REGISTER_SPARSE
  io_uring_rsrc_register table;
  std::memset(&table, 0, sizeof table);
  table.nr = kMemorySlots;
  table.flags = IORING_RSRC_REGISTER_SPARSE;
  has_memory_slots_ = register_call(IORING_REGISTER_BUFFERS2, &table, sizeof table) == 0;
#endif
}

int IoUring::set_file_slot(unsigned slot, int fd) {
  io_uring_files_update update;
  std::memset(&update, 0, sizeof update);
  update.offset = slot;
  update.fds = reinterpret_cast<uintptr_t>(&fd);
  return register_call(IORING_REGISTER_FILES_UPDATE, &update, 1);
}

int IoUring::add_file(int fd) {
  if (is_forked()) return ENOTSUP;  // the ring is the parent's
  std::lock_guard<std::mutex> lock(mutex_);
  const auto slot = std::find(slot_files_.begin(), slot_files_.end(), kNoSlot);
  if (!has_file_slots_ || is_closing_ || slot == slot_files_.end()) return ENOTSUP;
  if (const int error = set_file_slot(static_cast<unsigned>(slot - slot_files_.begin()), fd)) return error;
  *slot = fd;
  return 0;
}

void IoUring::remove_file(int fd) {
  if (is_forked()) return;
  std::lock_guard<std::mutex> lock(mutex_);
  const auto slot = std::find(slot_files_.begin(), slot_files_.end(), fd);
  if (fd < 0 || is_closing_ || slot == slot_files_.end()) return;
  set_file_slot(static_cast<unsigned>(slot - slot_files_.begin()), -1);
  *slot = kNoSlot;
}

int IoUring::add_memory(void* address, int64_t bytes, int64_t* registered_bytes) {
  *registered_bytes = 0;
  if (is_forked()) return ENOTSUP;
#ifdef IORING_RSRC_REGISTER_SPARSE
  while (*registered_bytes < bytes) {
    char* const from = static_cast<char*>(address) + *registered_bytes;
    const int64_t size = std::min(bytes - *registered_bytes, kMostBytesPerSlot);
    // Slow where pages are not there yet: the ring's thread gets its turn between two pieces.
    std::lock_guard<std::mutex> lock(mutex_);
    if (!has_memory_slots_ || is_closing_ || slot_memory_.size() == kMemorySlots) return ENOTSUP;
    iovec memory{from, static_cast<size_t>(size)};
    io_uring_rsrc_update2 update;
    std::memset(&update, 0, sizeof update);
    update.offset = static_cast<unsigned>(slot_memory_.size());
    update.data = reinterpret_cast<uintptr_t>(&memory);
    update.nr = 1;
    if (const int error = register_call(IORING_REGISTER_BUFFERS_UPDATE, &update, sizeof update)) return error;
    slot_memory_.push_back({from, size});
    *registered_bytes += size;
  }
  return 0;
#else
  (void)address, (void)bytes;
  return ENOTSUP;
#endif
}

void IoUring::close() {
  if (ring_ < 0 && event_ < 0) return;
  drain_and_join();
  if (!is_forked()) {  // closing a ring lets go of files and pages some time later; taking them out first does it now
    if (has_file_slots_) register_call(IORING_UNREGISTER_FILES, nullptr, 0);
    if (has_memory_slots_) register_call(IORING_UNREGISTER_BUFFERS, nullptr, 0);
  }
  if (entries_map_ != MAP_FAILED) munmap(entries_map_, entries_bytes_);
  if (rings_ != MAP_FAILED) munmap(rings_, rings_bytes_);
  if (ring_ >= 0) ::close(ring_);
  if (event_ >= 0) ::close(event_);
  ring_ = event_ = -1;
}

void IoUring::wake(int) {
  if (!is_asleep_ && !is_closing_) return;  // it looks for more by itself before it sleeps
  is_asleep_ = false;
  const uint64_t one = 1;
  while (write(event_, &one, sizeof one) < 0 && errno == EINTR) {
  }
}

void IoUring::run() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    while (!free_.empty() && take(&blocks_[free_.back()])) {
      prepare(free_.back(), false);
      free_.pop_back();
    }
    const bool is_idle = free_.size() == blocks_.size();
    if (is_closing_ && is_idle && !is_armed_) break;  // close() wrote to the eventfd, so its last read has ended
    if (!is_armed_ && !is_closing_) prepare_wake();
    is_asleep_ = !free_.empty();
    const bool has_news = take_news();
    lock.unlock();
    int error = 0;
    if (has_news || begun_ < 0) error = enter(0);  // the kernel gets its work before others wake up and want the CPU
    if (has_news) tell();
    if (error == 0 && begun_ == 0) error = enter(1);
    lock.lock();
    is_asleep_ = false;
    if (begun_ < 0) {
      begun_ = error;
      has_begun_.notify_all();
      if (error != 0) return;
    }
    if (error != 0) give_up(error, &lock);
    reap();
  }
  lock.unlock();
  tell();
}

io_uring_sqe* IoUring::next_entry() {  // there is room: no more than depth + 1 are ever under way
  io_uring_sqe* const entry = &entries_[tail_++ & sq_mask_];
  std::memset(entry, 0, sizeof *entry);
  return entry;
}

void IoUring::prepare(int index, bool may_sleep) {
  const IoBlock& block = blocks_[index];
  const IoRequest& request = *block.request;
  io_uring_sqe* const entry = next_entry();
  entry->opcode = request.is_write ? IORING_OP_WRITE : IORING_OP_READ;
  entry->fd = request.fd;
  entry->off = static_cast<uint64_t>(block.offset + block.resume);
  entry->addr = reinterpret_cast<uintptr_t>(block.address + block.resume);
  entry->len = static_cast<unsigned>(block.bytes - block.resume);
  entry->user_data = static_cast<uint64_t>(index);
  if (may_sleep) entry->flags |= IOSQE_ASYNC;
  const auto file = std::find(slot_files_.begin(), slot_files_.end(), request.fd);
  if (file != slot_files_.end()) {
    entry->fd = static_cast<int>(file - slot_files_.begin());
    entry->flags |= IOSQE_FIXED_FILE;
  }
  for (size_t slot = 0; slot < slot_memory_.size(); ++slot) {
    const Memory& memory = slot_memory_[slot];
    if (block.address < memory.address || block.address + block.bytes > memory.address + memory.bytes) continue;
    entry->opcode = request.is_write ? IORING_OP_WRITE_FIXED : IORING_OP_READ_FIXED;
    entry->buf_index = static_cast<uint16_t>(slot);
    break;
  }
}

void IoUring::prepare_wake() {
  io_uring_sqe* const entry = next_entry();
  entry->opcode = IORING_OP_READ;
  entry->fd = event_;
  entry->addr = reinterpret_cast<uintptr_t>(&wake_count_);
  entry->len = sizeof wake_count_;
  entry->user_data = kWake;
  is_armed_ = true;
}

// Submits what was prepared and sleeps until so many have completed. Returns 0, or an errno that will not go away.
int IoUring::enter(unsigned num_wanted) {
  release(sq_tail_, tail_);
  for (;;) {
    const unsigned to_submit = tail_ - acquire(sq_head_);
    if (syscall(__NR_io_uring_enter, ring_, to_submit, num_wanted, IORING_ENTER_GETEVENTS, nullptr, 0) >= 0) return 0;
    if (acquire(cq_tail_) != *cq_head_) return 0;
    if (errno == EAGAIN || errno == EBUSY) std::this_thread::sleep_for(std::chrono::milliseconds(1));  // no memory now
    else if (errno != EINTR) return errno;
  }
}

// io_uring_enter was forbidden after the start. What the kernel has not taken fails; the rest completes by itself.
void IoUring::give_up(int error, std::unique_lock<std::mutex>* lock) {
  for (const unsigned head = acquire(sq_head_); tail_ != head; --tail_) {
    const uint64_t index = entries_[(tail_ - 1) & sq_mask_].user_data;
    if (index == kWake) {
      is_armed_ = false;
      continue;
    }
    finish(&blocks_[index], error);
    free_.push_back(static_cast<int>(index));
  }
  release(sq_tail_, tail_);
  if (is_closing_ && free_.size() == blocks_.size()) return;
  is_asleep_ = true;
  const nfds_t num_watched = is_armed_ ? 1 : 2;  // while the ring reads the eventfd, a read here would block
  lock->unlock();
  tell();
  pollfd either[] = {{ring_, POLLIN, 0}, {event_, POLLIN, 0}};
  poll(either, num_watched, -1);
  if (either[1].revents & POLLIN) {
    while (read(event_, &wake_count_, sizeof wake_count_) < 0 && errno == EINTR) {
    }
  }
  lock->lock();
  is_asleep_ = false;
}

void IoUring::reap() {
  unsigned head = *cq_head_;
  for (const unsigned tail = acquire(cq_tail_); head != tail; ++head) {
    const io_uring_cqe completion = completions_[head & cq_mask_];
    if (completion.user_data == kWake) {
      is_armed_ = false;
      continue;
    }
    const int index = static_cast<int>(completion.user_data);
    int error = 0;
    const IoBlock::Next next = blocks_[index].advance(completion.res, &error);
    if (next == IoBlock::Next::finish) {
      finish(&blocks_[index], error);
      free_.push_back(index);
    } else {
      prepare(index, next == IoBlock::Next::retry_later);  // then a kernel thread does it, which may wait for resources
    }
  }
  release(cq_head_, head);
}

}  // namespace

std::unique_ptr<IoEngine> make_io_uring(IoOptions options, int* error) {
  auto engine = std::make_unique<IoUring>(options);
  *error = engine->begin();
  if (*error != 0) return nullptr;
  return engine;
}

}  // namespace offload

#else

namespace offload {

std::unique_ptr<IoEngine> make_io_uring(IoOptions, int* error) {
  *error = ENOSYS;
  return nullptr;
}

}  // namespace offload

#endif
