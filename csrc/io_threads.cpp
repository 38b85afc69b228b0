// Threads that each move one block at a time with pread or pwrite.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>

#include "io_engine.h"

namespace offload {
namespace {

// More in flight than this gains nothing where each is a whole block, and every one costs a stack and a wake-up.
constexpr int kMostThreads = 16;

class IoThreads final : public IoEngine {
 public:
  using IoEngine::IoEngine;
  ~IoThreads() override { IoThreads::close(); }

  int begin() { return start(std::min(options_.depth, kMostThreads)); }
  void close() override { drain_and_join(); }

 private:
  void wake(int num_blocks) override {
    if (is_closing_) wanted_.notify_all();
    else for (int i = std::min(num_blocks, num_idle_); i > 0; --i) wanted_.notify_one();
  }

  void run() override {
    IoBlock block;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      while (!take(&block)) {
        if (is_closing_) return;
        ++num_idle_;
        wanted_.wait(lock);
        --num_idle_;
      }
      lock.unlock();
      const int error = move(&block);
      lock.lock();
      finish(&block, error);
      if (!take_news()) continue;
      lock.unlock();
      tell();
      lock.lock();
    }
  }

  static int move(IoBlock* block) {
    const IoRequest& request = *block->request;  // what is read here does not change after submit
    int error = 0;
    for (;;) {
      char* const address = block->address + block->resume;
      const size_t bytes = static_cast<size_t>(block->bytes - block->resume);
      const off_t offset = block->offset + block->resume;
      const ssize_t moved = request.is_write ? pwrite(request.fd, address, bytes, offset)
                                             : pread(request.fd, address, bytes, offset);
      const IoBlock::Next next = block->advance(moved < 0 ? -errno : moved, &error);
      if (next == IoBlock::Next::finish) return error;
      if (next == IoBlock::Next::retry_later) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

  std::condition_variable wanted_;
  int num_idle_ = 0;
};

}  // namespace

std::unique_ptr<IoEngine> make_io_threads(IoOptions options, int* error) {
  auto engine = std::make_unique<IoThreads>(options);
  *error = engine->begin();
  if (*error != 0) return nullptr;
  return engine;
}

}  // namespace offload
