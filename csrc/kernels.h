// The operations on flat arrays in host memory. Pointers need no alignment beyond the element's, lengths are any,
// arrays of one call do not overlap. Every result is the same bit for bit on every Isa and with any number of threads, but
// for the sign of a NaN.
#pragma once

#include <cstdint>

#include "cpu.h"

namespace offload {

struct Execution {
  int threads;
  Isa isa;
};

// Types of the numbers in an array. Where a function is a template, T is float, uint16_t for bfloat16, or Half for fp16.
enum class Element { fp32, bf16, fp16 };
struct Half {
  uint16_t bits;
};

// What one AdamW step multiplies with: computed in double as torch does, rounded to float once.
struct AdamwScalars {
  float grad_scale;         // 1 for none
  float decay;              // 1 - lr * weight_decay
  float lerp_weight;        // 1 - beta1
  float beta2;              //
  float one_minus_beta2;    //
  float sqrt_correction2;   // sqrt(1 - beta2^step)
  float eps;                //
  float neg_step_size;      // -lr / (1 - beta1^step)
};

// What a correction multiplies with: those of the step that was done, whose gradient scale was applied_scale.
struct CorrectionScalars {
  float applied_scale;
  float grad_scale;  // the scale it should have had
  float lerp_weight;
  float one_minus_beta2;
  float least_v_per_m2;  // exp_avg_sq is at least this times exp_avg^2, both without the step's gradient
  float sqrt_correction2;
  float eps;
  float neg_step_size;
};

enum class States { fp32, bf16, int8 };

// What is drawn at random is a function of these and of an element's number; see philox.inl.
struct Draws {
  uint64_t key;
  uint32_t step;
  uint32_t purpose;
};

// The moments of an update rule, as many as it has. fp32; bf16, rounded at random; or int8, a code for each weight and a
// scale for every 128. Those two are told which element of its parameter the first one is: a multiple of 128.
struct Moments {
  States states;
  void* values[2];
  float* scales[2];
  Draws draws;
  uint64_t element;
};

// master: fp32 where lo is null. Else `master` is the bfloat16 plane and `lo` the int16 plane of a split master; or, in
// fp16, `lo` is the fp32 master and `master` a copy of it, which is written alone.
struct UpdateArrays {
  void* master;
  void* lo;
  bool is_copied;  // to fp16
  Moments moments;
  const void* grad;
  Element grad_type;
  int64_t n;
};

// Returns how many new master weights are not finite, judged in fp32 (a split NaN can look like a zero in its high half).
int64_t adamw(const UpdateArrays& arrays, const AdamwScalars& scalars, Execution how);

// Brings the states after adamw to where another gradient scale would have brought them; returns as adamw does. Where
// the two scales are equal it counts and writes nothing. The moments are fp32.
int64_t correct_adamw(const UpdateArrays& arrays, const CorrectionScalars& scalars, Execution how);

struct LionScalars {
  float grad_scale;  // 1 for none
  float decay;       // 1 - lr * weight_decay
  float beta1;
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float lr;
};

// Returns as adamw does.
int64_t lion(const UpdateArrays& arrays, const LionScalars& scalars, Execution how);

struct SgdScalars {
  float grad_scale;  // 1 for none
  float weight_decay;
  float momentum;
  float lr;
};

// With one fp32 moment, or none where that is null. Returns as adamw does.
int64_t sgd(const UpdateArrays& arrays, const SgdScalars& scalars, Execution how);

// Random directions over weights of one parameter, of which the first is number `element`, a multiple of 64. Direction k of a
// step is drawn for purpose first_purpose + 65536 k. Where a weight is larger than the threshold it is 0.
struct Directions {
  uint64_t key;
  uint32_t step;
  uint32_t first_purpose;
  uint64_t element;
  float threshold;
};

// plus, minus = weights + eps z, weights - eps z.
template <class T>  // float, or uint16_t for bfloat16, which is rounded to nearest, ties to even
struct PerturbArrays {
  const T* weights;
  T* plus;
  T* minus;
};
template <class T>
void perturb(const PerturbArrays<T>& arrays, int64_t n, const Directions& directions, float eps, Execution how);

struct DescendArrays {  // as in UpdateArrays; or with is_bf16 and no lo, bfloat16 alone, the first one a multiple of 128
  void* master;
  int16_t* lo;
  bool is_bf16;
  int64_t n;
};

struct DescendScalars {
  const float* coefficients;  // of each direction
  int num_coefficients;
  float lr;
  float weight_decay;
  uint32_t rounding;  // the purpose for which the bits are drawn that weights in bfloat16 alone are rounded with
};

// weight -= lr (the sum of coefficient * z + weight_decay * weight). Returns as adamw does; of weights in bfloat16 alone,
// which are rounded at random, those that are not finite once they are.
int64_t descend(const DescendArrays& arrays, const Directions& directions, const DescendScalars& scalars, Execution how);

// Writes 32 random bits for each of n elements, of which the first is number `element`, a multiple of 64.
void draw(uint32_t* out, int64_t n, const Draws& draws, uint64_t element, Execution how);

void split(const float* master, uint16_t* hi, int16_t* lo, int64_t n, Execution how);
void join(const uint16_t* hi, const int16_t* lo, float* master, int64_t n, Execution how);
void round_bf16(float* x, int64_t n, Execution how);
template <class T>  // T here and below: as at Element
void accumulate(float* sum, const T* x, int64_t n, Execution how);

// Weights in records of codes and scales: offload/extras/quant/codecs.py. Weights may be decoded over
// their own records, where these end with them: by one thread.
constexpr int64_t kInt8Block = 128;
constexpr int64_t whole_record(int bits) { return kInt8Block * bits / 8 + 4; }  // of whole numbers of 8 or 4 bits
constexpr int64_t kInt8Record = whole_record(8);
constexpr int64_t kFp8Block = 1024, kFp8Record = kFp8Block + 4;
constexpr int64_t kNf4Block = 1 << 14, kNf4Record = kNf4Block / 2 + kNf4Block / 64 + 8;
struct Nf4Tables {
  const float* levels;   // the 16 numbers of NormalFloat
  const float* numbers;  // the 256 of the dynamic map
};
template <int kBits, class T>
void decode_whole(const uint8_t* records, T* out, int64_t num_records, Execution how);
template <class T>
void decode_nf4(const uint8_t* records, const Nf4Tables& tables, T* out, int64_t num_records, Execution how);
// A matrix of mxfp4 in a file of gpt-oss, which has the columns one after the other (offload/extras/quant/file_codecs.py).
constexpr int64_t kMxfp4Block = 32;  // rows with one exponent
struct Mxfp4Matrix {
  const uint8_t* exponents;  // [columns, rows / 32], 127 more than the exponent
  const uint8_t* codes;      // [columns, rows / 2]
  int64_t rows, columns;
};
// Writes the matrix by rows. It must not overlap the record.
template <class T>
void decode_mxfp4(const Mxfp4Matrix& matrix, T* out, Execution how);
struct MasterWeights {  // in fp32; with lo, the halves of that; or with is_bf16 and no lo, in bfloat16 alone
  const void* p;
  const int16_t* lo;
  bool is_bf16;
};
void encode_int8(const MasterWeights& weights, int64_t n, uint8_t* records, Execution how);
// Encodes values and their error, in bf16, and leaves there what the codes lack; a block of zeros leaves its error.
template <int kBits, class T>
void encode_rest(const T* values, uint16_t* error, uint8_t* records, int64_t num_records, Execution how);
// Writes the codes of n weights by the 15 borders between levels, two in a byte, and the largest magnitude of every 64.
void encode_nf4(const float* weights, int64_t n, const float* borders, uint8_t* pairs, float* sizes, Execution how);

// Sums of squares in double. Segment i is x[offsets[i] .. offsets[i] + sizes[i]) and has the bits it would have alone.
template <class T>
void sum_squares(const T* x, const int64_t* offsets, const int64_t* sizes, double* sums, int64_t num_segments,
                 Execution how);

// Copies x to `out` and returns the bits that sum_squares has for it, in one pass over x. Fewer than kFew elements wake
// no thread: waking one takes as long as they do.
constexpr int64_t kFew = 1 << 17;
template <class T>
double copy_sum_squares(const T* x, T* out, int64_t n, Execution how);

// The memory traffic of an update without its arithmetic, for the benchmark: reads `read`, and adds 1 to the words of each
// of the arrays in `written`, whose elements have so many bytes. Variants differ in how far they prefetch.
constexpr int kNumRooflineVariants = 3;
constexpr int kMostWritten = 4;
struct RooflineArrays {
  int num_written;
  void* written[kMostWritten];
  int bytes[kMostWritten];
  const void* read;
  int read_bytes;
  int64_t n;
};
void roofline(const RooflineArrays& arrays, int variant, Execution how);

}  // namespace offload
