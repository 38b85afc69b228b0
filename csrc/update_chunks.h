// Shared by the update entry points: the division of arrays over threads.
#pragma once

#include <atomic>

#include "dispatch.h"
#include "kernels.h"
#include "thread_pool.h"

namespace offload {

constexpr int64_t kUpdateChunk = 1 << 16;  // 1.6 MiB of AdamW's states: long enough to hide the hand-over, short enough
                                           // to share

// Calls update(begin, end) for each chunk of [0, n); returns the sum of the results, the count of non-finite weights.
template <class Update>
int64_t update_chunks(int64_t n, int threads, const Update& update) {
  std::atomic<int64_t> num_nonfinite{0};
  parallel_chunks(n, kUpdateChunk, threads, [&](int64_t begin, int64_t end) { num_nonfinite += update(begin, end); });
  return num_nonfinite;
}

}  // namespace offload
