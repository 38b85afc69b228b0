// What a GPU's compiler has by itself, for g++: one kernel runs with 16 lanes, each a fiber that goes through its threads
// of the whole grid, and lets the others go on where it waits for what they have.
#pragma once
#include <ucontext.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#define __global__
struct Index {
  uint32_t x;
};
inline thread_local Index blockIdx, blockDim, threadIdx;

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float __fsqrt_rn(float a) { return __builtin_sqrtf(a); }
inline void atomicAdd(unsigned long long* to, unsigned long long number) { __atomic_fetch_add(to, number, __ATOMIC_RELAXED); }

namespace played {

constexpr int kLanes = 16;

struct Warp {
  ucontext_t home, lanes[kLanes];
  int current = 0;
  int values[2][kLanes];  // by turns: who is next may write before the last one has read
  int turn[kLanes] = {};
  std::function<void(int)> run;
};
inline thread_local Warp* warp;

inline void go(int lane) {
  const int from = warp->current;
  const Index block = blockIdx, thread = threadIdx;
  warp->current = lane;
  swapcontext(&warp->lanes[from], &warp->lanes[lane]);
  blockIdx = block, threadIdx = thread;
}

inline void begin(int lane) {
  warp->run(lane);
  if (lane + 1 < kLanes) {
    warp->current = lane + 1;
    setcontext(&warp->lanes[lane + 1]);
  }
  setcontext(&warp->home);
}

template <class T>
T get(uint64_t slot) {
  T value;
  memcpy(&value, &slot, sizeof value);
  return value;
}

template <class... A, size_t... I>
void call(void (*kernel)(A...), const uint64_t* slots, std::index_sequence<I...>) {
  kernel(get<A>(slots[I])...);
}

template <class... A>
void launch(void (*kernel)(A...), const uint64_t* slots, int64_t grid, int64_t block) {
  Warp here;
  std::vector<char> stacks(kLanes * 65536);
  here.run = [&](int lane) {
    blockDim.x = static_cast<uint32_t>(block);
    for (int64_t number = lane; number < grid * block; number += kLanes) {
      blockIdx.x = static_cast<uint32_t>(number / block), threadIdx.x = static_cast<uint32_t>(number % block);
      call(kernel, slots, std::index_sequence_for<A...>());
    }
  };
  warp = &here;
  for (int lane = 0; lane < kLanes; ++lane) {
    getcontext(&here.lanes[lane]);
    here.lanes[lane].uc_stack.ss_sp = stacks.data() + lane * 65536;
    here.lanes[lane].uc_stack.ss_size = 65536;
    makecontext(&here.lanes[lane], reinterpret_cast<void (*)()>(begin), 1, lane);
  }
  swapcontext(&here.home, &here.lanes[0]);
  warp = nullptr;
}

}  // namespace played

inline int __shfl_xor_sync(unsigned, int value, int other, int) {
  auto& warp = *played::warp;
  const int lane = warp.current, turn = warp.turn[lane]++ % 2;
  warp.values[turn][lane] = value;
  played::go((lane + 1) % played::kLanes);
  return warp.values[turn][lane ^ other];
}
