#include <atomic>

#include "dispatch.h"
#include "kernels.h"
#include "thread_pool.h"

#define OFFLOAD_KERNEL "adamw_kernel.inl"
#include "foreach_isa.inl"

namespace offload {
namespace {

constexpr int64_t kChunk = 1 << 16;  // 1.6 MiB of states: long enough to hide the hand-over, short enough to share

}  // namespace

int64_t adamw(const AdamwArrays& arrays, const AdamwScalars& scalars, Execution how) {
  std::atomic<int64_t> num_nonfinite{0};
  parallel_chunks(arrays.n, kChunk, how.threads, [&](int64_t begin, int64_t end) {
    num_nonfinite += OFFLOAD_DISPATCH(how.isa, adamw_chunk(arrays, scalars, begin, end));
  });
  return num_nonfinite;
}

int64_t correct_adamw(const AdamwArrays& arrays, const CorrectionScalars& scalars, Execution how) {
  std::atomic<int64_t> num_nonfinite{0};
  parallel_chunks(arrays.n, kChunk, how.threads, [&](int64_t begin, int64_t end) {
    num_nonfinite += OFFLOAD_DISPATCH(how.isa, correct_adamw_chunk(arrays, scalars, begin, end));
  });
  return num_nonfinite;
}

}  // namespace offload
