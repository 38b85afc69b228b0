#include <algorithm>
#include <vector>

#include "dispatch.h"
#include "kernels.h"
#include "thread_pool.h"

#define OFFLOAD_KERNEL "reduce_kernel.inl"
#include "foreach_isa.inl"

namespace offload {
namespace {

constexpr int64_t kBlock = 1 << 14;  // part of the result's definition: the sum is over blocks of this many elements
// A copy of this many bytes or more passes the caches by: nobody reads it soon, and memory writes the lines without
// having to read them first.
constexpr int64_t kStreamBytes = 1 << 20;

int64_t num_blocks(int64_t n) { return (n + kBlock - 1) / kBlock; }

}  // namespace

template <class T>
void sum_squares(const T* x, const int64_t* offsets, const int64_t* sizes, double* sums, int64_t num_segments,
                 Execution how) {
  std::vector<int64_t> first(static_cast<size_t>(num_segments) + 1, 0);  // number of a segment's first block
  int64_t total = 0;
  for (int64_t s = 0; s < num_segments; ++s) {
    first[s + 1] = first[s] + num_blocks(sizes[s]);
    total += sizes[s];
  }
  std::vector<double> blocks(static_cast<size_t>(first.back()));
  // One index per block over all segments together: a few large ones and many small ones share the threads alike.
  const int threads = total < 4 * kBlock ? 1 : how.threads;
  parallel_for(first.back(), threads, [&](int64_t block) {
    const int64_t s = std::upper_bound(first.begin(), first.end(), block) - first.begin() - 1;
    const int64_t begin = (block - first[s]) * kBlock;
    const int64_t n = std::min(kBlock, sizes[s] - begin);
    blocks[block] = OFFLOAD_DISPATCH(how.isa, sum_squares_block(x + offsets[s] + begin, n));
  });
  for (int64_t s = 0; s < num_segments; ++s) {
    double sum = 0;
    for (int64_t block = first[s]; block < first[s + 1]; ++block) sum += blocks[block];
    sums[s] = sum;
  }
}
template void sum_squares(const float*, const int64_t*, const int64_t*, double*, int64_t, Execution);
template void sum_squares(const uint16_t*, const int64_t*, const int64_t*, double*, int64_t, Execution);
template void sum_squares(const Half*, const int64_t*, const int64_t*, double*, int64_t, Execution);

template <class T>
double copy_sum_squares(const T* x, T* out, int64_t n, Execution how) {
  const bool stream = n * static_cast<int64_t>(sizeof(T)) >= kStreamBytes;
  const auto copy_block = [=](int64_t begin) {
    const int64_t length = std::min(kBlock, n - begin);
    return stream ? OFFLOAD_DISPATCH(how.isa, copy_sum_squares_block<true>(x + begin, out + begin, length))
                  : OFFLOAD_DISPATCH(how.isa, copy_sum_squares_block<false>(x + begin, out + begin, length));
  };
  double sum = 0;
  if (n < kFew) {
    for (int64_t begin = 0; begin < n; begin += kBlock) sum += copy_block(begin);
    return sum;
  }
  std::vector<double> blocks(static_cast<size_t>(num_blocks(n)));
  parallel_for(num_blocks(n), how.threads, [&](int64_t block) { blocks[block] = copy_block(block * kBlock); });
  for (const double block_sum : blocks) sum += block_sum;
  return sum;
}
template double copy_sum_squares(const float*, float*, int64_t, Execution);
template double copy_sum_squares(const uint16_t*, uint16_t*, int64_t, Execution);
template double copy_sum_squares(const Half*, Half*, int64_t, Execution);

}  // namespace offload
