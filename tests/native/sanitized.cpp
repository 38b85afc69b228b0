// Runs every kernel on every instruction set and compares with the scalar one, bit for bit. For the sanitizers (`make sanitize`)
// arrays have exact sizes: reads or writes outside, undefined behaviour and races end the program; differing bits do as well.
// tests/native/test_aarch64.py compiles it for another processor.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <thread>
#include <type_traits>
#include <vector>

#include "kernels.h"
#include "thread_pool.h"

using namespace offload;

void check_io_engines();  // sanitized_io.cpp

namespace {

// n elements on the heap with not one to spare behind them: whatever is touched there is noticed. An odd number of them begins
// at an address that is not aligned.
template <class T>
class Array {
 public:
  explicit Array(int64_t n, T fill = T{}) : shift_(n % 2), memory_(static_cast<size_t>(n + shift_), fill) {}
  T* begin() { return memory_.data() + shift_; }
  T* end() { return memory_.data() + memory_.size(); }
  const T* begin() const { return memory_.data() + shift_; }
  const T* end() const { return memory_.data() + memory_.size(); }
  T& operator[](int64_t i) { return begin()[i]; }
  int64_t size() const { return end() - begin(); }

 private:
  int64_t shift_;
  std::vector<T> memory_;
};

// Zeros, subnormal numbers and the ends of the normal ones, infinities, numbers that are none.
constexpr uint32_t kEdges[] = {0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x00012345, 0x00800000, 0x80800000,
                               0x7F7FFFFF, 0xFF7FFFFF, 0x0D800000, 0x7F800000, 0xFF800000, 0x7FC00000};

template <class T>
T one_nan(T x) { return x == x ? x : std::numeric_limits<T>::quiet_NaN(); }
uint16_t one_nan(uint16_t x) { return (x & 0x7FFF) > 0x7F80 ? 0x7FC0 : x; }  // bfloat16
Half one_nan(Half x) { return (x.bits & 0x7FFF) > 0x7C00 ? Half{0x7E00} : x; }

// From -1 to 1. With edges, two of every 128 are one of those: some blocks have one that is not finite, others none.
template <class T>
Array<T> values(int64_t n, unsigned seed, bool with_edges = true) {
  Array<T> x(n);
  unsigned state = seed;
  for (int64_t i = 0; i < n; ++i) {
    state = state * 1664525u + 1013904223u;
    const float f = static_cast<float>(static_cast<int>(state >> 8) - (1 << 23)) / (1 << 23);
    uint32_t bits;
    std::memcpy(&bits, &f, sizeof bits);
    if (with_edges && (i + 31 * seed + n) % 61 == 0) bits = kEdges[(state >> 16) % (sizeof kEdges / sizeof bits)];
    bits >>= 32 - 8 * sizeof(T);
    std::memcpy(&x[i], &bits, sizeof(T));
    x[i] = one_nan(x[i]);
  }
  return x;
}

// Of all results for short arrays: one for all processors and compilers. What changes results changes it.
constexpr uint64_t kBits = 0xA2A54974CA122C19;

void require(bool condition, const char* what, int64_t n, Isa isa) {
  if (condition) return;
  std::fprintf(stderr, "%s differs: n = %lld, %s\n", what, static_cast<long long>(n), isa_name(isa));
  std::exit(1);
}

// What kernels wrote, by name, where one NaN is as good as another: compilers may give it either sign.
struct Outcome {
  struct Part {
    const char* name;
    std::vector<char> bytes;
  };
  std::vector<Part> parts;

