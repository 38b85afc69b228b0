// The Python module offload._core. Arrays arrive as addresses and lengths: offload/native/kernels.py and offload/native/io.py, the
// only callers, have checked device, dtype, length and contiguity before, for torch tensors and numpy arrays alike.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
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

Execution execution(int threads, int isa) { return {threads, static_cast<Isa>(isa)}; }

std::vector<std::string> supported_isas() {
  std::vector<std::string> names;
  for (int i = 0; i < kNumIsas; ++i) {
    if (isa_supported(static_cast<Isa>(i))) names.emplace_back(isa_name(static_cast<Isa>(i)));
  }
  return names;
}

int64_t py_adamw(Address master, Address lo, Address exp_avg, Address exp_avg_sq, Address grad, bool grad_is_bf16,
                 int64_t n, double grad_scale, double decay, double lerp_weight, double beta2, double one_minus_beta2,
                 double sqrt_correction2, double eps, double neg_step_size, int threads, int isa) {
  const AdamwArrays arrays{at<void>(master),      at<int16_t>(lo), at<float>(exp_avg), at<float>(exp_avg_sq),
                           at<const void>(grad), grad_is_bf16,    n};
  const auto f = [](double x) { return static_cast<float>(x); };
  const AdamwScalars scalars{f(grad_scale),      f(decay),            f(lerp_weight), f(beta2),
                             f(one_minus_beta2), f(sqrt_correction2), f(eps),         f(neg_step_size)};
  return adamw(arrays, scalars, execution(threads, isa));
}

int64_t py_correct_adamw(Address master, Address lo, Address exp_avg, Address exp_avg_sq, Address grad,
                         bool grad_is_bf16, int64_t n, double applied_scale, double grad_scale, double lerp_weight,
                         double one_minus_beta2, double least_v_per_m2, double sqrt_correction2, double eps,
                         double neg_step_size, int threads, int isa) {
  const AdamwArrays arrays{at<void>(master),      at<int16_t>(lo), at<float>(exp_avg), at<float>(exp_avg_sq),
                           at<const void>(grad), grad_is_bf16,    n};
  const auto f = [](double x) { return static_cast<float>(x); };
  const CorrectionScalars scalars{f(applied_scale),  f(grad_scale),       f(lerp_weight), f(one_minus_beta2),
                                  f(least_v_per_m2), f(sqrt_correction2), f(eps),         f(neg_step_size)};
  return correct_adamw(arrays, scalars, execution(threads, isa));
}

int64_t py_lion(Address master, Address lo, Address exp_avg, Address grad, bool grad_is_bf16, int64_t n,
                double grad_scale, double decay, double beta1, double one_minus_beta1, double beta2,
                double one_minus_beta2, double lr, int threads, int isa) {
  const LionArrays arrays{at<void>(master), at<int16_t>(lo), at<float>(exp_avg), at<const void>(grad), grad_is_bf16, n};
  const auto f = [](double x) { return static_cast<float>(x); };
  const LionScalars scalars{f(grad_scale), f(decay), f(beta1), f(one_minus_beta1), f(beta2), f(one_minus_beta2), f(lr)};
  return lion(arrays, scalars, execution(threads, isa));
}

void py_split(Address master, Address hi, Address lo, int64_t n, int threads, int isa) {
  split(at<const float>(master), at<uint16_t>(hi), at<int16_t>(lo), n, execution(threads, isa));
}

void py_join(Address hi, Address lo, Address master, int64_t n, int threads, int isa) {
  join(at<const uint16_t>(hi), at<const int16_t>(lo), at<float>(master), n, execution(threads, isa));
}

void py_to_bf16(Address from, Address to, int64_t n, int threads, int isa) {
  to_bf16(at<const float>(from), at<uint16_t>(to), n, execution(threads, isa));
}

void py_round_bf16(Address x, int64_t n, int threads, int isa) { round_bf16(at<float>(x), n, execution(threads, isa)); }

void py_accumulate(Address sum, Address x, bool x_is_bf16, int64_t n, int threads, int isa) {
  if (x_is_bf16) accumulate(at<float>(sum), at<const uint16_t>(x), n, execution(threads, isa));
  else accumulate(at<float>(sum), at<const float>(x), n, execution(threads, isa));
}

double py_sum_squares(Address x, bool x_is_bf16, int64_t n, int threads, int isa) {
  const int64_t offset = 0;
  double sum = 0;
  if (x_is_bf16) sum_squares(at<const uint16_t>(x), &offset, &n, &sum, 1, execution(threads, isa));
  else sum_squares(at<const float>(x), &offset, &n, &sum, 1, execution(threads, isa));
  return sum;
}

// Called for every parameter of a model, most of them small: those keep the GIL, since to have it back while another
// thread wants it takes longer than they do.
double py_copy_sum_squares(Address x, Address out, bool is_bf16, int64_t n, int threads, int isa) {
  std::optional<WithoutGil> no_gil;
  if (n >= kFew) no_gil.emplace();
  if (is_bf16) return copy_sum_squares(at<const uint16_t>(x), at<uint16_t>(out), n, execution(threads, isa));
  return copy_sum_squares(at<const float>(x), at<float>(out), n, execution(threads, isa));
}

void py_sum_squares_segments(Address x, bool x_is_bf16, Address offsets, Address sizes, Address sums,
                             int64_t num_segments, int threads, int isa) {
  const auto run = [&](const auto* values) {
    sum_squares(values, at<const int64_t>(offsets), at<const int64_t>(sizes), at<double>(sums), num_segments,
                execution(threads, isa));
  };
  if (x_is_bf16) run(at<const uint16_t>(x));
  else run(at<const float>(x));
}

void py_roofline_fp32(Address p, Address m, Address v, Address g, int64_t n, int variant, int threads, int isa) {
  roofline_fp32(at<float>(p), at<float>(m), at<float>(v), at<const float>(g), n, variant, execution(threads, isa));
}

void py_roofline_split(Address hi, Address lo, Address m, Address v, Address g, int64_t n, int variant, int threads,
                       int isa) {
  roofline_split(at<uint16_t>(hi), at<int16_t>(lo), at<float>(m), at<float>(v), at<const uint16_t>(g), n, variant,
                 execution(threads, isa));
}

}  // namespace
}  // namespace offload

NB_MODULE(_core, module) {
  using namespace offload;
  nb::set_leak_warnings(false);  // an engine that the program never closed ends with the process
  const auto no_gil = nb::call_guard<WithoutGil>();
  module.def("supported_isas", &supported_isas);
  module.def("physical_cores", &physical_cores);
  module.def("adamw", &py_adamw, no_gil);
  module.def("correct_adamw", &py_correct_adamw, no_gil);
  module.def("lion", &py_lion, no_gil);
  module.def("split", &py_split, no_gil);
  module.def("join", &py_join, no_gil);
  module.def("to_bf16", &py_to_bf16, no_gil);
  module.def("round_bf16", &py_round_bf16, no_gil);
  module.def("accumulate", &py_accumulate, no_gil);
  module.def("sum_squares", &py_sum_squares, no_gil);
  module.def("copy_sum_squares", &py_copy_sum_squares);
  module.def("sum_squares_segments", &py_sum_squares_segments, no_gil);
  module.def("roofline_fp32", &py_roofline_fp32, no_gil);
  module.def("roofline_split", &py_roofline_split, no_gil);
  module.attr("NUM_ROOFLINE_VARIANTS") = kNumRooflineVariants;
  bind_io(module);
}
