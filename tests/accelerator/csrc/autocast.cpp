// torch.autocast("sim"): torch's own lists of operations and its cast, with kernels that look at their arguments rather
// than being compiled once for each operation.
#include "device.h"

#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include <sstream>
#include <string>

namespace sim {

namespace {

const c10::impl::ExcludeDispatchKeyGuard withoutAutocast() {
  return c10::impl::ExcludeDispatchKeyGuard(c10::DispatchKey::AutocastPrivateUse1);
}

at::Tensor cast(at::ScalarType dtype, const at::Tensor& tensor) {
  return tensor.defined() ? at::autocast::cached_cast(dtype, tensor, kDeviceType) : tensor;
}

void castArguments(const c10::OperatorHandle& op, torch::jit::Stack* stack, at::ScalarType dtype) {
  const size_t number = op.schema().arguments().size();
  for (size_t i = stack->size() - number; i < stack->size(); ++i) {
    c10::IValue& value = (*stack)[i];
    if (value.isTensor()) {
      value = cast(dtype, value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) {
        list.push_back(cast(dtype, tensor));
      }
      value = list;
    }
  }
}

void inLowerPrecision(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto guard = withoutAutocast();
  castArguments(op, stack, at::autocast::get_autocast_dtype(kDeviceType));
  op.callBoxed(stack);
}

void inSinglePrecision(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto guard = withoutAutocast();
  castArguments(op, stack, at::kFloat);
  op.callBoxed(stack);
}

// Operations that take the dtype of their result: it is float32 unless the caller has said something else.
void withSingleResult(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto guard = withoutAutocast();
  const auto& parameters = op.schema().arguments();
  const size_t first = stack->size() - parameters.size();
  const auto& input = (*stack)[first];
  if (input.isTensor() && at::autocast::is_eligible(input.toTensor(), kDeviceType)) {
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (parameters[i].name() == "dtype" && (*stack)[first + i].isNone()) {
        (*stack)[first + i] = at::kFloat;
      }
    }
  }
  op.callBoxed(stack);
}

void inWidest(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto guard = withoutAutocast();
  const size_t number = op.schema().arguments().size();
  at::ScalarType widest = at::autocast::get_autocast_dtype(kDeviceType);
  for (size_t i = stack->size() - number; i < stack->size(); ++i) {
    const c10::IValue& value = (*stack)[i];
    if (value.isTensor() && value.toTensor().defined()) {
      widest = at::autocast::prioritize(widest, value.toTensor(), kDeviceType);
    } else if (value.isTensorList()) {
      widest = at::autocast::prioritize(widest, value.toTensorVector(), kDeviceType);
    }
  }
  castArguments(op, stack, widest);
  op.callBoxed(stack);
}

// "conv_transpose2d, input" is how torch's lists write conv_transpose2d.input.
std::string operatorName(const char* listed) {
  std::string name;
  for (const char* at = listed; *at; ++at) {
    if (*at == ',') {
      name += '.';
    } else if (*at != ' ') {
      name += *at;
    }
  }
  return name;
}

template <void (*kernel)(const c10::OperatorHandle&, torch::jit::Stack*)>
void add(torch::Library& library, const char* listed) {
  library.impl(operatorName(listed).c_str(), torch::CppFunction::makeFromBoxedFunction<kernel>());
}

}  // namespace

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, library) {
#define SIM_LOWER(...) add<&inLowerPrecision>(library, #__VA_ARGS__);
#define SIM_SINGLE(...) add<&inSinglePrecision>(library, #__VA_ARGS__);
#define SIM_RESULT(...) add<&withSingleResult>(library, #__VA_ARGS__);
#define SIM_WIDEST(...) add<&inWidest>(library, #__VA_ARGS__);
  AT_FORALL_LOWER_PRECISION_FP(SIM_LOWER)
  AT_FORALL_FP32(SIM_SINGLE)
  AT_FORALL_FP32_SET_OPT_DTYPE(SIM_RESULT)
  AT_FORALL_PROMOTE(SIM_WIDEST)
}

}  // namespace sim