  template <class T>
  void add(const char* name, Array<T> x) {
    for (auto& each : x) each = one_nan(each);
    const auto* first = reinterpret_cast<const char*>(x.begin());
    parts.push_back({name, {first, first + x.size() * static_cast<int64_t>(sizeof(T))}});
  }
  uint64_t hash(uint64_t before) const {  // FNV-1a
    for (const auto& part : parts) {
      for (const char byte : part.bytes) before = (before ^ static_cast<unsigned char>(byte)) * 0x100000001B3u;
    }
    return before;
  }
  void require_equal(const Outcome& other, int64_t n, Isa isa) const {
    for (size_t i = 0; i < parts.size(); ++i) require(parts[i].bytes == other.parts[i].bytes, parts[i].name, n, isa);
  }
};

// Copies to an array that begins `shift` elements into its memory and ends with it, and compares with sum_squares.
template <class T>
void check_copy(int64_t n, int64_t shift, Execution how) {
  const auto x = values<T>(n, 6, false);
  std::vector<T> out(static_cast<size_t>(n + shift));
  const int64_t offset = 0;
  double expected = 0;
  sum_squares(x.begin(), &offset, &n, &expected, 1, {1, Isa::scalar});
  require(copy_sum_squares(x.begin(), out.data() + shift, n, how) == expected, "copy_sum_squares", n, how.isa);
  require(std::equal(x.begin(), x.end(), out.begin() + shift), "the copy", n, how.isa);
  for (int64_t i = 0; i < shift; ++i) require(out[i] == T{}, "what lies before the copy", n, how.isa);
}

// Decodes to arrays of their own and over the records.
template <class T, class Decode>
void decode_twice(const char* name, const Array<uint8_t>& records, int64_t numel, const Decode& decode, Outcome* seen) {
  Array<T> apart(numel), over(numel);
  auto* const end = reinterpret_cast<uint8_t*>(over.end()) - records.size();
  std::copy(records.begin(), records.end(), end);
  decode(records.begin(), apart.begin(), false);
  decode(end, over.begin(), true);
  seen->add(name, apart);
  seen->add(name, over);
}

Outcome codes_kernels(int64_t n, Execution how) {
  const auto weights = values<float>(n, 7), tables = values<float>(256, 8);
  const int64_t num_int8 = (n + kInt8Block - 1) / kInt8Block, num_nf4 = (n + kNf4Block - 1) / kNf4Block;
  Outcome seen;
  Array<uint8_t> records(num_int8 * kInt8Record), pairs((n + 1) / 2);
  encode_int8({weights.begin(), nullptr, false}, n, records.begin(), how);
  seen.add("encode_int8", records);
  Array<uint16_t> hi(n);
  Array<int16_t> lo(n);
  split(weights.begin(), hi.begin(), lo.begin(), n, how);
  Array<uint8_t> of_halves(records.size()), of_upper(records.size());
  encode_int8({hi.begin(), lo.begin(), true}, n, of_halves.begin(), how);
  require(std::equal(records.begin(), records.end(), of_halves.begin()), "codes of a split master", n, how.isa);
  encode_int8({hi.begin(), nullptr, true}, n, of_upper.begin(), how);
  seen.add("encode_int8 of bf16", of_upper);
  const auto int8 = [&](const uint8_t* from, auto* to, bool over) {
    decode_whole<8>(from, to, num_int8, {over ? 1 : how.threads, how.isa});
  };
  decode_twice<float>("decode_whole", records, num_int8 * kInt8Block, int8, &seen);
  decode_twice<uint16_t>("decode_whole", records, num_int8 * kInt8Block, int8, &seen);
  decode_twice<Half>("decode_whole", records, num_int8 * kInt8Block, int8, &seen);
  const auto rest_of = [&](const auto& values, auto bits) {
    Array<uint16_t> error(n / kInt8Block * kInt8Block, 0x3C00);
    Array<uint8_t> made(n / kInt8Block * whole_record(bits));
    encode_rest<bits>(values.begin(), error.begin(), made.begin(), n / kInt8Block, how);
    seen.add("records of encode_rest", made);
    seen.add("error of encode_rest", error);
    const auto decode = [&](const uint8_t* from, auto* to, bool over) {
      decode_whole<bits>(from, to, n / kInt8Block, {over ? 1 : how.threads, how.isa});
    };
    decode_twice<float>("decode_whole", made, n / kInt8Block * kInt8Block, decode, &seen);
  };
  rest_of(weights, std::integral_constant<int, 8>());
  rest_of(weights, std::integral_constant<int, 4>());
  rest_of(hi, std::integral_constant<int, 4>());

  Array<float> borders(15), sizes((n + 63) / 64);
  for (int k = 0; k < 15; ++k) borders[k] = static_cast<float>(k - 7) / 8;
  encode_nf4(weights.begin(), n, borders.begin(), pairs.begin(), sizes.begin(), how);
  seen.add("encode_nf4", pairs);
  seen.add("sizes of encode_nf4", sizes);
  Array<uint8_t> nf4_records(num_nf4 * kNf4Record);
  for (int64_t i = 0; i < pairs.size(); ++i) nf4_records[i / (kNf4Block / 2) * kNf4Record + i % (kNf4Block / 2)] = pairs[i];
  const auto nf4 = [&](const uint8_t* from, auto* to, bool over) {
    decode_nf4(from, {tables.begin(), tables.begin()}, to, num_nf4, {over ? 1 : how.threads, how.isa});
  };
  decode_twice<float>("decode_nf4", nf4_records, num_nf4 * kNf4Block, nf4, &seen);
  decode_twice<uint16_t>("decode_nf4", nf4_records, num_nf4 * kNf4Block, nf4, &seen);
  decode_twice<Half>("decode_nf4", nf4_records, num_nf4 * kNf4Block, nf4, &seen);

  const int64_t columns = n % 67 + 1, blocks = n / kMxfp4Block / columns;
  const auto exponents = values<uint8_t>(columns * blocks, 9), codes = values<uint8_t>(columns * blocks * kMxfp4Block / 2, 10);
  const Mxfp4Matrix matrix{exponents.begin(), codes.begin(), blocks * kMxfp4Block, columns};
  Array<float> whole(blocks * kMxfp4Block * columns);
  Array<uint16_t> half(whole.size());
  Array<Half> in_fp16(whole.size());
  decode_mxfp4(matrix, whole.begin(), how);
  decode_mxfp4(matrix, half.begin(), how);
  decode_mxfp4(matrix, in_fp16.begin(), how);
  seen.add("decode_mxfp4", whole);
  seen.add("decode_mxfp4", half);
  seen.add("decode_mxfp4", in_fp16);
  return seen;
}

Outcome all_kernels(int64_t n, Execution how) {
  auto p = values<float>(n, 1), m = values<float>(n, 2), v = values<float>(n, 3), g = values<float>(n, 4);
  for (auto& x : v) x *= x;
  const auto half = values<uint16_t>(n, 5);
  const auto in_fp16 = values<Half>(n, 14);
  Array<Half> copy(n);
  Array<uint16_t> hi(n);
  Array<int16_t> lo(n);
  const AdamwScalars scalars{0.5f, 0.99f, 0.1f, 0.999f, 0.001f, 0.3f, 1e-8f, -1e-3f};

  const Moments whole{States::fp32, {m.begin(), v.begin()}, {}, {}, 0};
  const auto with_all = [&](const Moments& moments, const auto& step) {
    step({p.begin(), nullptr, false, moments, g.begin(), Element::fp32, n});
    step({p.begin(), nullptr, false, moments, half.begin(), Element::bf16, n});
    step({p.begin(), nullptr, false, moments, in_fp16.begin(), Element::fp16, n});
    step({hi.begin(), lo.begin(), false, moments, g.begin(), Element::fp32, n});
    step({hi.begin(), lo.begin(), false, moments, half.begin(), Element::bf16, n});
    step({copy.begin(), p.begin(), true, moments, g.begin(), Element::fp32, n});
    step({copy.begin(), p.begin(), true, moments, in_fp16.begin(), Element::fp16, n});
  };
  Outcome seen;
  Array<int64_t> num_nonfinite(1);
  // What a kernel leaves is what the next one begins with.
  const auto add = [&](const char* name) {
    seen.add(name, p), seen.add(name, hi), seen.add(name, lo), seen.add(name, m), seen.add(name, v);
    seen.add(name, copy), seen.add(name, num_nonfinite);
  };
  split(p.begin(), hi.begin(), lo.begin(), n, how);
  add("split");
  const auto adamw_step = [&](const UpdateArrays& arrays) { num_nonfinite[0] += adamw(arrays, scalars, how); };
  with_all(whole, adamw_step);
  add("adamw");
  const CorrectionScalars correction{0.5f, 0.1f, 0.1f, 0.001f, 0.02f, 0.3f, 1e-8f, -1e-3f};
  const CorrectionScalars nothing{0.5f, 0.5f, 0.1f, 0.001f, 0.02f, 0.3f, 1e-8f, -1e-3f};
  for (const auto& c : {correction, nothing}) {
    with_all(whole, [&](const UpdateArrays& arrays) { num_nonfinite[0] += correct_adamw(arrays, c, how); });
  }
  add("correct_adamw");
  const LionScalars lion_scalars{0.5f, 0.99f, 0.9f, 0.1f, 0.99f, 0.01f, 1e-3f};
  const auto lion_step = [&](const UpdateArrays& arrays) { num_nonfinite[0] += lion(arrays, lion_scalars, how); };
  with_all(whole, lion_step);
  add("lion");
  const SgdScalars sgd_scalars{0.5f, 0.1f, 0.9f, 1e-3f};
  const auto sgd_step = [&](const UpdateArrays& arrays) { num_nonfinite[0] += sgd(arrays, sgd_scalars, how); };
  with_all(whole, sgd_step);
  with_all({States::fp32, {}, {}, {}, 0}, sgd_step);
  add("sgd");
  Array<uint16_t> small_m(n), small_v(n);
  const Moments in_bf16{States::bf16, {small_m.begin(), small_v.begin()}, {}, {0x0123456789ABCDEF, 7, 0}, 1280};
  with_all(in_bf16, adamw_step);
  with_all(in_bf16, lion_step);
  add("weights with moments in bf16");
  seen.add("moments in bf16", small_m);
  seen.add("moments in bf16", small_v);
  Array<uint8_t> m_codes(n), v_codes(n);
  Array<float> m_scales((n + 127) / 128), v_scales((n + 127) / 128);
  const Moments in_bytes{States::int8, {m_codes.begin(), v_codes.begin()}, {m_scales.begin(), v_scales.begin()}, {}, 0};
  with_all(in_bytes, adamw_step);
  with_all(in_bytes, lion_step);
  add("weights with moments in int8");
  seen.add("moments in int8", m_codes);
  seen.add("moments in int8", v_codes);
  seen.add("scales of moments", m_scales);
  seen.add("scales of moments", v_scales);
  Array<uint32_t> drawn(n);
  draw(drawn.begin(), n, {0x0123456789ABCDEF, 7, 3}, 640, how);
  seen.add("draw", drawn);
  const Directions directions{0x0123456789ABCDEF, 7, 1, 640, 0.5f};
  const float slopes[] = {0.5f, -2.0f};
  const DescendScalars descent{slopes, 2, 1e-3f, 0.1f, 3};
  Array<float> plus(n), minus(n);
  perturb<float>({p.begin(), plus.begin(), minus.begin()}, n, directions, 1e-2f, how);
  num_nonfinite[0] += descend({p.begin(), nullptr, false, n}, directions, descent, how);
  Array<uint16_t> short_plus(n), short_minus(n);
  perturb<uint16_t>({hi.begin(), short_plus.begin(), short_minus.begin()}, n, directions, 1e-2f, how);
  num_nonfinite[0] += descend({hi.begin(), lo.begin(), true, n}, directions, descent, how);
  for (const auto* x : {&plus, &minus}) seen.add("perturb", *x);
  for (const auto* x : {&short_plus, &short_minus}) seen.add("perturb", *x);
  num_nonfinite[0] += descend({short_plus.begin(), nullptr, true, n}, directions, descent, how);
  add("descend");
  seen.add("descend", short_plus);
  join(hi.begin(), lo.begin(), p.begin(), n, how);
  add("join");
  accumulate(g.begin(), p.begin(), n, how);
  accumulate(g.begin(), half.begin(), n, how);
  accumulate(g.begin(), in_fp16.begin(), n, how);
  seen.add("accumulate", g);
  round_bf16(g.begin(), n, how);
  seen.add("round_bf16", g);

  const std::vector<int64_t> offsets{0, n / 3, n}, sizes{n, n / 2, 0};
  const auto finite = values<float>(n, 11, false);
  const auto finite_half = values<uint16_t>(n, 12, false);
  const auto finite_fp16 = values<Half>(n, 15, false);
  Array<double> sums(3);
  const auto add_sums = [&](const auto* x) {
    sum_squares(x, offsets.data(), sizes.data(), sums.begin(), 3, how);
    seen.add("sum_squares", sums);
  };
  add_sums(finite.begin());
  add_sums(finite_half.begin());
  add_sums(finite_fp16.begin());
  add_sums(p.begin());
  add_sums(half.begin());
  add_sums(in_fp16.begin());

  const int64_t even = n + n % 2;  // it moves words, from addresses of words
  Array<float> floats(even);
  Array<uint16_t> halves(even), read(even);
  Array<uint8_t> bytes(even);
  for (int variant = 0; variant < kNumRooflineVariants; ++variant) {
    roofline({3, {floats.begin(), halves.begin(), bytes.begin()}, {4, 2, 1}, read.begin(), 2, n}, variant, how);
  }
  seen.add("roofline", floats);
  seen.add("roofline", halves);
  seen.add("roofline", bytes);

  // Any bits: a NaN that rounding would make another number. Processors choose differently between two of those, so they meet no
  // split master.
  Array<float> any(n);
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = 0x9E3779B9u * static_cast<uint32_t>(i + 1) | (i % 5 ? 0 : 0x7F807FFFu);
    std::memcpy(&any[i], &bits, sizeof bits);
  }
  split(any.begin(), hi.begin(), lo.begin(), n, how);
  seen.add("split of any bits", hi);
  seen.add("split of any bits", lo);
  adamw_step({copy.begin(), p.begin(), true, in_bf16, any.begin(), Element::fp32, n});
  seen.add("fp16 of any bits", copy);
  seen.add("moments in bf16 of any bits", small_m);
  seen.add("moments in bf16 of any bits", small_v);
  round_bf16(any.begin(), n, how);
  seen.add("round_bf16 of any bits", any);
  return seen;
}

