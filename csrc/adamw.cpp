#include "update_chunks.h"

#define OFFLOAD_KERNEL "adamw_kernel.inl"
#include "foreach_isa.inl"

namespace offload {

int64_t adamw(const UpdateArrays& arrays, const AdamwScalars& scalars, Execution how) {
  return update_chunks(arrays.n, how.threads, [&](int64_t begin, int64_t end) {
    return OFFLOAD_DISPATCH(how.isa, adamw_chunk(arrays, scalars, begin, end));
  });
}

int64_t correct_adamw(const UpdateArrays& arrays, const CorrectionScalars& scalars, Execution how) {
  return update_chunks(arrays.n, how.threads, [&](int64_t begin, int64_t end) {
    return OFFLOAD_DISPATCH(how.isa, correct_adamw_chunk(arrays, scalars, begin, end));
  });
}

}  // namespace offload
