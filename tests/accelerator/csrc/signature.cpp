#include "signature.h"

#include "place.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/List.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <mutex>
#include <string>
#include <unordered_map>

namespace sim {

namespace {

// More differ for good: a learning rate that is an argument and changes with each step, say.
constexpr size_t kMostSignatures = 1 << 14;

class Key {
 public:
  template <typename T>
  void add(const T& value) {
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  void add(c10::IntArrayRef values) {
    add(values.size());
    bytes_.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof values[0]);
  }
  void add(const std::string& text) {
    add(text.size());
    bytes_ += text;
  }
  void add(const at::Tensor& tensor) {
    add(tensor.defined());
    if (tensor.defined()) {
      add(tensor.sizes());
      add(tensor.strides());
      add(tensor.scalar_type());
      add(tensor.device().type());
      add(tensor.unsafeGetTensorImpl()->is_wrapped_number());
    }
  }
  void add(const c10::IValue& value) {
    add(value.isNone() ? int('-') : value.isTensor() ? int('t') : int('v'));
    if (value.isTensor()) {
      add(value.toTensor());
    } else if (value.isInt()) {
      add(value.toInt());
    } else if (value.isDouble()) {
      add(value.toDouble());
    } else if (value.isBool()) {
      add(value.toBool());
    } else if (value.isString()) {
      add(value.toStringRef());
    } else if (value.isDevice()) {
      add(value.toDevice().type());
    } else if (value.isIntList()) {
      add(c10::IntArrayRef(value.toIntVector()));
    } else if (value.isList()) {
      add(value.toListRef().size());
      for (const c10::IValue& one : value.toListRef()) {
        add(one);
      }
    } else if (value.isComplexDouble()) {
      add(value.toComplexDouble());
    } else {
      TORCH_CHECK(value.isNone() || value.isGenerator(), "the simulated accelerator does not know arguments of type ",
                  value.tagKind());
    }
  }
  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

using Substitute = std::function<at::Tensor(const at::Tensor&)>;

c10::IValue substitute(const c10::IValue& value, const Substitute& tensor_for, c10::DeviceType device) {
  const auto replace = [&](const at::Tensor& tensor) { return tensor.defined() ? tensor_for(tensor) : tensor; };
  if (value.isTensor()) {
    return replace(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      list.push_back(replace(tensor));
    }
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const c10::IValue& one : value.toListRef()) {
      list.push_back(one.isTensor() ? std::optional<at::Tensor>(replace(one.toTensor())) : std::nullopt);
    }
    return list;
  }
  if (value.isDevice()) {
    return c10::Device(device);
  }
  if (value.isGenerator()) {
    return device == c10::DeviceType::CPU ? c10::IValue(at::make_generator<at::CPUGeneratorImpl>(0)) : c10::IValue();
  }
  return value;
}

// Shapes by torch's own inference: no data, and the right results of all operations with an `out`.
at::Tensor onMeta(const at::Tensor& tensor) {
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta).pinned_memory(false));
}

// Shapes by running the CPU kernel on zeros, for what torch would otherwise say by the rules of another device: the
// dtype of a layer norm's statistics, the strides of attention's output.
at::Tensor onZeros(const at::Tensor& tensor) {
  const auto options = tensor.options().device(at::kCPU).pinned_memory(false);
  auto made = at::empty_strided(tensor.sizes(), tensor.strides(), options);
  std::memset(made.storage().mutable_data(), 0, made.storage().nbytes());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    made.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return made;
}

struct Trial {
  torch::jit::Stack arguments, results;
};

Trial tryOn(
    const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments, const Substitute& tensor_for,
    c10::DeviceType device) {
  Trial trial;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const bool draws = arguments[i].isNone() && op.schema().arguments()[i].name() == "generator";
    trial.arguments.push_back(
        draws && device == c10::DeviceType::CPU ? c10::IValue(at::make_generator<at::CPUGeneratorImpl>(0))
                                                : substitute(arguments[i], tensor_for, device));
  }
  trial.results = trial.arguments;
  op.callBoxed(&trial.results);
  return trial;
}

// The shapes of an `out=` argument follow from torch's inference for it; whoever makes new tensors does it as the CPU's
// kernel does. Nothing if neither can be asked.
std::optional<Trial> tryOut(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments, bool has_out) {
  for (bool is_meta : {has_out, !has_out}) {
    try {
      return is_meta ? tryOn(op, arguments, onMeta, c10::DeviceType::Meta)
                     : tryOn(op, arguments, onZeros, c10::DeviceType::CPU);
    } catch (const c10::NotImplementedError&) {
      TORCH_CHECK_NOT_IMPLEMENTED(is_meta, "the simulated accelerator runs torch's CPU kernels, and there is none for ",
                                  op.operator_name());
    } catch (const c10::Error&) {
      if (is_meta) {  // the caller's error, where zeros may be the kernel's
        throw;
      }
    }
  }
  return std::nullopt;
}

