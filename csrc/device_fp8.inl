// Matrices cast to FP8 as GPU kernels, with the bits of the torch operations in offload/extras/quant/casts.py. A block of
// threads has a row of the matrix, and a thread 8 neighbouring elements in each turn, so neighbours read neighbours. The
// second read of a row comes from a cache. Rows have a multiple of 8 elements and begin at a multiple of 16 bytes.
// Compiled by offload/native/run_time_kernels.py.
#include "device.inl"

namespace offload {
namespace {

constexpr int kEach = 8, kLanes = 16, kMostThreads = 1024;

struct alignas(16) Line {
  uint32_t words[4];
};
struct alignas(8) Codes {
  uint32_t words[2];
};

inline void load_each(const float* from, float* x) {
  for (int i = 0; i < 2; ++i) {
    const Line line = reinterpret_cast<const Line*>(from)[i];
    for (int j = 0; j < 4; ++j) x[4 * i + j] = float_of(line.words[j]);
  }
}
inline void load_each(const uint16_t* from, float* x) {
  const Line line = *reinterpret_cast<const Line*>(from);
  for (int j = 0; j < 4; ++j) {
    x[2 * j] = float_of(line.words[j] << 16);
    x[2 * j + 1] = float_of(line.words[j] & 0xFFFF0000u);
  }
}

// Largest magnitude of a row, NaN if there is one. All threads of a block have the result.
template <class T>
inline float find_amax(const T* row, uint32_t columns) {
  int32_t most = 0;  // the bits: magnitudes are ordered as their bits are, and NaN is the largest
  for (uint32_t i = threadIdx.x * kEach; i < columns; i += blockDim.x * kEach) {
    float x[kEach];
    load_each(row + i, x);
#pragma unroll
    for (int j = 0; j < kEach; ++j) most = Wide::max_int(most, Wide::bits(Wide::magnitude(x[j])));
  }
  for (int other = kLanes / 2; other; other /= 2) {
    const int32_t theirs = __shfl_xor_sync(0xFFFFFFFFu, most, other, kLanes);
    most = Wide::max_int(most, theirs);
  }
  __shared__ int32_t parts[kMostThreads / kLanes];
  if (threadIdx.x % kLanes == 0) parts[threadIdx.x / kLanes] = most;
  __syncthreads();
  for (uint32_t k = 0; k < blockDim.x / kLanes; ++k) most = Wide::max_int(most, parts[k]);
  return float_of(static_cast<uint32_t>(most));
}

// The nearest number with a sign, kMantissa bits and the other bits of a byte as exponent, ties to even, as torch rounds.
// x: NaN, or rounded to a finite number.
template <int kMantissa>
inline uint32_t to_code(float x) {
  constexpr int kBias = (1 << (6 - kMantissa)) - 1, kDropped = 23 - kMantissa;
  constexpr uint32_t kLeast = 128 - kBias;  // exponent of the smallest normal number
  const uint32_t bits = bits_of(x) & 0x7FFFFFFFu, sign = (bits_of(x) ^ bits) >> 24;
  if (bits > 0x7F800000u) return sign | 0x7F;
  if (bits < kLeast << 23) {  // the sum has the last bit of a subnormal number as its own last bit
    constexpr uint32_t kStep = (kLeast + kDropped) << 23;
    return sign | (bits_of(Wide::add(float_of(bits), float_of(kStep))) - kStep);
  }
  const uint32_t half = (1u << (kDropped - 1)) - 1 + (bits >> kDropped & 1);
  return sign | ((bits + half - (static_cast<uint32_t>(127 - kBias) << 23)) >> kDropped);
}

}  // namespace

// Writes the largest magnitude of each row.
template <class T>
__global__ void find_amax_of_rows(const T* matrix, float* amax, uint32_t columns) {
  const float own = find_amax(matrix + static_cast<uint64_t>(blockIdx.x) * columns, columns);
  if (threadIdx.x == 0) amax[blockIdx.x] = own;
}

// kByRow: each row has a scale. Otherwise the matrix has one, for its largest magnitude, which `amax` has.
template <class T, int kMantissa, bool kByRow>
__global__ void cast_rows(const T* matrix, const float* amax, uint8_t* values, float* scales, uint32_t columns,
                          double least, double largest) {
  const uint64_t begin = static_cast<uint64_t>(blockIdx.x) * columns;
  float most;
  if constexpr (kByRow) most = find_amax(matrix + begin, columns);
  else most = amax[0];
  const float limit = static_cast<float>(least);
  const float scale = Wide::div(most < limit ? limit : most, static_cast<float>(largest));
  if (threadIdx.x == 0 && (kByRow || blockIdx.x == 0)) scales[blockIdx.x] = scale;
  for (uint32_t i = threadIdx.x * kEach; i < columns; i += blockDim.x * kEach) {
    float x[kEach];
    load_each(matrix + begin + i, x);
    Codes codes{};
#pragma unroll
    for (int j = 0; j < kEach; ++j) codes.words[j / 4] |= to_code<kMantissa>(Wide::div(x[j], scale)) << 8 * (j % 4);
    *reinterpret_cast<Codes*>(values + begin + i) = codes;
  }
}

}  // namespace offload
