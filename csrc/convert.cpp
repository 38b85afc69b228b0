#include "dispatch.h"
#include "kernels.h"
#include "thread_pool.h"

#define OFFLOAD_KERNEL "convert_kernel.inl"
#include "foreach_isa.inl"

namespace offload {
namespace {

constexpr int64_t kChunk = 1 << 17;

}  // namespace

void split(const float* master, uint16_t* hi, int16_t* lo, int64_t n, Execution how) {
  parallel_chunks(n, kChunk, how.threads, [=](int64_t begin, int64_t end) {
    OFFLOAD_DISPATCH(how.isa, split_range(master, hi, lo, begin, end));
  });
}

void join(const uint16_t* hi, const int16_t* lo, float* master, int64_t n, Execution how) {
  parallel_chunks(n, kChunk, how.threads, [=](int64_t begin, int64_t end) {
    OFFLOAD_DISPATCH(how.isa, join_range(hi, lo, master, begin, end));
  });
}

void round_bf16(float* x, int64_t n, Execution how) {
  parallel_chunks(n, kChunk, how.threads, [=](int64_t begin, int64_t end) {
    OFFLOAD_DISPATCH(how.isa, round_bf16_range(x, begin, end));
  });
}

template <class T>
void accumulate(float* sum, const T* x, int64_t n, Execution how) {
  parallel_chunks(n, kChunk, how.threads, [=](int64_t begin, int64_t end) {
    OFFLOAD_DISPATCH(how.isa, accumulate_range(sum, x, begin, end));
  });
}
template void accumulate(float*, const float*, int64_t, Execution);
template void accumulate(float*, const uint16_t*, int64_t, Execution);
template void accumulate(float*, const Half*, int64_t, Execution);

}  // namespace offload
