// Records of codes and scales decoded as GPU kernels, with the bits of codes_kernel.inl. A thread decodes 8 neighbouring
// weights, so neighbours read neighbours and write whole lines. Records begin at a multiple of 4 bytes, weights at a
// multiple of 16, and the records of a launch do not overlap its weights. Compiled by
// offload/native/run_time_kernels.py.
#include "device.inl"

namespace offload {
namespace {

constexpr int kEach = 8;

struct alignas(16) Line {
  uint32_t words[4];
};

inline uint32_t word(const uint8_t* p) { return *reinterpret_cast<const uint32_t*>(p); }

inline void store_each(float* to, const float* x) {
  Line lines[2];
  for (int j = 0; j < kEach; ++j) lines[j / 4].words[j % 4] = bits_of(x[j]);
  for (int i = 0; i < 2; ++i) reinterpret_cast<Line*>(to)[i] = lines[i];
}
inline void store_one(float* to, float x) { *to = x; }
inline void store_one(uint16_t* to, float x) { Wide::store_bf16(to, x); }
inline void store_one(Half* to, float x) { Wide::store_fp16(to, x); }
template <class T>
inline void store_each(T* to, const float* x) {
  alignas(16) T rounded[kEach];
  for (int j = 0; j < kEach; ++j) store_one(rounded + j, x[j]);
  *reinterpret_cast<Line*>(to) = *reinterpret_cast<const Line*>(rounded);
}

inline uint64_t thread_number() { return static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x; }

}  // namespace

template <int kBits, class T>
__global__ void decode_whole_on_device(const uint8_t* records, const float*, T* out, uint32_t num_records) {
  constexpr int kThreads = kInt8Block / kEach;  // a record
  const uint64_t number = thread_number(), k = number / kThreads;
  if (k >= num_records) return;
  const uint8_t* record = records + k * whole_record(kBits);
  const uint8_t* codes = record + number % kThreads * kBits;
  const float scale = float_of(word(record + kInt8Block * kBits / 8));
  float x[kEach];
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    if constexpr (kBits == 8) {
      x[j] = Wide::to_float(static_cast<int8_t>(word(codes + j / 4 * 4) >> 8 * (j % 4)));
    } else {
      x[j] = Wide::sub(Wide::to_float(word(codes) >> (8 * (j / 2) + 4 - j % 2 * 4) & 15), 8);
    }
    x[j] = Wide::mul(x[j], scale);
  }
  store_each(out + number * kEach, x);
}

// Numbers in e4m3: a sign, four bits of exponent with 7 added, three bits of the mantissa.
template <class T>
__global__ void decode_fp8_on_device(const uint8_t* records, const float*, T* out, uint32_t num_records) {
  constexpr int kThreads = kFp8Block / kEach;  // a record
  const uint64_t number = thread_number(), k = number / kThreads;
  if (k >= num_records) return;
  const uint8_t* record = records + k * kFp8Record;
  const uint8_t* codes = record + number % kThreads * kEach;
  const float scale = float_of(word(record + kFp8Block));
  float x[kEach];
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const uint32_t code = word(codes + j / 4 * 4) >> 8 * (j % 4) & 255, size = code & 127;
    float number = float_of((size << 20) + (120u << 23));
    // A subnormal number is the mantissa below a one that is not there.
    if (size < 8) number = Wide::sub(float_of((size << 20) + (121u << 23)), float_of(121u << 23));
    if (size == 127) number = float_of(0x7FC00000u);
    x[j] = Wide::mul(float_of(bits_of(number) | code >> 7 << 31), scale);
  }
  store_each(out + number * kEach, x);
}

// tables: the two levels of each code byte, [256][2], then the dynamic map, [256].
template <class T>
__global__ void decode_nf4_on_device(const uint8_t* records, const float* tables, T* out, uint32_t num_records) {
  constexpr int kThreads = kNf4Block / kEach;
  const uint64_t number = thread_number(), k = number / kThreads;
  if (k >= num_records) return;
  const uint8_t* record = records + k * kNf4Record;
  const int64_t part = static_cast<int64_t>(number % kThreads);
  const float most = float_of(word(record + kNf4Record - 8)), mean = float_of(word(record + kNf4Record - 4));
  const float size = Wide::add(Wide::mul(tables[512 + record[kNf4Block / 2 + part * kEach / 64]], most), mean);
  const uint32_t codes = word(record + part * kEach / 2);
  float x[kEach];
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const uint32_t code = codes >> (8 * (j / 2) + 4 - j % 2 * 4) & 15;
    x[j] = Wide::mul(tables[2 * code + 1], size);  // all levels lie in the first 128 bytes: of code bytes below 16
  }
  store_each(out + number * kEach, x);
}

// A matrix of mxfp4, stored column by column (codes_kernel.inl). A thread decodes the 32 rows of a column that share an
// exponent, so neighbours write neighbours of a row. The codes begin at a multiple of 4 bytes.
template <class T>
__global__ void decode_mxfp4_on_device(const uint8_t* exponents, const uint8_t* codes, T* out, uint32_t columns,
                                       uint32_t blocks) {
  const uint64_t number = thread_number(), column = number % columns, block = number / columns;
  if (block >= blocks) return;
  const uint64_t place = column * blocks + block;
  const float size = half_power(exponents[place]);
  T* to = out + block * kMxfp4Block * columns + column;
  uint32_t words[kMxfp4Block / 8];  // before the stores, which might change them for all the compiler knows
  for (int j = 0; j < kMxfp4Block / 8; ++j) words[j] = word(codes + place * kMxfp4Block / 2 + 4 * j);
#pragma unroll
  for (int64_t row = 0; row < kMxfp4Block; ++row) {
    const uint32_t code = words[row / 8] >> 4 * (row % 8) & 15, number = code & 7;
    const uint32_t doubled = number < 2 ? number : (2 | (number & 1)) << (number / 2 - 1);
    const float level = float_of(bits_of(static_cast<float>(doubled)) | code >> 3 << 31);
    store_one(to + row * columns, Wide::mul(level, size));
  }
}

}  // namespace offload
