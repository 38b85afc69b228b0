// Reads and writes of files that go on while the caller does something else. Two engines, one interface: io_uring, and
// threads that call pread and pwrite for where the kernel or a sandbox refuses io_uring.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace offload {

struct IoOptions {
  int depth;            // how many blocks are with the kernel at once
  int64_t block_bytes;  // a request is cut into blocks of this size
};

constexpr int kEndOfFile = -1;

// How a request ended; where it failed, the block that failed first, and how much of that block was moved.
struct IoResult {
  int error = 0;  // 0, an errno, or kEndOfFile for a read beyond the end of the file
  int64_t offset = 0;
  int64_t bytes = 0;
  int64_t moved = 0;
};

// One read or write. Only its engine looks inside, under the engine's mutex.
struct IoRequest {
  bool is_write;
  int fd;
  int64_t offset;
  char* address;
  int64_t bytes;
  int64_t dealt = 0;   // bytes handed out as blocks
  int num_blocks = 0;  // handed out and not yet finished
  bool is_done = false;
  IoResult result = {};
};

struct IoBlock {
  std::shared_ptr<IoRequest> request;
  int64_t offset;  // in the file
  char* address;
  int64_t bytes;
  int64_t moved = 0;   // bytes known to be moved
  int64_t resume = 0;  // where the next system call begins: `moved`, or the alignment boundary below it

  // What is to be done after a system call for [resume, bytes) returned `result`: bytes, or a negative errno.
  enum class Next { retry, retry_later, finish };
  Next advance(int64_t result, int* error);
};

// All calls are safe from any thread. Requests that overlap in the file or in memory are in no order: wait in between.
// Memory and file descriptor of a request belong to the engine until the request is done.
class IoEngine {
 public:
  explicit IoEngine(IoOptions options) : options_(options) {}
  IoEngine(const IoEngine&) = delete;
  virtual ~IoEngine() = default;  // derived destructors call close()

  std::shared_ptr<IoRequest> submit(bool is_write, int fd, int64_t offset, void* address, int64_t bytes);
  IoResult wait(const IoRequest& request);  // sleeps; any number of times, from any number of threads
  bool is_done(const IoRequest& request);

  // Optional, and only for speed. A file is taken out again before its descriptor is closed; memory stays registered,
  // and must stay mapped, until close(). Returns 0 or an errno; *registered_bytes is how much of the memory was taken.
  virtual int add_file(int) { return 0; }
  virtual void remove_file(int) {}
  virtual int add_memory(void*, int64_t, int64_t* registered_bytes) { return *registered_bytes = 0; }

  // Everything submitted is carried out first. What is submitted later fails with ESHUTDOWN.
  virtual void close() = 0;

 protected:
  // Starts up to `num_threads` of run(); 0, or an errno where not one could be started.
  int start(int num_threads);
  void drain_and_join();
  bool is_forked() const;  // a fork's child has none of the threads and perhaps a locked mutex: it only forgets

  virtual void run() = 0;                  // until is_closing_ and no block is left
  virtual void wake(int num_blocks) = 0;   // under mutex_: there is more to do, or is_closing_ was set
  bool take(IoBlock* block);               // under mutex_: false when nothing waits
  void finish(IoBlock* block, int error);  // under mutex_
  bool take_news();                        // under mutex_: whether requests are done since; then tell() who waits
  void tell() { done_.notify_all(); }      // not under mutex_, which whoever wakes up needs at once

  const IoOptions options_;
  std::mutex mutex_;  // guards requests and everything below
  bool is_closing_ = false;

 private:
  bool has_news_ = false;  // a request is done and those who wait have not been told
  std::deque<std::shared_ptr<IoRequest>> waiting_[2];  // reads, writes: they take turns
  bool turn_ = false;
  std::condition_variable done_;
  std::vector<std::thread> threads_;
  int process_ = 0;
};

// Null with *error set where the system refuses.
std::unique_ptr<IoEngine> make_io_uring(IoOptions options, int* error);
std::unique_ptr<IoEngine> make_io_threads(IoOptions options, int* error);

}  // namespace offload
