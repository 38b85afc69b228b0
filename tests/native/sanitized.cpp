// Runs every kernel on arrays of exact size, for the sanitizers (`make sanitize`), and compares instruction sets.
// Reads or writes outside an array, undefined behaviour and races end the program; differing bits do as well.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>
#include <type_traits>
#include <vector>

#include "kernels.h"
#include "thread_pool.h"

using namespace offload;

void check_io_engines();  // sanitized_io.cpp

namespace {

// Heap arrays with not one element to spare: whatever is touched beyond them is noticed.
template <class T>
std::vector<T> values(int64_t n, unsigned seed) {
  std::vector<T> x(static_cast<size_t>(n));
  for (auto& value : x) {
    seed = seed * 1664525u + 1013904223u;
    const float f = static_cast<float>(static_cast<int>(seed >> 8) - (1 << 23)) / (1 << 23);
    uint32_t bits;
    std::memcpy(&bits, &f, sizeof bits);
    if constexpr (sizeof(T) == 2) value = static_cast<T>(bits >> 16);
    else value = f;
  }
  x.shrink_to_fit();
  return x;
}

void require(bool condition, const char* what, int64_t n, Isa isa) {
  if (condition) return;
  std::fprintf(stderr, "%s differs: n = %lld, %s\n", what, static_cast<long long>(n), isa_name(isa));
  std::exit(1);
}

struct Outcome {
  std::vector<float> floats;
  std::vector<uint16_t> hi;
  std::vector<int16_t> lo;
  std::vector<double> sums;
  bool operator==(const Outcome& other) const {
    const bool same_floats =
        floats.empty() || std::memcmp(floats.data(), other.floats.data(), floats.size() * sizeof(float)) == 0;
    return same_floats && hi == other.hi && lo == other.lo && sums == other.sums;
  }
};

// Copies to an array that begins `shift` elements into its memory and ends with it, and compares with sum_squares.
template <class T>
void check_copy(int64_t n, int64_t shift, Execution how) {
  const auto x = values<T>(n, 6);
  std::vector<T> out(static_cast<size_t>(n + shift));
  const int64_t offset = 0;
  double expected = 0;
  sum_squares(x.data(), &offset, &n, &expected, 1, how);
  require(copy_sum_squares(x.data(), out.data() + shift, n, how) == expected, "copy_sum_squares", n, how.isa);
  require(std::equal(x.begin(), x.end(), out.begin() + shift), "the copy", n, how.isa);
  for (int64_t i = 0; i < shift; ++i) require(out[i] == T{}, "what lies before the copy", n, how.isa);
}

// Encodes, and decodes to arrays of their own and over the records.
template <class T, class Decode>
void decode_twice(const std::vector<uint8_t>& records, int64_t numel, const Decode& decode, std::vector<double>* seen) {
  std::vector<T> apart(static_cast<size_t>(numel)), over(static_cast<size_t>(numel));
  auto* const end = reinterpret_cast<uint8_t*>(over.data() + numel) - records.size();
  std::copy(records.begin(), records.end(), end);
  decode(records.data(), apart.data(), false);
  decode(end, over.data(), true);
  for (const auto& weights : {apart, over}) {
    for (const T weight : weights) seen->push_back(weight);
  }
}

std::vector<double> codes_kernels(int64_t n, Execution how) {
  const auto weights = values<float>(n, 7), tables = values<float>(256, 8);
  const int64_t num_int8 = (n + kInt8Block - 1) / kInt8Block, num_nf4 = (n + kNf4Block - 1) / kNf4Block;
  std::vector<double> seen;
  std::vector<uint8_t> records(static_cast<size_t>(num_int8 * kInt8Record)), pairs(static_cast<size_t>((n + 1) / 2));
  encode_int8({weights.data(), nullptr, false}, n, records.data(), how);
  std::vector<uint16_t> hi(static_cast<size_t>(n));
  std::vector<int16_t> lo(static_cast<size_t>(n));
  split(weights.data(), hi.data(), lo.data(), n, how);
  std::vector<uint8_t> of_halves(records.size()), of_upper(records.size());
  encode_int8({hi.data(), lo.data(), true}, n, of_halves.data(), how);
  require(of_halves == records, "codes of a split master", n, how.isa);
  encode_int8({hi.data(), nullptr, true}, n, of_upper.data(), how);
  seen.insert(seen.end(), of_upper.begin(), of_upper.end());
  const auto int8 = [&](const uint8_t* from, auto* to, bool over) {
    decode_whole<8>(from, to, num_int8, {over ? 1 : how.threads, how.isa});
  };
  decode_twice<float>(records, num_int8 * kInt8Block, int8, &seen);
  decode_twice<uint16_t>(records, num_int8 * kInt8Block, int8, &seen);
  const auto rest_of = [&](const auto& values, auto bits) {
    std::vector<uint16_t> error(static_cast<size_t>(n / kInt8Block * kInt8Block), 0x3C00);
    std::vector<uint8_t> made(static_cast<size_t>(n / kInt8Block * whole_record(bits)));
    encode_rest<bits>(values.data(), error.data(), made.data(), n / kInt8Block, how);
    const auto decode = [&](const uint8_t* from, auto* to, bool over) {
      decode_whole<bits>(from, to, n / kInt8Block, {over ? 1 : how.threads, how.isa});
    };
    decode_twice<float>(made, n / kInt8Block * kInt8Block, decode, &seen);
    seen.insert(seen.end(), error.begin(), error.end());
  };
  rest_of(weights, std::integral_constant<int, 8>());
  rest_of(weights, std::integral_constant<int, 4>());
  rest_of(hi, std::integral_constant<int, 4>());

  std::vector<float> borders(15), sizes(static_cast<size_t>((n + 63) / 64));
  for (int k = 0; k < 15; ++k) borders[k] = static_cast<float>(k - 7) / 8;
  encode_nf4(weights.data(), n, borders.data(), pairs.data(), sizes.data(), how);
  seen.insert(seen.end(), pairs.begin(), pairs.end());
  seen.insert(seen.end(), sizes.begin(), sizes.end());
  std::vector<uint8_t> nf4_records(static_cast<size_t>(num_nf4 * kNf4Record));
  for (size_t i = 0; i < pairs.size(); ++i) nf4_records[i / (kNf4Block / 2) * kNf4Record + i % (kNf4Block / 2)] = pairs[i];
  const auto nf4 = [&](const uint8_t* from, auto* to, bool over) {
    decode_nf4(from, {tables.data(), tables.data()}, to, num_nf4, {over ? 1 : how.threads, how.isa});
  };
  decode_twice<float>(nf4_records, num_nf4 * kNf4Block, nf4, &seen);
  decode_twice<uint16_t>(nf4_records, num_nf4 * kNf4Block, nf4, &seen);
  return seen;
}

Outcome all_kernels(int64_t n, Execution how) {
  auto p = values<float>(n, 1), m = values<float>(n, 2), v = values<float>(n, 3), g = values<float>(n, 4);
  for (auto& x : v) x *= x;
  const auto half = values<uint16_t>(n, 5);
  std::vector<Half> in_fp16(static_cast<size_t>(n)), grads_in_fp16;
  for (const uint16_t bits : half) grads_in_fp16.push_back({bits});
  grads_in_fp16.shrink_to_fit();
  std::vector<uint16_t> hi(static_cast<size_t>(n));
  std::vector<int16_t> lo(static_cast<size_t>(n));
  const AdamwScalars scalars{0.5f, 0.99f, 0.1f, 0.999f, 0.001f, 0.3f, 1e-8f, -1e-3f};

  const Moments whole{States::fp32, {m.data(), v.data()}, {}, {}, 0};
  const auto with_all = [&](const Moments& moments, const auto& step) {
    step({p.data(), nullptr, false, moments, g.data(), Element::fp32, n});
    step({p.data(), nullptr, false, moments, half.data(), Element::bf16, n});
    step({hi.data(), lo.data(), false, moments, g.data(), Element::fp32, n});
    step({hi.data(), lo.data(), false, moments, half.data(), Element::bf16, n});
    step({in_fp16.data(), p.data(), true, moments, g.data(), Element::fp32, n});
    step({in_fp16.data(), p.data(), true, moments, grads_in_fp16.data(), Element::fp16, n});
  };
  split(p.data(), hi.data(), lo.data(), n, how);
  const auto adamw_step = [&](const UpdateArrays& arrays) { adamw(arrays, scalars, how); };
  with_all(whole, adamw_step);
  const CorrectionScalars correction{0.5f, 0.1f, 0.1f, 0.001f, 0.02f, 0.3f, 1e-8f, -1e-3f};
  const CorrectionScalars nothing{0.5f, 0.5f, 0.1f, 0.001f, 0.02f, 0.3f, 1e-8f, -1e-3f};
  for (const auto& c : {correction, nothing}) {
    with_all(whole, [&](const UpdateArrays& arrays) { correct_adamw(arrays, c, how); });
  }
  const LionScalars lion_scalars{0.5f, 0.99f, 0.9f, 0.1f, 0.99f, 0.01f, 1e-3f};
  const auto lion_step = [&](const UpdateArrays& arrays) { lion(arrays, lion_scalars, how); };
  with_all(whole, lion_step);
  const SgdScalars sgd_scalars{0.5f, 0.1f, 0.9f, 1e-3f};
  const auto sgd_step = [&](const UpdateArrays& arrays) { sgd(arrays, sgd_scalars, how); };
  with_all(whole, sgd_step);
  with_all({States::fp32, {}, {}, {}, 0}, sgd_step);
  std::vector<uint16_t> small_m(static_cast<size_t>(n)), small_v(static_cast<size_t>(n));
  const Moments in_bf16{States::bf16, {small_m.data(), small_v.data()}, {}, {0x0123456789ABCDEF, 7, 0}, 1280};
  with_all(in_bf16, adamw_step);
  with_all(in_bf16, lion_step);
  const auto blocks = static_cast<size_t>((n + 127) / 128);
  std::vector<uint8_t> m_codes(static_cast<size_t>(n)), v_codes(static_cast<size_t>(n));
  std::vector<float> m_scales(blocks), v_scales(blocks);
  const Moments in_bytes{States::int8, {m_codes.data(), v_codes.data()}, {m_scales.data(), v_scales.data()}, {}, 0};
  with_all(in_bytes, adamw_step);
  with_all(in_bytes, lion_step);
  std::vector<uint32_t> drawn(static_cast<size_t>(n));
  draw(drawn.data(), n, {0x0123456789ABCDEF, 7, 3}, 640, how);
  const Directions directions{0x0123456789ABCDEF, 7, 1, 640, 0.5f};
  const float slopes[] = {0.5f, -2.0f};
  const DescendScalars descent{slopes, 2, 1e-3f, 0.1f, 3};
  std::vector<float> plus(static_cast<size_t>(n)), minus(static_cast<size_t>(n));
  perturb<float>({p.data(), plus.data(), minus.data()}, n, directions, 1e-2f, how);
  descend({p.data(), nullptr, false, n}, directions, descent, how);
  std::vector<uint16_t> short_plus(static_cast<size_t>(n)), short_minus(static_cast<size_t>(n));
  perturb<uint16_t>({hi.data(), short_plus.data(), short_minus.data()}, n, directions, 1e-2f, how);
  descend({hi.data(), lo.data(), true, n}, directions, descent, how);
  descend({short_plus.data(), nullptr, true, n}, directions, descent, how);
  join(hi.data(), lo.data(), p.data(), n, how);
  accumulate(g.data(), p.data(), n, how);
  accumulate(g.data(), half.data(), n, how);
  accumulate(g.data(), grads_in_fp16.data(), n, how);
  round_bf16(g.data(), n, how);

  const std::vector<int64_t> offsets{0, n / 3, n}, sizes{n, n / 2, 0};
  std::vector<double> sums(9);
  sum_squares(p.data(), offsets.data(), sizes.data(), sums.data(), 3, how);
  sum_squares(half.data(), offsets.data(), sizes.data(), sums.data() + 3, 3, how);
  sum_squares(grads_in_fp16.data(), offsets.data(), sizes.data(), sums.data() + 6, 3, how);

  Outcome outcome{p, hi, lo, sums};
  for (const auto* x : {&m, &v, &g, &plus, &minus}) outcome.floats.insert(outcome.floats.end(), x->begin(), x->end());
  outcome.floats.insert(outcome.floats.end(), m_scales.begin(), m_scales.end());
  outcome.floats.insert(outcome.floats.end(), v_scales.begin(), v_scales.end());
  for (const auto* x : {&small_m, &small_v, &short_plus, &short_minus}) outcome.hi.insert(outcome.hi.end(), x->begin(), x->end());
  for (const auto* x : {&m_codes, &v_codes}) outcome.hi.insert(outcome.hi.end(), x->begin(), x->end());
  for (const Half copy : in_fp16) outcome.hi.push_back(copy.bits);
  for (const uint32_t word : drawn) outcome.sums.push_back(word);

  for (int variant = 0; variant < kNumRooflineVariants; ++variant) {
    roofline({3, {p.data(), m.data(), v.data()}, {4, 4, 4}, g.data(), 4, n}, variant, how);
    roofline({4, {hi.data(), lo.data(), small_m.data(), m_codes.data()}, {2, 2, 2, 1}, half.data(), 2, n}, variant, how);
  }
  return outcome;
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
  for (const int64_t n : lengths) {
    const Outcome expected = all_kernels(n, {1, Isa::scalar});
    const std::vector<double> coded = codes_kernels(n, {1, Isa::scalar});
    for (int i = 0; i < kNumIsas; ++i) {
      const Isa isa = static_cast<Isa>(i);
      if (!isa_supported(isa)) continue;
      for (const int threads : {1, 3}) {
        require(all_kernels(n, {threads, isa}) == expected, "result", n, isa);
        require(codes_kernels(n, {threads, isa}) == coded, "codes", n, isa);
      }
    }
  }
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
      for (int round = 0; round < 3; ++round) require(all_kernels(n, {3, Isa::scalar}) == expected, "result", n, Isa::scalar);
    });
  }
  for (auto& caller : callers) caller.join();
  std::puts("all kernels agree");
  check_io_engines();
  return 0;
}