// Masks among indices stand for as many positions as the data say.
bool hasMask(c10::ArrayRef<c10::IValue> arguments) {
  for (const auto& value : arguments) {
    if (value.isOptionalTensorList()) {
      for (const c10::IValue& one : value.toListRef()) {
        if (one.isTensor() && one.toTensor().defined() &&
            (one.toTensor().scalar_type() == at::kBool || one.toTensor().scalar_type() == at::kByte)) {
          return true;
        }
      }
    }
  }
  return false;
}

Shape shapeOf(const at::Tensor& tensor) {
  Shape shape;
  shape.is_defined = tensor.defined();
  if (tensor.defined()) {
    shape.sizes = tensor.sizes();
    shape.strides = tensor.strides();
    shape.dtype = tensor.scalar_type();
  }
  return shape;
}

Signature findOut(
    const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments, const std::vector<int>& alias_of) {
  Signature found;
  const auto& parameters = op.schema().arguments();
  const bool has_new_results = std::find(alias_of.begin(), alias_of.end(), -1) != alias_of.end();
  found.waits = hasMask(arguments);
  if (found.waits) {
    found.depends_on_data = has_new_results;
    found.cost = costOf(op.schema().name(), arguments, {});
    return found;
  }
  const auto trial = tryOut(op, arguments, !has_new_results);
  if (!trial) {
    found.depends_on_data = true;
    return found;
  }
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = parameters[i].alias_info();
    if (alias && alias->isWrite() && trial->arguments[i].isTensor()) {
      found.written.emplace_back(trial->arguments[i].toTensor().sizes());
    }
  }
  std::vector<c10::IValue> made;
  for (size_t r = 0; r < alias_of.size(); ++r) {
    if (alias_of[r] >= 0) {
      continue;
    }
    ResultShape result;
    made.push_back(trial->results[r]);
    result.is_list = trial->results[r].isTensorList();
    if (result.is_list) {
      for (const at::Tensor& tensor : trial->results[r].toTensorVector()) {
        result.tensors.push_back(shapeOf(tensor));
      }
    } else {
      result.tensors.push_back(shapeOf(trial->results[r].toTensor()));
    }
    found.results.push_back(std::move(result));
  }
  found.cost = costOf(op.schema().name(), arguments, made);
  return found;
}

// By its name, and by what it writes: `__lshift__` makes a new tensor.
bool isInPlace(const c10::OperatorHandle& op) {
  const auto& parameters = op.schema().arguments();
  const auto* alias = parameters.empty() ? nullptr : parameters[0].alias_info();
  return op.schema().name().back() == '_' && alias && alias->isWrite();
}

// A number among the results, or shapes that torch marks as following from the data.
bool mustWait(const c10::OperatorHandle& op) {
  if (op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output)) {
    return true;
  }
  for (const auto& result : op.schema().returns()) {
    const auto kind = result.type()->kind();
    const bool is_list = kind == c10::TypeKind::ListType;
    if ((is_list ? result.type()->containedType(0)->kind() : kind) != c10::TypeKind::TensorType) {
      return true;
    }
  }
  return false;
}

}  // namespace

std::shared_ptr<const Signature> signatureOf(
    const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments, const std::vector<int>& alias_of) {
  static std::mutex mutex;
  static auto* known = new std::unordered_map<std::string, std::shared_ptr<const Signature>>;
  Key key;
  key.add(op.operator_name().name);
  key.add(op.operator_name().overload_name);
  for (const auto& value : arguments) {
    key.add(value);
  }
  {
    std::lock_guard<std::mutex> lock(mutex);
    if (auto found = known->find(key.bytes()); found != known->end()) {
      return found->second;
    }
  }
  auto found = std::make_shared<Signature>();
  if (mustWait(op)) {
    found->depends_on_data = true;
  } else if (isInPlace(op)) {
    found->waits = hasMask(arguments);
    found->cost = costOf(op.schema().name(), arguments, {});
  } else {
    *found = findOut(op, arguments, alias_of);
    device(-1).count(Counter::signatures);
  }
  std::lock_guard<std::mutex> lock(mutex);
  if (known->size() >= kMostSignatures) {
    known->clear();
  }
  (*known)[key.bytes()] = found;
  return found;
}

}  // namespace sim
