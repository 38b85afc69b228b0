#include "launch.h"

#include "generator.h"
#include "place.h"
#include "signature.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/List.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>

namespace sim {

namespace {

// An argument as a kernel will see it: tensors of the device as places, all else as it is now.
class Argument {
 public:
  explicit Argument(c10::IValue constant) : constant_(std::move(constant)) {}

  Argument(const c10::IValue& value, c10::DeviceIndex index, bool takes_host_tensors) {
    if (value.isTensor()) {
      kind_ = Kind::kTensor;
      add(value.toTensor(), index, takes_host_tensors);
    } else if (value.isTensorList()) {
      kind_ = Kind::kList;
      for (const at::Tensor& tensor : value.toTensorVector()) {
        add(tensor, index, takes_host_tensors);
      }
    } else if (value.isOptionalTensorList()) {
      kind_ = Kind::kOptionalList;
      for (const c10::IValue& one : value.toListRef()) {
        add(one.isTensor() ? one.toTensor() : at::Tensor(), index, /*takes_host_tensors=*/true);
      }
    } else {
      constant_ = value.isDevice() ? c10::IValue(c10::Device(c10::kCPU)) : value;
    }
  }

  c10::IValue value() const {
    switch (kind_) {
      case Kind::kConstant:
        return constant_;
      case Kind::kTensor:
        return tensors_[0].tensor();
      case Kind::kList: {
        c10::List<at::Tensor> list;
        for (const auto& one : tensors_) {
          list.push_back(one.tensor());
        }
        return list;
      }
      case Kind::kOptionalList: {
        c10::List<std::optional<at::Tensor>> list;
        for (const auto& one : tensors_) {
          list.push_back(one.is_defined ? std::optional<at::Tensor>(one.tensor()) : std::nullopt);
        }
        return list;
      }
    }
    return {};
  }

 private:
  enum class Kind { kConstant, kTensor, kList, kOptionalList };

  struct Entry {
    bool is_defined = false;
    Place place;
    at::Tensor host;
    at::Tensor tensor() const { return !is_defined ? at::Tensor() : host.defined() ? host : place.tensor(); }
  };

  // A number in a tensor of the host goes along with the launch, as it is now. More than that has to be on the device.
  void add(const at::Tensor& tensor, c10::DeviceIndex index, bool takes_host_tensors) {
    Entry entry;
    entry.is_defined = tensor.defined();
    if (isOurs(tensor)) {
      TORCH_CHECK(tensor.device().index() == index, "Expected all tensors to be on the same device, but found at least "
                  "two devices, ", c10::Device(kDeviceType, index), " and ", tensor.device(), "!");
      entry.place = Place::of(tensor);
    } else if (tensor.defined()) {
      TORCH_CHECK(tensor.dim() == 0 || takes_host_tensors, "Expected all tensors to be on the same device, but found "
                  "at least two devices, ", c10::Device(kDeviceType, index), " and ", tensor.device(), "!");
      entry.host = tensor.clone();
      if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
        entry.host.unsafeGetTensorImpl()->set_wrapped_number(true);
      }
    }
    tensors_.push_back(std::move(entry));
  }

  Kind kind_ = Kind::kConstant;
  c10::IValue constant_;
  std::vector<Entry> tensors_;
};

// Results in new memory of the device, and what a kernel makes, which goes there.
class Results {
 public:
  explicit Results(const std::vector<int>& alias_of) : alias_of_(alias_of) {}

  void allocate(const Signature& signature) {
    for (const ResultShape& result : signature.results) {
      std::vector<at::Tensor> tensors;
      for (const Shape& shape : result.tensors) {
        tensors.push_back(shape.is_defined ? allocate(shape.sizes, shape.strides, shape.dtype) : at::Tensor());
        places_.push_back(shape.is_defined ? std::optional<Place>(Place::of(tensors.back())) : std::nullopt);
      }
      made_.push_back(result.is_list ? c10::IValue(tensors) : c10::IValue(tensors[0]));
    }
  }

