// The I/O engines for the sanitizers: many requests from several threads, failures, and closing while requests are under way.
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <unistd.h>

#include "io_engine.h"

using namespace offload;

namespace {

using Make = std::unique_ptr<IoEngine> (*)(IoOptions, int*);
using Next = IoBlock::Next;

void require(bool condition, const char* what, const char* engine) {
  if (condition) return;
  std::fprintf(stderr, "I/O engine %s: %s\n", engine, what);
  std::exit(1);
}

// What one block does with what system calls return, in order: short transfers, interruptions, the end of a file.
void check_advance() {
  auto request = std::make_shared<IoRequest>(IoRequest{false, 0, 0, nullptr, 0});
  int error = 0;
  const auto step = [&](IoBlock* block, int64_t result, Next next, int64_t resume, int expected) {
    require(block->advance(result, &error) == next && block->resume == resume && error == expected, "advance", "-");
  };
  IoBlock block{request, 0, nullptr, 16384};
  step(&block, -EINTR, Next::retry, 0, 0);
  step(&block, -EAGAIN, Next::retry_later, 0, 0);
  step(&block, 5000, Next::retry, 5000, 0);
  step(&block, -EINVAL, Next::retry, 4096, 0);        // O_DIRECT does not go on at 5000: once more from the boundary
  step(&block, 8192, Next::retry, 12288, 0);
  step(&block, 4096, Next::finish, 12288, 0);
  IoBlock ended{request, 0, nullptr, 16384};
  step(&ended, 5000, Next::retry, 5000, 0);
  step(&ended, -EINVAL, Next::retry, 4096, 0);
  step(&ended, 904, Next::finish, 4096, kEndOfFile);  // nothing beyond 5000
  IoBlock refused{request, 0, nullptr, 16384};
  step(&refused, -EINVAL, Next::finish, 0, EINVAL);
  request->is_write = true;
  IoBlock stuck{request, 0, nullptr, 16384};
  step(&stuck, 0, Next::finish, 0, EIO);
}

std::FILE* file_of(size_t bytes) {
  std::FILE* file = std::tmpfile();
  if (file == nullptr || ftruncate(fileno(file), static_cast<off_t>(bytes)) != 0) std::exit(1);
  return file;
}

// Each thread has a part of the file for itself, writes it in pieces of any size, reads it back and compares.
void check_traffic(Make make, const char* name, bool register_all) {
  constexpr size_t kPart = 300'000;
  constexpr int kParts = 3;
  int error = 0;
  std::FILE* file = file_of(kPart * kParts);
  const int fd = fileno(file);
  {
    auto engine = make({5, 4096}, &error);
    std::vector<char> out(kPart * kParts), back(kPart * kParts);
    for (size_t i = 0; i < out.size(); ++i) out[i] = static_cast<char>(i * 31 + i / 251);
    if (register_all) {
      int64_t registered = 0;
      engine->add_file(fd);
      engine->add_memory(out.data(), static_cast<int64_t>(out.size()), &registered);
      engine->add_memory(back.data(), static_cast<int64_t>(back.size()), &registered);
    }
    const auto move = [&](bool is_write, std::vector<char>* memory, size_t begin) {
      std::vector<std::shared_ptr<IoRequest>> requests;
      for (size_t at = begin, size = 1; at < begin + kPart; at += size, size = size * 7 % 40'009) {
        size = std::min(size, begin + kPart - at);
        requests.push_back(engine->submit(is_write, fd, static_cast<int64_t>(at), memory->data() + at,
                                          static_cast<int64_t>(size)));
      }
      for (const auto& request : requests) require(engine->wait(*request).error == 0, "a request failed", name);
    };
    std::vector<std::thread> callers;
    for (int part = 0; part < kParts; ++part) {
      callers.emplace_back([&, part] {
        move(true, &out, part * kPart);
        move(false, &back, part * kPart);
      });
    }
    for (auto& caller : callers) caller.join();
    require(std::memcmp(out.data(), back.data(), out.size()) == 0, "what was read differs from what was written", name);
    engine->remove_file(fd);
    engine->close();
    require(engine->wait(*engine->submit(true, fd, 0, out.data(), 1)).error == ESHUTDOWN, "a closed engine works", name);
  }
  std::fclose(file);
}

void check_failures(Make make, const char* name) {
  int error = 0;
  std::FILE* file = file_of(10'000);
  const int read_only = open("/dev/zero", O_RDONLY);
  {
    auto engine = make({4, 4096}, &error);
    std::vector<char> memory(20'000, 1);
    const auto beyond = engine->submit(false, fileno(file), 0, memory.data(), 20'000);
    const auto refused = engine->submit(true, read_only, 0, memory.data(), 20'000);
    const IoResult result = engine->wait(*beyond);
    require(result.error == kEndOfFile && result.offset >= 8192, "the end of the file is not noticed", name);
    require(engine->wait(*refused).error == EBADF, "a write to a read-only file is not refused", name);
    require(engine->wait(*engine->submit(false, fileno(file), 0, memory.data(), 10'000)).error == 0,
            "a failure of one request harms the next", name);
  }
  close(read_only);
  std::fclose(file);
}

void check_close(Make make, const char* name) {
  int error = 0;
  std::FILE* file = file_of(0);
  std::vector<char> memory(1'000'000, 7), back(1'000'000);
  {
    auto engine = make({3, 4096}, &error);
    for (int i = 0; i < 4; ++i) engine->submit(true, fileno(file), i * 1'000'000, memory.data(), 1'000'000);
  }  // nobody waited
  require(pread(fileno(file), back.data(), back.size(), 3'000'000) == 1'000'000 && back == memory,
          "closing loses requests", name);
  std::fclose(file);
}

}  // namespace

void check_io_engines() {
  check_advance();
  const std::pair<const char*, Make> engines[] = {{"io_uring", make_io_uring}, {"threads", make_io_threads}};
  for (const auto& [name, make] : engines) {
    int error = 0;
    if (make({1, 4096}, &error) == nullptr) {
      std::printf("I/O engine %s left out: %s\n", name, std::strerror(error));
      continue;
    }
    for (const bool register_all : {false, true}) check_traffic(make, name, register_all);
    check_failures(make, name);
    check_close(make, name);
  }
  std::puts("the I/O engines agree");
}
