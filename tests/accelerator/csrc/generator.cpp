#include "generator.h"

#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>

#include <cstring>
#include <random>

namespace sim {

namespace {

constexpr uint64_t kOffsetsPerDraw = 4;  // Philox gives four numbers an offset; CUDA's are multiples of that

// The finalizer of splitmix64 (Steele, Lea and Flood 2014): seeds that differ in one bit give unrelated ones.
uint64_t mix(uint64_t value) {
  value += 0x9e3779b97f4a7c15;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
  value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
  return value ^ (value >> 31);
}

}  // namespace

Generator::Generator(c10::DeviceIndex index)
    : GeneratorImpl(c10::Device(kDeviceType, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

void Generator::set_current_seed(uint64_t seed) {
  seed_ = seed;
  offset_ = 0;
}

uint64_t Generator::seed() {
  set_current_seed((uint64_t(std::random_device{}()) << 32) | std::random_device{}());
  return seed_;
}

void Generator::set_state(const c10::TensorImpl& state) {
  TORCH_CHECK(state.numel() == 16 && state.dtype() == caffe2::TypeMeta::Make<uint8_t>() && state.device().is_cpu(),
              "the state of a simulated accelerator's generator is 16 bytes on the CPU");
  const auto* bytes = state.data_ptr_impl<uint8_t>();
  std::memcpy(&seed_, bytes, 8);
  std::memcpy(&offset_, bytes + 8, 8);
}

c10::intrusive_ptr<c10::TensorImpl> Generator::get_state() const {
  at::Tensor state(at::detail::empty_cpu({16}, at::kByte));
  auto* bytes = static_cast<uint8_t*>(state.mutable_data_ptr());
  std::memcpy(bytes, &seed_, 8);
  std::memcpy(bytes + 8, &offset_, 8);
  return state.getIntrusivePtr();
}

at::Generator Generator::draw() {
  auto made = at::make_generator<at::CPUGeneratorImpl>(mix(mix(seed_) + offset_));
  offset_ += kOffsetsPerDraw;
  return made;
}

Generator* Generator::clone_impl() const {
  auto* copy = new Generator(device().index());
  copy->seed_ = seed_;
  copy->offset_ = offset_;
  return copy;
}

at::Generator makeGenerator(c10::DeviceIndex index) {
  return at::make_generator<Generator>(index < 0 ? currentDevice() : index);
}

const at::Generator& defaultGenerator(c10::DeviceIndex index) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (int i = 0; i < settings().devices; ++i) {
      made->push_back(makeGenerator(c10::DeviceIndex(i)));
    }
    return made;
  }();
  return all->at(size_t(index < 0 ? currentDevice() : index));
}

at::Generator drawFrom(const std::optional<at::Generator>& given, c10::DeviceIndex index) {
  at::Generator from = given.has_value() && given->defined() ? *given : defaultGenerator(index);
  TORCH_CHECK(from.device().type() == kDeviceType, "Expected a '", c10::Device(kDeviceType),
              "' device type for generator but found '", from.device().type(), "'");
  std::lock_guard<std::mutex> lock(from.mutex());
  return static_cast<Generator*>(from.unsafeGetGeneratorImpl())->draw();
}

}  // namespace sim
