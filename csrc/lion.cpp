#include <atomic>

#include "dispatch.h"
#include "kernels.h"
#include "thread_pool.h"

#define OFFLOAD_KERNEL "lion_kernel.inl"
#include "foreach_isa.inl"

namespace offload {
namespace {

constexpr int64_t kChunk = 1 << 16;  // as adamw.cpp's

}  // namespace

int64_t lion(const LionArrays& arrays, const LionScalars& scalars, Execution how) {
  std::atomic<int64_t> num_nonfinite{0};
  parallel_chunks(arrays.n, kChunk, how.threads, [&](int64_t begin, int64_t end) {
    num_nonfinite += OFFLOAD_DISPATCH(how.isa, lion_chunk(arrays, scalars, begin, end));
  });
  return num_nonfinite;
}

}  // namespace offload
