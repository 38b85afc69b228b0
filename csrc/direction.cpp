#include "update_chunks.h"

namespace offload {

constexpr float kDirectionScale = 0x1.9f2c5p-11f;

}  // namespace offload

#define OFFLOAD_KERNEL "direction_kernel.inl"
#include "foreach_isa.inl"

namespace offload {

template <class T>
void perturb(const PerturbArrays<T>& arrays, int64_t n, const Directions& directions, float eps, Execution how) {
  parallel_chunks(n, kUpdateChunk, how.threads, [&](int64_t begin, int64_t end) {
    OFFLOAD_DISPATCH(how.isa, perturb_range(arrays, directions, eps, begin, end));
  });
}
template void perturb(const PerturbArrays<float>&, int64_t, const Directions&, float, Execution);
template void perturb(const PerturbArrays<uint16_t>&, int64_t, const Directions&, float, Execution);

int64_t descend(const DescendArrays& arrays, const Directions& directions, const DescendScalars& scalars,
                Execution how) {
  return update_chunks(arrays.n, how.threads, [&](int64_t begin, int64_t end) {
    return OFFLOAD_DISPATCH(how.isa, descend_chunk(arrays, directions, scalars, begin, end));
  });
}

}  // namespace offload
