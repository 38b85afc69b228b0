#include <cfloat>

#include "dispatch.h"
#include "kernels.h"
#include "thread_pool.h"

namespace offload {

constexpr float kLeastScale = 1e-38f;  // what a block is divided by at least

}  // namespace offload

#define OFFLOAD_KERNEL "codes_kernel.inl"
#include "foreach_isa.inl"

namespace offload {
namespace {

constexpr int64_t kChunk = 1 << 17;  // weights

}  // namespace

template <int kBits, class T>
void decode_whole(const uint8_t* records, T* out, int64_t num_records, Execution how) {
  parallel_chunks(num_records, kChunk / kInt8Block, how.threads, [=](int64_t begin, int64_t end) {
    OFFLOAD_DISPATCH(how.isa, decode_whole_range<kBits>(records, out, begin, end));
  });
}
template void decode_whole<8>(const uint8_t*, float*, int64_t, Execution);
template void decode_whole<8>(const uint8_t*, uint16_t*, int64_t, Execution);
template void decode_whole<8>(const uint8_t*, Half*, int64_t, Execution);
template void decode_whole<4>(const uint8_t*, float*, int64_t, Execution);
template void decode_whole<4>(const uint8_t*, uint16_t*, int64_t, Execution);
template void decode_whole<4>(const uint8_t*, Half*, int64_t, Execution);

template <class T>
void decode_nf4(const uint8_t* records, const Nf4Tables& tables, T* out, int64_t num_records, Execution how) {
  parallel_chunks(num_records, kChunk / kNf4Block, how.threads, [=](int64_t begin, int64_t end) {
    OFFLOAD_DISPATCH(how.isa, decode_nf4_range(records, tables, out, begin, end));
  });
}
template void decode_nf4(const uint8_t*, const Nf4Tables&, float*, int64_t, Execution);
template void decode_nf4(const uint8_t*, const Nf4Tables&, uint16_t*, int64_t, Execution);
template void decode_nf4(const uint8_t*, const Nf4Tables&, Half*, int64_t, Execution);

template <class T>
void decode_mxfp4(const Mxfp4Matrix& matrix, T* out, Execution how) {
  constexpr int64_t kBlocks = 4;  // the codes of a column in one cache line
  parallel_chunks(matrix.rows / kMxfp4Block, kBlocks, how.threads, [=](int64_t begin, int64_t end) {
    OFFLOAD_DISPATCH(how.isa, decode_mxfp4_range(matrix, out, begin, end));
  });
}
template void decode_mxfp4(const Mxfp4Matrix&, float*, Execution);
template void decode_mxfp4(const Mxfp4Matrix&, uint16_t*, Execution);
template void decode_mxfp4(const Mxfp4Matrix&, Half*, Execution);

void encode_int8(const MasterWeights& weights, int64_t n, uint8_t* records, Execution how) {
  parallel_chunks((n + kInt8Block - 1) / kInt8Block, kChunk / kInt8Block, how.threads, [=](int64_t begin, int64_t end) {
    OFFLOAD_DISPATCH(how.isa, encode_int8_range(weights, n, records, begin, end));
  });
}

template <int kBits, class T>
void encode_rest(const T* values, uint16_t* error, uint8_t* records, int64_t num_records, Execution how) {
  parallel_chunks(num_records, kChunk / kInt8Block, how.threads, [=](int64_t begin, int64_t end) {
    OFFLOAD_DISPATCH(how.isa, encode_rest_range<kBits>(values, error, records, begin, end));
  });
}
template void encode_rest<8>(const float*, uint16_t*, uint8_t*, int64_t, Execution);
template void encode_rest<8>(const uint16_t*, uint16_t*, uint8_t*, int64_t, Execution);
template void encode_rest<4>(const float*, uint16_t*, uint8_t*, int64_t, Execution);
template void encode_rest<4>(const uint16_t*, uint16_t*, uint8_t*, int64_t, Execution);

void encode_nf4(const float* weights, int64_t n, const float* borders, uint8_t* pairs, float* sizes, Execution how) {
  parallel_chunks((n + 63) / 64, kChunk / 64, how.threads, [=](int64_t begin, int64_t end) {
    OFFLOAD_DISPATCH(how.isa, encode_nf4_range(weights, n, borders, pairs, sizes, begin, end));
  });
}

}  // namespace offload
