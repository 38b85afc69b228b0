// What a GPU's compiler has by itself, for g++: a block's threads are fibers, each of which goes through all blocks of the
// grid, and lets the others go on where it waits for what they have.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#define __global__
#define __shared__ static thread_local
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

constexpr int kStack = 65536;

struct Lane {
  ucontext_t start;
  jmp_buf at;  // setjmp, because each swapcontext asks the system for the signal mask
  bool has_begun = false;
  int values[2];  // by turns: who is next may write before the last one has read
  int turn = 0;
};
struct Block {
  std::vector<Lane> lanes;
  ucontext_t home;
  int current = 0;
  bool has_waited = false;  // at a barrier
  std::function<void(int)> run;
};
inline thread_local Block* here;

[[noreturn]] inline void go_on(int lane) {
  here->current = lane;
  Lane& next = here->lanes[lane];
  if (next.has_begun) _longjmp(next.at, 1);
  next.has_begun = true;
  setcontext(&next.start);
  __builtin_unreachable();
}

inline void let_others_go_on() {
  const int from = here->current, next = (from + 1) % static_cast<int>(here->lanes.size());
  const Index block = blockIdx, thread = threadIdx;
  if (!_setjmp(here->lanes[from].at)) go_on(next);
  blockIdx = block, threadIdx = thread;
}

inline void begin(int lane) {
  here->run(lane);
  if (lane + 1 < static_cast<int>(here->lanes.size())) go_on(lane + 1);
  setcontext(&here->home);
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
  Block own;
  own.lanes.resize(block);
  const std::unique_ptr<char[]> stacks(new char[block * kStack]);
  own.run = [&](int lane) {
    blockDim.x = static_cast<uint32_t>(block);
    for (int64_t number = 0; number < grid; ++number) {
      blockIdx.x = static_cast<uint32_t>(number), threadIdx.x = static_cast<uint32_t>(lane);
      call(kernel, slots, std::index_sequence_for<A...>());
      if (own.has_waited) let_others_go_on();  // the next block has the same shared memory
    }
  };
  here = &own;
  for (int lane = 0; lane < block; ++lane) {
    ucontext_t& context = own.lanes[lane].start;
    getcontext(&context);
    context.uc_stack.ss_sp = stacks.get() + lane * kStack;
    context.uc_stack.ss_size = kStack;
    makecontext(&context, reinterpret_cast<void (*)()>(begin), 1, lane);
  }
  own.lanes[0].has_begun = true;
  swapcontext(&own.home, &own.lanes[0].start);
  here = nullptr;
}

}  // namespace played

inline int __shfl_xor_sync(unsigned, int value, int other, int) {
  auto& lanes = played::here->lanes;
  const int lane = played::here->current, turn = lanes[lane].turn++ % 2;
  lanes[lane].values[turn] = value;
  played::let_others_go_on();
  return lanes[lane ^ other].values[turn];
}

inline void __syncthreads() {
  played::here->has_waited = true;
  played::let_others_go_on();
}