  static at::Tensor allocate(c10::IntArrayRef sizes, c10::IntArrayRef strides, at::ScalarType dtype) {
    return at::empty_strided(sizes, strides, at::TensorOptions().dtype(dtype).device(kDeviceType));
  }

  const std::vector<c10::IValue>& made() const { return made_; }

  // For the kernel, which outlives this.
  auto storing() const {
    return [alias_of = alias_of_, places = places_](const torch::jit::Stack& found) {
      auto place = places.begin();
      const auto store = [&place](const at::Tensor& tensor) {
        if (const auto& to = *place++; to && tensor.defined() && tensor.numel()) {
          to->tensor().copy_(tensor);
        }
      };
      for (size_t r = 0; r < found.size(); ++r) {
        if (alias_of[r] >= 0) {
          continue;
        }
        if (found[r].isTensorList()) {
          for (const at::Tensor& tensor : found[r].toTensorVector()) {
            store(tensor);
          }
        } else {
          store(found[r].toTensor());
        }
      }
    };
  }

 private:
  const std::vector<int>& alias_of_;
  std::vector<c10::IValue> made_;
  std::vector<std::optional<Place>> places_;
};

c10::DeviceIndex deviceOf(c10::ArrayRef<c10::IValue> arguments) {
  for (const auto& value : arguments) {
    if (value.isTensor() && isOurs(value.toTensor())) {
      return value.toTensor().device().index();
    }
    if (value.isList()) {
      for (const c10::IValue& one : value.toListRef()) {
        if (one.isTensor() && isOurs(one.toTensor())) {
          return one.toTensor().device().index();
        }
      }
    }
    if (value.isDevice() && value.toDevice().has_index()) {
      return value.toDevice().index();
    }
  }
  return currentDevice();
}

// Which results are arguments, by the schema: those that `out=` and in-place operations return.
std::vector<int> aliases(const c10::FunctionSchema& schema) {
  std::vector<int> found;
  for (const auto& result : schema.returns()) {
    found.push_back(-1);
    const auto* alias = result.alias_info();
    if (!alias) {
      continue;
    }
    TORCH_CHECK_NOT_IMPLEMENTED(alias->isWrite(), schema.name(), " returns a view, and is not one that the simulated "
                                "accelerator knows");
    for (size_t i = 0; i < schema.arguments().size(); ++i) {
      const auto* of = schema.arguments()[i].alias_info();
      if (of && of->isWrite() && of->beforeSets() == alias->beforeSets()) {
        found.back() = int(i);
      }
    }
  }
  return found;
}

// Indices may be the host's: they are copied to the device first, and it waits for that.
bool hasHostIndices(c10::ArrayRef<c10::IValue> arguments) {
  for (const auto& value : arguments) {
    if (value.isOptionalTensorList()) {
      for (const c10::IValue& one : value.toListRef()) {
        if (one.isTensor() && one.toTensor().defined() && !isOurs(one.toTensor())) {
          return true;
        }
      }
    }
  }
  return false;
}

std::vector<Argument> asSeenByKernel(
    const c10::FunctionSchema& schema, c10::ArrayRef<c10::IValue> arguments, c10::DeviceIndex index) {
  const bool takes_host_tensors = schema.name() == "aten::_pack_padded_sequence";  // lengths are the host's
  std::vector<Argument> seen;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (schema.arguments()[i].name() == "generator") {
      const auto given = arguments[i].isNone() ? std::nullopt : std::make_optional(arguments[i].toGenerator());
      seen.emplace_back(c10::IValue(drawFrom(given, index)));
    } else {
      seen.emplace_back(arguments[i], index, takes_host_tensors);
    }
  }
  return seen;
}

