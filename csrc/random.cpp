#include "dispatch.h"
#include "kernels.h"
#include "thread_pool.h"

#define OFFLOAD_KERNEL "random_kernel.inl"
#include "foreach_isa.inl"

namespace offload {

void draw(uint32_t* out, int64_t n, const Draws& draws, uint64_t element, Execution how) {
  constexpr int64_t kChunk = 1 << 16;
  parallel_chunks(n, kChunk, how.threads, [&](int64_t begin, int64_t end) {
    OFFLOAD_DISPATCH(how.isa, draw_range(out, draws, element, begin, end));
  });
}

}  // namespace offload
