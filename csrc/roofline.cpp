#include "update_chunks.h"

#define OFFLOAD_KERNEL "roofline_kernel.inl"
#include "foreach_isa.inl"

namespace offload {

void roofline(const RooflineArrays& arrays, int variant, Execution how) {
  update_chunks(arrays.n, how.threads, [&](int64_t begin, int64_t end) {
    switch (variant) {
      case 0: return OFFLOAD_DISPATCH(how.isa, roofline_range<0>(arrays, begin, end));
      case 1: return OFFLOAD_DISPATCH(how.isa, roofline_range<256>(arrays, begin, end));
      default: return OFFLOAD_DISPATCH(how.isa, roofline_range<512>(arrays, begin, end));
    }
  });
}

}  // namespace offload