void resizeWritten(
    const c10::FunctionSchema& schema, c10::ArrayRef<c10::IValue> arguments, const Signature& signature) {
  size_t next = 0;
  for (size_t i = 0; i < arguments.size() && next < signature.written.size(); ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    if (alias && alias->isWrite() && arguments[i].isTensor()) {
      const auto& sizes = signature.written[next++];
      if (arguments[i].toTensor().sizes() != c10::IntArrayRef(sizes)) {
        at::native::resize_output(arguments[i].toTensor(), sizes);
      }
    }
  }
}

torch::jit::Stack call(const c10::OperatorHandle& kernel, const std::vector<Argument>& arguments) {
  torch::jit::Stack stack;
  for (const auto& argument : arguments) {
    stack.push_back(argument.value());
  }
  kernel.callBoxed(&stack);
  return stack;
}

// The results are known once the kernel has run: the host waits, and copies them into memory of their size.
std::vector<c10::IValue> launchAndWait(
    const c10::OperatorHandle& kernel, std::vector<Argument> arguments, const std::vector<int>& alias_of,
    Stream& stream) {
  auto found = std::make_shared<torch::jit::Stack>();
  Work work;
  work.engine = Engine::kCompute;
  work.run = [kernel, arguments = std::move(arguments), found] { *found = call(kernel, arguments); };
  stream.enqueue(std::move(work));
  synchronizeInOperation(stream, kernel.schema().name().c_str());
  std::vector<c10::IValue> results;
  for (size_t r = 0; r < found->size(); ++r) {
    const auto& value = (*found)[r];
    if (alias_of[r] >= 0 || !value.isTensor() || !value.toTensor().defined()) {
      if (alias_of[r] < 0) {
        results.push_back(value);
      }
      continue;
    }
    const at::Tensor made = value.toTensor();
    at::Tensor result = Results::allocate(made.sizes(), made.strides(), made.scalar_type());
    if (result.numel()) {
      Work store;
      store.run = [made, place = Place::of(result)] { place.tensor().copy_(made); };
      stream.enqueue(std::move(store));
    }
    results.emplace_back(std::move(result));
  }
  return results;
}

}  // namespace

void launch(const c10::OperatorHandle& kernel, torch::jit::Stack* stack) {
  const LaunchTimer timer;
  const auto& schema = kernel.schema();
  const size_t number = schema.arguments().size();
  const torch::jit::Stack arguments(stack->end() - ptrdiff_t(number), stack->end());
  const c10::DeviceGuard guard(c10::Device(kDeviceType, deviceOf(arguments)));
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  Device& here = device(-1);
  here.touch();
  Stream& stream = currentStream(-1);

  const auto alias_of = aliases(schema);
  const auto signature = signatureOf(kernel, arguments, alias_of);
  std::vector<c10::IValue> made;
  here.count(Counter::launches);
  if (signature->depends_on_data) {
    made = launchAndWait(kernel, asSeenByKernel(schema, arguments, here.index()), alias_of, stream);
  } else {
    if (signature->waits || hasHostIndices(arguments)) {
      synchronizeInOperation(stream, schema.name().c_str());
    }
    resizeWritten(schema, arguments, *signature);
    Results results(alias_of);
    results.allocate(*signature);
    made = results.made();
    Work work;
    work.engine = Engine::kCompute;
    work.seconds = signature->cost.seconds();
    auto seen = asSeenByKernel(schema, arguments, here.index());
    if (settings().computing) {
      work.run = [kernel, seen = std::move(seen), store = results.storing()] { store(call(kernel, seen)); };
    }
    stream.enqueue(std::move(work));
  }
  auto next = made.begin();
  torch::jit::drop(*stack, number);
  for (const int alias : alias_of) {
    stack->push_back(alias >= 0 ? arguments[size_t(alias)] : std::move(*next++));
  }
  raiseLatchedError();
}

c10::OperatorHandle findOperator(const char* name, const char* overload) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
}

}  // namespace sim