bool soon(const std::function<bool()>& is_true) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!is_true()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::yield();
  }
  return true;
}

// A second call gets the worker of the first one after it: both tasks must run at the same time. And a task may call.
void check_shared_pool() {
  std::atomic<int> num_busy{0}, num_begun{0}, num_inner{0};
  std::thread first([&] {
    parallel_for(2, 2, [&](int64_t) {
      ++num_busy;
      require(soon([&] { return num_begun > 0; }), "second call", 2, Isa::scalar);
    });
  });
  require(soon([&] { return num_busy == 2; }), "first call", 2, Isa::scalar);
  parallel_for(2, 2, [&](int64_t) {
    ++num_begun;
    require(soon([&] { return num_begun == 2; }), "sharing of the pool", 2, Isa::scalar);
  });
  first.join();
  parallel_for(8, 3, [&](int64_t) { parallel_for(8, 3, [&](int64_t) { ++num_inner; }); });
  require(num_inner == 64, "calls in tasks", 64, Isa::scalar);
}

}  // namespace

int main() {
  std::vector<int64_t> lengths{1000, (1 << 14) + 1, (1 << 17) + 77, 3 * (1 << 17) + 5};
  for (int64_t n = 0; n <= 100; ++n) lengths.push_back(n);
  uint64_t bits = 0xCBF29CE484222325u;
  for (const int64_t n : lengths) {
    const Outcome expected = all_kernels(n, {1, Isa::scalar});
    const Outcome coded = codes_kernels(n, {1, Isa::scalar});
    if (n <= kNf4Block + 1) bits = coded.hash(expected.hash(bits));
    for (int i = 0; i < kNumIsas; ++i) {
      const Isa isa = static_cast<Isa>(i);
      if (!isa_supported(isa)) continue;
      for (const int threads : {1, 3}) {
        all_kernels(n, {threads, isa}).require_equal(expected, n, isa);
        codes_kernels(n, {threads, isa}).require_equal(coded, n, isa);
      }
    }
  }
  std::printf("bits of all results: 0x%016llX\n", static_cast<unsigned long long>(bits));
  require(bits == kBits, "hash of all results", 0, Isa::scalar);
  // The last is long enough for stores that pass the caches by.
  for (const int64_t n : {0, 1, 31, 32, 33, 63, 95, 96, 100, (1 << 14) + 1, (1 << 17) + 77, (1 << 19) + 45}) {
    for (int i = 0; i < kNumIsas; ++i) {
      const Isa isa = static_cast<Isa>(i);
      if (!isa_supported(isa)) continue;
      for (const int64_t shift : {0, 1, 15, 16, 29}) {
        for (const int threads : {1, 3}) {
          check_copy<float>(n, shift, {threads, isa});
          check_copy<uint16_t>(n, shift, {threads, isa});
        }
      }
    }
  }
  check_shared_pool();
  // Several callers at once share the pool.
  const int64_t n = (1 << 17) + 77;
  const Outcome expected = all_kernels(n, {1, Isa::scalar});
  std::vector<std::thread> callers;
  for (int c = 0; c < 3; ++c) {
    callers.emplace_back([&] {
      for (int round = 0; round < 3; ++round) all_kernels(n, {3, Isa::scalar}).require_equal(expected, n, Isa::scalar);
    });
  }
  for (auto& caller : callers) caller.join();
  std::puts("all kernels agree");
  check_io_engines();
  return 0;
}
