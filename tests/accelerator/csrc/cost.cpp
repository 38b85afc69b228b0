#include "cost.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <algorithm>
#include <chrono>

namespace sim {

namespace {

double extentBytes(const at::Tensor& tensor) {
  return tensor.defined() ? double(tensor.numel()) * double(tensor.element_size()) : 0;
}

double extentBytes(const c10::IValue& value) {
  if (value.isTensor()) {
    return extentBytes(value.toTensor());
  }
  double sum = 0;
  if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) {
      sum += extentBytes(tensor);
    }
  } else if (value.isList()) {
    for (const c10::IValue& one : value.toListRef()) {
      sum += one.isTensor() ? extentBytes(one.toTensor()) : 0;
    }
  }
  return sum;
}

double elements(const at::Tensor& tensor, int64_t from = 0) {
  double product = 1;
  for (int64_t dim = from; dim < tensor.dim(); ++dim) {
    product *= double(tensor.size(dim));
  }
  return product;
}

// [..., m, k] x [..., k, n]
double productFlops(const at::Tensor& left, const at::Tensor& right) {
  return 2 * elements(left) * double(right.dim() > 1 ? right.size(-1) : 1);
}

// QK^T and PV; half of it where causal. Backward has five such products where forward has two.
double attentionFlops(const at::Tensor& query, const at::Tensor& key, bool is_causal, double products) {
  return products * 2 * elements(query) * double(key.size(-2)) * (is_causal ? 0.5 : 1);
}

// Each number of the output is a sum over a kernel's worth of inputs; transposed, the other way round.
double convolutionFlops(const at::Tensor& output, const at::Tensor& input, const at::Tensor& weight, bool transposed) {
  return 2 * elements(transposed ? input : output) * elements(weight, 1);
}

bool isHalf(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().defined() && value.toTensor().element_size() == 2;
}

}  // namespace

KernelCost costOf(const std::string& name, c10::ArrayRef<c10::IValue> arguments, c10::ArrayRef<c10::IValue> results) {
  KernelCost cost;
  for (const auto& value : arguments) {
    cost.bytes += extentBytes(value);
  }
  for (const auto& value : results) {
    cost.bytes += extentBytes(value);
  }
  const auto tensor = [&](size_t number) { return arguments[number].toTensor(); };
  if (name == "aten::mm" || name == "aten::bmm" || name == "aten::mv" || name == "aten::dot") {
    cost.flops = productFlops(tensor(0), tensor(1));
  } else if (name == "aten::addmm" || name == "aten::baddbmm" || name == "aten::addmv" ||
             name == "aten::_addmm_activation") {
    cost.flops = productFlops(tensor(1), tensor(2));
  } else if (name == "aten::_scaled_dot_product_flash_attention_for_cpu") {
    cost.flops = attentionFlops(tensor(0), tensor(1), arguments[4].toBool(), 2);
  } else if (name == "aten::_scaled_dot_product_flash_attention_for_cpu_backward") {
    cost.flops = attentionFlops(tensor(1), tensor(2), arguments[7].toBool(), 5);
  } else if (name == "aten::convolution") {
    cost.flops = convolutionFlops(results[0].toTensor(), tensor(0), tensor(1), arguments[6].toBool());
  } else if (name == "aten::convolution_backward") {
    const auto mask = arguments[10].toBoolList();
    cost.flops = convolutionFlops(tensor(0), tensor(1), tensor(2), arguments[7].toBool()) * (mask[0] + mask[1]);
  }
  cost.is_half = cost.flops > 0 && isHalf(arguments[0]);
  return cost;
}

double KernelCost::seconds() const {
  const CostModel& model = settings().cost;
  if (!model.on) {
    return 0;
  }
  const double peak = is_half ? model.half_flops_per_s : model.single_flops_per_s;
  const double computing = flops > 0 ? flops * model.flops_scale / peak : 0;
  return std::max(computing, bytes * model.bytes_scale / model.memory_bytes_per_s) + model.kernel_latency_s;
}

double linkSeconds(double bytes, double bytes_per_s) {
  const CostModel& model = settings().cost;
  return model.on ? bytes * model.bytes_scale / bytes_per_s + model.copy_latency_s : 0;
}

double memorySeconds(double bytes) {
  KernelCost cost;
  cost.bytes = bytes;
  return cost.seconds();
}

namespace {

int64_t nowNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

LaunchTimer::LaunchTimer() {
  const CostModel& model = settings().cost;
  if (model.on && model.launch_latency_s > 0) {
    end_ns_ = nowNs() + int64_t(model.launch_latency_s * 1e9);
  }
}

LaunchTimer::~LaunchTimer() {
  while (end_ns_ && nowNs() < end_ns_) {
  }
}

}  // namespace sim
