#include "update_chunks.h"

#define OFFLOAD_KERNEL "sgd_kernel.inl"
#include "foreach_isa.inl"

namespace offload {

int64_t sgd(const UpdateArrays& arrays, const SgdScalars& scalars, Execution how) {
  return update_chunks(arrays.n, how.threads, [&](int64_t begin, int64_t end) {
    return OFFLOAD_DISPATCH(how.isa, sgd_chunk(arrays, scalars, begin, end));
  });
}

}  // namespace offload
