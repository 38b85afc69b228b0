// Includes OFFLOAD_KERNEL once per instruction set, each time inside its own namespace (offload::scalar, ::avx2,
// ::avx512, ::neon) in which `Wide` is that set's vector and `Narrow` a single float for the tails. Define it before including.
//
// One compiler target for the whole file would let the linker pick the AVX-512 copy of a shared inline function (a
// std::vector's, say) for every machine; so the target is raised only around the kernel, and kernels use no std code.
// The system headers must come before the first raised target.
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// For functions that keep vectors in registers only when inlined into the surrounding loop.
#define OFFLOAD_INLINE __attribute__((always_inline))
#define OFFLOAD_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define OFFLOAD_TARGET_BEGIN(features) \
  OFFLOAD_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define OFFLOAD_TARGET_END _Pragma("clang attribute pop")
#else
#define OFFLOAD_TARGET_BEGIN(features) _Pragma("GCC push_options") OFFLOAD_PRAGMA(GCC target(features))
#define OFFLOAD_TARGET_END _Pragma("GCC pop_options")
#endif

namespace offload::scalar {
namespace {
#include "simd_scalar.inl"
using Wide = Narrow;
#include OFFLOAD_KERNEL
}  // namespace
}  // namespace offload::scalar

#if defined(__x86_64__)

OFFLOAD_TARGET_BEGIN("avx2,fma,f16c")
namespace offload::avx2 {
namespace {
#include "simd_scalar.inl"
#include "simd_avx2.inl"
#include OFFLOAD_KERNEL
}  // namespace
}  // namespace offload::avx2
OFFLOAD_TARGET_END

OFFLOAD_TARGET_BEGIN("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")
namespace offload::avx512 {
namespace {
#include "simd_scalar.inl"
#include "simd_avx512.inl"
#include OFFLOAD_KERNEL
}  // namespace
}  // namespace offload::avx512
OFFLOAD_TARGET_END

#elif defined(__aarch64__)

namespace offload::neon {
namespace {
#include "simd_scalar.inl"
#include "simd_neon.inl"
#include OFFLOAD_KERNEL
}  // namespace
}  // namespace offload::neon

#endif
