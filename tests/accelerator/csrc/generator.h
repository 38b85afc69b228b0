// Random numbers by a seed and an offset that live on the host, as Philox's do: each operation that draws takes the
// next offsets when it is launched, so that numbers depend on the order of launches and on nothing else.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/GeneratorImpl.h>

#include <optional>

namespace sim {

class Generator final : public c10::GeneratorImpl {
 public:
  explicit Generator(c10::DeviceIndex index);

  void set_current_seed(uint64_t seed) override;
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override;
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  void set_state(const c10::TensorImpl& state) override;  // uint8[16]: seed, offset
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;

  at::Generator draw();  // a CPU generator for one operation

 private:
  Generator* clone_impl() const override;

  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;
};

const at::Generator& defaultGenerator(c10::DeviceIndex index);  // negative: of the current device
at::Generator makeGenerator(c10::DeviceIndex index);
// The CPU generator for an operation that is being launched, from the generator that it was given or the device's own.
at::Generator drawFrom(const std::optional<at::Generator>& given, c10::DeviceIndex index);

}  // namespace sim
