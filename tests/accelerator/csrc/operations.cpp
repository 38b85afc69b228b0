// The operations that are not simply torch's CPU kernels: those that make tensors and views, which touch no data, and
// those that torch composes differently for a device.
#include "launch.h"
#include "place.h"

#include <ATen/EmptyTensor.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/SymIntArrayRef.h>
#include <torch/library.h>

namespace sim {

namespace {

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

c10::Device deviceFor(std::optional<c10::Device> wanted) {
  return {kDeviceType, wanted && wanted->has_index() ? wanted->index() : currentDevice()};
}

at::Tensor empty(
    at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<c10::Device> wanted, std::optional<bool> pinned, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned");
  const c10::DeviceGuard guard(deviceFor(wanted));
  return at::Tensor(
      at::detail::empty_generic(sizes, c10::GetAllocator(kDeviceType), kKeys, c10::dtype_or_default(dtype), format));
}

at::Tensor emptyStrided(
    at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<c10::Device> wanted, std::optional<bool> pinned) {
  TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned");
  const c10::DeviceGuard guard(deviceFor(wanted));
  return at::Tensor(at::detail::empty_strided_generic(
      sizes, strides, c10::GetAllocator(kDeviceType), kKeys, c10::dtype_or_default(dtype)));
}

at::Tensor asStrided(
    const at::Tensor& self, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides, std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(
      self, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides),
      offset ? std::make_optional(offset->expect_int()) : std::nullopt);
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef sizes) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(sizes));
}

at::Tensor reshapeAlias(const at::Tensor& self, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides));
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(self.device());
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(sizes), format);
}

at::Tensor& setStorage(
    at::Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides) {
  const auto shape = C10_AS_INTARRAYREF_SLOW(sizes);
  at::DimVector steps(C10_AS_INTARRAYREF_SLOW(strides));
  if (steps.empty()) {  // contiguous
    steps.resize(shape.size());
    int64_t step = 1;
    for (size_t dim = shape.size(); dim-- > 0; step *= std::max<int64_t>(shape[dim], 1)) {
      steps[dim] = step;
    }
  }
  // Named for quantized tensors, and all that it does is to set storage, sizes and strides.
  return at::native::set_storage_quantized_(self, std::move(source), offset.expect_int(), shape, steps);
}

at::Tensor& setWholeStorage(at::Tensor& self, at::Storage source) { return at::native::set_(self, std::move(source)); }
at::Tensor& setTensor(at::Tensor& self, const at::Tensor& source) { return at::native::set_tensor_(self, source); }

void recordStream(at::Tensor& self, c10::Stream stream) {
  device(stream.device_index()).heap().recordStream(self.storage().mutable_data(), stream.id());
}

// torch's dropout uses this one on a device, and a mask of its own on a CPU.
std::tuple<at::Tensor, at::Tensor> nativeDropout(const at::Tensor& input, double p, std::optional<bool> train) {
  const auto as_mask = input.options().dtype(at::kBool);
  if (!train.value_or(true)) {
    return {input.clone(), at::ones_like(input, as_mask)};
  }
  if (p == 1) {
    return {at::zeros_like(input), at::zeros_like(input, as_mask)};
  }
  at::Tensor mask = at::empty_like(input, as_mask).bernoulli_(1 - p);
  return {input.mul(mask).mul_(1 / (1 - p)), mask};
}

// CUDA's counts integers as well, and models ask for that on whatever is not a CPU.
at::Tensor countHistogram(const at::Tensor& self, int64_t bins, const at::Scalar& least, const at::Scalar& most) {
  static const auto op = findOperator("aten::histc");
  const auto dtype = at::isFloatingType(self.scalar_type()) ? self.scalar_type() : at::kFloat;
  torch::jit::Stack stack{self.to(dtype), bins, least, most};
  launch(op, &stack);
  return stack[0].toTensor().to(self.scalar_type());
}

// As the CPU chooses, whose kernels run: from shapes, dtypes and strides alone.
int64_t chooseAttention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& mask,
    double dropout, bool is_causal, std::optional<double> scale, bool enable_gqa) {
  const auto on_cpu = [](const at::Tensor& tensor) {
    at::Tensor seen = Place::of(tensor).tensor();
    return seen.is_floating_point() ? seen.set_requires_grad(tensor.requires_grad()) : seen;
  };
  const auto seen_mask = mask && mask->defined() ? std::make_optional(on_cpu(*mask)) : std::nullopt;
  return at::native::_fused_sdp_choice_cpp(
      on_cpu(query), on_cpu(key), on_cpu(value), seen_mask, dropout, is_causal, scale, enable_gqa);
}

void convolution(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  static const auto op = findOperator("aten::convolution");
  launch(op, stack);
}

// The CPU's takes the sizes of a bias as well, as its fourth argument.
void convolutionBackward(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  static const auto op = findOperator("aten::convolution_backward");
  const size_t first = stack->size() - 10;
  const at::Tensor weight = (*stack)[first + 2].toTensor();
  const bool is_transposed = (*stack)[first + 6].toBool();
  const int64_t groups = (*stack)[first + 8].toInt();
  const int64_t channels = is_transposed ? weight.size(1) * groups : weight.size(0);
  stack->insert(stack->begin() + ptrdiff_t(first) + 3, c10::IValue(std::vector<int64_t>{channels}));
  launch(op, stack);
}

// Besides a CPU kernel these have one for all other devices, composed of simpler operations, with other bits; or, the
// two losses, made of their `out=`, which resizes the result on the way.
constexpr const char* kNotComposed[] = {
    "_foreach_norm.Scalar", "_stack", "_stack.out", "addr", "addr.out", "all.dims", "all.dims_out", "any.dims", "any.dims_out",
    "linalg__powsum", "mish_backward", "mse_loss", "native_channel_shuffle", "native_group_norm", "native_layer_norm",
    "silu_backward", "smooth_l1_loss",
};

}  // namespace

}  // namespace sim

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &sim::chooseAttention)
}

namespace sim {

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&launch>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  for (const char* name : kNotComposed) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&launch>());
  }
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", emptyStrided);
  library.impl("as_strided", asStrided);
  library.impl("view", view);
  library.impl("_reshape_alias", reshapeAlias);
  library.impl("unfold", at::native::unfold);
  library.impl("view_as_real", at::native::view_as_real);
  library.impl("view_as_complex", at::native::view_as_complex);
  library.impl("resize_", resize);
  library.impl("set_.source_Tensor", setTensor);
  library.impl("set_.source_Storage", setWholeStorage);
  library.impl("set_.source_Storage_storage_offset", setStorage);
  library.impl("record_stream", recordStream);
  library.impl("native_dropout", nativeDropout);
  library.impl("histc", countHistogram);
  library.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  library.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolutionBackward>());
}

}  // namespace sim
