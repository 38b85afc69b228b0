#include "update_chunks.h"

#define OFFLOAD_KERNEL "lion_kernel.inl"
#include "foreach_isa.inl"

namespace offload {

int64_t lion(const UpdateArrays& arrays, const LionScalars& scalars, Execution how) {
  return update_chunks(arrays.n, how.threads, [&](int64_t begin, int64_t end) {
    return OFFLOAD_DISPATCH(how.isa, lion_chunk(arrays, scalars, begin, end));
  });
}

}  // namespace offload
