// What GPU kernels share. The lane operations are intrinsics with separate rounding, never fused by a compiler, so the
// host's expressions give the host's bits. The GPU's run-time compiler compiles this file, and g++ does for tests
// (tests/accelerator/rtc.h). Both have only the sized integers of the standard library.
#pragma once
#include "kernels.h"

#define OFFLOAD_INLINE
#define __builtin_prefetch(address)
#define __builtin_fmaf __fmaf_rn
#define __builtin_sqrtf __fsqrt_rn
#if defined(__HIP__)
#pragma clang force_cuda_host_device begin
#define __shfl_xor_sync(mask, value, lane, width) __shfl_xor(value, lane, width)
#endif

namespace offload {
namespace {

#include "simd_scalar.inl"
struct Wide : Narrow {
  static Vec add(Vec a, Vec b) { return __fadd_rn(a, b); }
  static Vec sub(Vec a, Vec b) { return __fsub_rn(a, b); }
  static Vec mul(Vec a, Vec b) { return __fmul_rn(a, b); }
  static Vec div(Vec a, Vec b) { return __fdiv_rn(a, b); }
};

}  // namespace
}  // namespace offload
