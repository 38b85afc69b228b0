#include "dispatch.h"
#include "kernels.h"
#include "thread_pool.h"

#define OFFLOAD_KERNEL "roofline_kernel.inl"
#include "foreach_isa.inl"

namespace offload {
namespace {

constexpr int64_t kChunk = 1 << 16;  // as in adamw.cpp

}  // namespace

void roofline_fp32(float* p, float* m, float* v, const float* g, int64_t n, int variant, Execution how) {
  parallel_chunks(n, kChunk, how.threads, [=](int64_t begin, int64_t end) {
    switch (variant) {
      case 0: OFFLOAD_DISPATCH(how.isa, roofline_fp32_range<0>(p, m, v, g, begin, end)); break;
      case 1: OFFLOAD_DISPATCH(how.isa, roofline_fp32_range<256>(p, m, v, g, begin, end)); break;
      default: OFFLOAD_DISPATCH(how.isa, roofline_fp32_range<512>(p, m, v, g, begin, end)); break;
    }
  });
}

void roofline_split(uint16_t* hi, int16_t* lo, float* m, float* v, const uint16_t* g, int64_t n, int variant,
                    Execution how) {
  parallel_chunks(n, kChunk, how.threads, [=](int64_t begin, int64_t end) {
    switch (variant) {
      case 0: OFFLOAD_DISPATCH(how.isa, roofline_split_range<0>(hi, lo, m, v, g, begin, end)); break;
      case 1: OFFLOAD_DISPATCH(how.isa, roofline_split_range<256>(hi, lo, m, v, g, begin, end)); break;
      default: OFFLOAD_DISPATCH(how.isa, roofline_split_range<512>(hi, lo, m, v, g, begin, end)); break;
    }
  });
}

}  // namespace offload
