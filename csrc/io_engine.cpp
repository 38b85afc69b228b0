// Shared by both engines: requests, blocks and completion.
#include "io_engine.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

namespace offload {
namespace {

constexpr int64_t kAlignment = 4096;  // at least what O_DIRECT asks for on any device

}  // namespace

IoBlock::Next IoBlock::advance(int64_t result, int* error) {
  *error = 0;
  if (result == -EINTR) return Next::retry;
  if (result == -EAGAIN) return Next::retry_later;
  if (result == -EINVAL && resume % kAlignment != 0) {
    resume -= resume % kAlignment;  // O_DIRECT after a short transfer: move the last few bytes once more
    return Next::retry;
  }
  if (result < 0) {
    *error = static_cast<int>(-result);
    return Next::finish;
  }
  if (resume + result >= bytes) {
    moved = bytes;
    return Next::finish;
  }
  if (resume + result <= moved) {  // nothing new: the end of the file, or of what a device takes
    *error = request->is_write ? EIO : kEndOfFile;
    return Next::finish;
  }
  moved = resume = resume + result;
  return Next::retry;
}

std::shared_ptr<IoRequest> IoEngine::submit(bool is_write, int fd, int64_t offset, void* address, int64_t bytes) {
  auto request = std::make_shared<IoRequest>(IoRequest{is_write, fd, offset, static_cast<char*>(address), bytes});
  std::lock_guard<std::mutex> lock(mutex_);
  if (is_closing_ || bytes <= 0) {
    request->is_done = true;
    if (is_closing_) request->result = {ESHUTDOWN, offset, bytes, 0};
    return request;
  }
  waiting_[is_write].push_back(request);
  wake(static_cast<int>(std::min<int64_t>((bytes + options_.block_bytes - 1) / options_.block_bytes, options_.depth)));
  return request;
}

IoResult IoEngine::wait(const IoRequest& request) {
  std::unique_lock<std::mutex> lock(mutex_);
  done_.wait(lock, [&] { return request.is_done; });
  return request.result;
}

bool IoEngine::is_done(const IoRequest& request) {
  std::lock_guard<std::mutex> lock(mutex_);
  return request.is_done;
}

bool IoEngine::take(IoBlock* block) {
  turn_ = !turn_;
  if (waiting_[turn_].empty()) turn_ = !turn_;
  auto& queue = waiting_[turn_];
  if (queue.empty()) return false;
  const std::shared_ptr<IoRequest> request = queue.front();
  const int64_t bytes = std::min(options_.block_bytes, request->bytes - request->dealt);
  *block = {request, request->offset + request->dealt, request->address + request->dealt, bytes};
  request->dealt += bytes;
  ++request->num_blocks;
  if (request->dealt == request->bytes) queue.pop_front();
  return true;
}

void IoEngine::finish(IoBlock* block, int error) {
  const std::shared_ptr<IoRequest> request = std::move(block->request);
  if (error != 0 && request->result.error == 0) {
    request->result = {error, block->offset, block->bytes, block->moved};
    auto& queue = waiting_[request->is_write];
    queue.erase(std::remove(queue.begin(), queue.end(), request), queue.end());
    request->dealt = request->bytes;  // the rest is not begun
  }
  if (--request->num_blocks == 0 && request->dealt == request->bytes) {
    request->is_done = true;
    has_news_ = true;
  }
}

bool IoEngine::take_news() { return std::exchange(has_news_, false); }

int IoEngine::start(int num_threads) {
  process_ = getpid();
  // Signals are for the program's own threads: here they would only interrupt system calls.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  int error = 0;
  try {
    for (int i = 0; i < num_threads; ++i) threads_.emplace_back([this] { run(); });
  } catch (const std::system_error& refused) {
    if (threads_.empty()) error = refused.code().value();
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return error;
}

bool IoEngine::is_forked() const { return process_ != getpid(); }

void IoEngine::drain_and_join() {
  if (threads_.empty()) return;
  if (is_forked()) {
    new std::vector<std::thread>(std::move(threads_));  // they are not here to be joined
    threads_.clear();
    return;
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    is_closing_ = true;
    wake(options_.depth);
  }
  for (auto& thread : threads_) thread.join();
  threads_.clear();
}

}  // namespace offload
