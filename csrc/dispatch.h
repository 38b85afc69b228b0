// Calls FUNCTION of the namespace that was compiled for the wanted instruction set.
#pragma once

#if defined(__x86_64__)
#define OFFLOAD_DISPATCH(isa, call)                     \
  ((isa) == ::offload::Isa::avx512 ? avx512::call       \
   : (isa) == ::offload::Isa::avx2 ? avx2::call         \
                                   : scalar::call)
#elif defined(__aarch64__)
#define OFFLOAD_DISPATCH(isa, call) ((isa) == ::offload::Isa::neon ? neon::call : scalar::call)
#else
#define OFFLOAD_DISPATCH(isa, call) scalar::call
#endif
