// The Python module offload._core. Arrays arrive as addresses and lengths: offload/native/kernels.py, directions.py, codes.py
// and io.py, the only callers, have checked device, dtype, length and contiguity before, for torch tensors and numpy arrays alike.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "bind.h"
#include "cpu.h"
#include "kernels.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace offload {
namespace {

using Address = uintptr_t;

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

// Calls body with a null pointer to the numbers of a type: a value of Element.
template <class Body>
auto with_element(int type, const Body& body) {
  switch (static_cast<Element>(type)) {
    case Element::fp16: return body(static_cast<Half*>(nullptr));
    case Element::bf16: return body(static_cast<uint16_t*>(nullptr));
    default: return body(static_cast<float*>(nullptr));
  }
}
template <class T>
using NumbersOf = std::remove_pointer_t<T>;

bool is_bf16(int type) { return static_cast<Element>(type) == Element::bf16; }

Execution execution(int threads, int isa) { return {threads, static_cast<Isa>(isa)}; }

std::vector<std::string> supported_isas() {
  std::vector<std::string> names;
  for (int i = 0; i < kNumIsas; ++i) {
    if (isa_supported(static_cast<Isa>(i))) names.emplace_back(isa_name(static_cast<Isa>(i)));
  }
  return names;
}

constexpr int kCopied = 4;

// The kernel of an update rule. `states` is a value of States; `moments` are addresses, each followed by the address of
// the scales for int8; `types` is the Element of the gradients, and kCopied more for a master
// with a copy in fp16; `scalars` are the members of Scalars in order; key, step and element seed the rounding
// of moments.
template <class Scalars, int64_t (*kKernel)(const UpdateArrays&, const Scalars&, Execution)>
int64_t py_update(Address master, Address lo, int states, const std::vector<Address>& moments, Address grad, int types,
                  int64_t n, const std::vector<double>& scalars, uint64_t key, uint32_t step, uint64_t element,
                  int threads, int isa) {
  UpdateArrays arrays{at<void>(master), at<void>(lo), types >= kCopied,
                      {static_cast<States>(states), {}, {}, {key, step, 0}, element},
                      at<const void>(grad), static_cast<Element>(types % kCopied), n};
  const size_t each = arrays.moments.states == States::int8 ? 2 : 1;
  for (size_t k = 0; k < moments.size(); k += each) {
    arrays.moments.values[k / each] = at<void>(moments[k]);
    if (each == 2) arrays.moments.scales[k / each] = at<float>(moments[k + 1]);
  }
  float rounded[sizeof(Scalars) / sizeof(float)];
  if (scalars.size() != std::size(rounded)) throw std::invalid_argument("scalars");
  std::copy(scalars.begin(), scalars.end(), rounded);
  Scalars given;
  memcpy(&given, rounded, sizeof given);
  return kKernel(arrays, given, execution(threads, isa));
}

void py_draw(Address out, int64_t n, uint64_t key, uint32_t step, uint32_t purpose, uint64_t element, int threads,
             int isa) {
  draw(at<uint32_t>(out), n, {key, step, purpose}, element, execution(threads, isa));
}

void py_perturb(Address weights, Address plus, Address minus, int type, int64_t n, uint64_t key, uint32_t step,
                uint32_t first_purpose, uint64_t element, float threshold, float eps, int threads, int isa) {
  const Directions directions{key, step, first_purpose, element, threshold};
  const auto run = [&](auto* typed) {
    using T = std::remove_pointer_t<decltype(typed)>;
    perturb<T>({typed, at<T>(plus), at<T>(minus)}, n, directions, eps, execution(threads, isa));
  };
  if (is_bf16(type)) run(at<uint16_t>(weights));
  else run(at<float>(weights));
}

int64_t py_descend(Address master, Address lo, int type, int64_t n, uint64_t key, uint32_t step,
                   uint32_t first_purpose, uint64_t element, float threshold, uint32_t rounding,
                   const std::vector<float>& coefficients, float lr, float weight_decay, int threads, int isa) {
  const DescendScalars scalars{coefficients.data(), static_cast<int>(coefficients.size()), lr, weight_decay, rounding};
  return descend({at<void>(master), at<int16_t>(lo), is_bf16(type), n}, {key, step, first_purpose, element, threshold}, scalars,
                 execution(threads, isa));
}

void py_split(Address master, Address hi, Address lo, int64_t n, int threads, int isa) {
  split(at<const float>(master), at<uint16_t>(hi), at<int16_t>(lo), n, execution(threads, isa));
}

void py_join(Address hi, Address lo, Address master, int64_t n, int threads, int isa) {
  join(at<const uint16_t>(hi), at<const int16_t>(lo), at<float>(master), n, execution(threads, isa));
}

void py_round_bf16(Address x, int64_t n, int threads, int isa) { round_bf16(at<float>(x), n, execution(threads, isa)); }

void py_accumulate(Address sum, Address x, int x_type, int64_t n, int threads, int isa) {
  with_element(x_type, [&](auto* typed) {
    accumulate(at<float>(sum), at<const NumbersOf<decltype(typed)>>(x), n, execution(threads, isa));
  });
}

// codec: 8 for int8, 4 for int4, 0 for nf4, which alone has tables.
void py_decode(int codec, Address records, Address levels, Address numbers, Address out, int out_type,
               int64_t num_records, int threads, int isa) {
  with_element(out_type, [&](auto* typed) {
    auto* weights = at<NumbersOf<decltype(typed)>>(out);
    const auto* from = at<const uint8_t>(records);
    if (codec == 8) decode_whole<8>(from, weights, num_records, execution(threads, isa));
    else if (codec == 4) decode_whole<4>(from, weights, num_records, execution(threads, isa));
    else decode_nf4(from, {at<const float>(levels), at<const float>(numbers)}, weights, num_records, execution(threads, isa));
  });
}

void py_decode_mxfp4(Address exponents, Address codes, int64_t rows, int64_t columns, Address out, int out_type,
                     int threads, int isa) {
  const Mxfp4Matrix matrix{at<const uint8_t>(exponents), at<const uint8_t>(codes), rows, columns};
  with_element(out_type, [&](auto* typed) {
    decode_mxfp4(matrix, at<NumbersOf<decltype(typed)>>(out), execution(threads, isa));
  });
}

void py_encode_int8(Address weights, Address low, int type, int64_t n, Address records, int threads, int isa) {
  const MasterWeights from{at<const void>(weights), at<const int16_t>(low), is_bf16(type)};
  encode_int8(from, n, at<uint8_t>(records), execution(threads, isa));
}

// bits: 8 or 4.
void py_encode_rest(int bits, Address values, int type, Address error, Address records, int64_t num_records, int threads,
                    int isa) {
  const auto run = [&](const auto* from) {
    auto *rest = at<uint16_t>(error);
    auto* to = at<uint8_t>(records);
    if (bits == 8) encode_rest<8>(from, rest, to, num_records, execution(threads, isa));
    else encode_rest<4>(from, rest, to, num_records, execution(threads, isa));
  };
  if (is_bf16(type)) run(at<const uint16_t>(values));
  else run(at<const float>(values));
}

void py_encode_nf4(Address weights, int64_t n, Address borders, Address pairs, Address sizes, int threads, int isa) {
  encode_nf4(at<const float>(weights), n, at<const float>(borders), at<uint8_t>(pairs), at<float>(sizes),
             execution(threads, isa));
}

void py_sum_squares_segments(Address x, int x_type, Address offsets, Address sizes, Address sums, int64_t num_segments,
                             int threads, int isa) {
  with_element(x_type, [&](auto* typed) {
    sum_squares(at<const NumbersOf<decltype(typed)>>(x), at<const int64_t>(offsets), at<const int64_t>(sizes),
                at<double>(sums), num_segments, execution(threads, isa));
  });
}

double py_sum_squares(Address x, int x_type, int64_t n, int threads, int isa) {
  const int64_t offset = 0;
  double sum = 0;
  const auto address = [](const auto* p) { return reinterpret_cast<Address>(p); };
  py_sum_squares_segments(x, x_type, address(&offset), address(&n), address(&sum), 1, threads, isa);
  return sum;
}

// Called for every model parameter. Small ones keep the GIL, because regaining the GIL from another thread takes longer
// than the call.
double py_copy_sum_squares(Address x, Address out, int type, int64_t n, int threads, int isa) {
  std::optional<WithoutGil> no_gil;
  if (n >= kFew) no_gil.emplace();
  return with_element(type, [&](auto* typed) {
    using T = NumbersOf<decltype(typed)>;
    return copy_sum_squares(at<const T>(x), at<T>(out), n, execution(threads, isa));
  });
}

void py_roofline(const std::vector<Address>& written, const std::vector<int>& bytes, Address read, int read_bytes,
                 int64_t n, int variant, int threads, int isa) {
  RooflineArrays arrays{static_cast<int>(written.size()), {}, {}, at<const void>(read), read_bytes, n};
  if (written.size() > kMostWritten || bytes.size() != written.size()) throw std::invalid_argument("written");
  for (size_t k = 0; k < written.size(); ++k) {
    arrays.written[k] = at<void>(written[k]);
    arrays.bytes[k] = bytes[k];
  }
  roofline(arrays, variant, execution(threads, isa));
}

}  // namespace
}  // namespace offload

NB_MODULE(_core, module) {
  using namespace offload;
  nb::set_leak_warnings(false);  // an engine that the program never closed ends with the process
  const auto no_gil = nb::call_guard<WithoutGil>();
  module.def("supported_isas", &supported_isas);
  module.def("physical_cores", &physical_cores);
  module.def("adamw", &py_update<AdamwScalars, &adamw>, no_gil);
  module.def("correct_adamw", &py_update<CorrectionScalars, &correct_adamw>, no_gil);
  module.def("lion", &py_update<LionScalars, &lion>, no_gil);
  module.def("sgd", &py_update<SgdScalars, &sgd>, no_gil);
  module.def("draw", &py_draw, no_gil);
  module.def("perturb", &py_perturb, no_gil);
  module.def("descend", &py_descend, no_gil);
  module.def("split", &py_split, no_gil);
  module.def("join", &py_join, no_gil);
  module.def("round_bf16", &py_round_bf16, no_gil);
  module.def("accumulate", &py_accumulate, no_gil);
  module.def("decode", &py_decode, no_gil);
  module.def("decode_mxfp4", &py_decode_mxfp4, no_gil);
  module.def("encode_int8", &py_encode_int8, no_gil);
  module.def("encode_rest", &py_encode_rest, no_gil);
  module.def("encode_nf4", &py_encode_nf4, no_gil);
  module.def("sum_squares", &py_sum_squares, no_gil);
  module.def("copy_sum_squares", &py_copy_sum_squares);
  module.def("sum_squares_segments", &py_sum_squares_segments, no_gil);
  module.def("roofline", &py_roofline, no_gil);
  module.attr("NUM_ROOFLINE_VARIANTS") = kNumRooflineVariants;
  bind_io(module);
}
