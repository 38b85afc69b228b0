// Copies between host and device, within a device and between two, by the rules of torch for CUDA and of its driver:
// copy engines move contiguous bytes, everything else is made such first; the host waits unless the copy is
// `non_blocking` from or to pinned memory.
#include "cost.h"
#include "pinned.h"
#include "place.h"

#include <ATen/core/op_registration/adaption.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>

namespace sim {

namespace {

bool isPlain(const at::Tensor& source, const at::Tensor& target) {
  return source.scalar_type() == target.scalar_type() && source.is_contiguous() && target.is_contiguous() &&
         source.is_conj() == target.is_conj() && source.is_neg() == target.is_neg();
}

void enqueue(Stream& stream, Engine engine, double seconds, std::function<void()> run) {
  Work work;
  work.engine = engine;
  work.seconds = seconds;
  if (settings().computing) {
    work.run = std::move(run);
  }
  stream.enqueue(std::move(work));
}

// The marks of a lazy conjugate or negative, which `Place` does not know.
at::Tensor marked(at::Tensor tensor, bool is_conj, bool is_neg) {
  tensor._set_conj(is_conj);
  tensor._set_neg(is_neg);
  return tensor;
}

// A kernel, of any strides, dtypes and marks.
void copyWithin(const at::Tensor& source, const at::Tensor& target) {
  const c10::DeviceGuard guard(target.device());
  Device& here = device(-1);
  here.count(Counter::launches);
  enqueue(
      currentStream(-1), Engine::kCompute, memorySeconds(double(source.nbytes()) + double(target.nbytes())),
      [from = Place::of(source), to = Place::of(target), from_conj = source.is_conj(), from_neg = source.is_neg(),
       to_conj = target.is_conj(), to_neg = target.is_neg()] {
        marked(to.tensor(), to_conj, to_neg).copy_(marked(from.tensor(), from_conj, from_neg));
      });
  raiseLatchedError();
}

// In the source's stream, between what the target's was given before and what it is given from now on.
void copyBetween(const at::Tensor& source, const at::Tensor& target) {
  Stream& giver = currentStream(source.device().index());
  Stream& taker = currentStream(target.device().index());
  const size_t bytes = source.nbytes();
  taker.device().touch();
  giver.device().touch();
  taker.device().count(Counter::copies);
  taker.device().count(Counter::peer_bytes, int64_t(bytes));
  giver.waitFor(taker.record());
  enqueue(
      giver, Engine::kPeer, linkSeconds(double(bytes), settings().cost.peer_bytes_per_s),
      [from = Place::of(source).data, to = Place::of(target).data, bytes] { std::memcpy(to, from, bytes); });
  taker.waitFor(giver.record());
}

void copyToDevice(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  const c10::DeviceGuard guard(target.device());
  Device& here = device(-1);
  Stream& stream = currentStream(-1);
  const size_t bytes = source.nbytes();
  const double seconds = linkSeconds(double(bytes), settings().cost.to_device_bytes_per_s);
  char* to = Place::of(target).data;
  const void* from = source.const_data_ptr();
  auto pinned = findPinned(from, bytes);
  here.count(Counter::copies);
  here.count(Counter::to_device_bytes, int64_t(bytes));
  if (pinned) {
    enqueue(stream, Engine::kToDevice, seconds, [pinned, to, from, bytes] {
      pinned->read(to, reinterpret_cast<uintptr_t>(from), bytes);
    });
    pinned->use(stream);
  } else {
    here.count(Counter::pageable_copies);
    here.count(Counter::pageable_bytes, int64_t(bytes));
    if (non_blocking) {
      synchronize(stream);  // the driver's, before it copies into its own pinned memory
    }
    auto staged = std::make_shared<std::vector<char>>(bytes);
    std::memcpy(staged->data(), from, bytes);
    enqueue(stream, Engine::kToDevice, seconds, [staged, to, bytes] { std::memcpy(to, staged->data(), bytes); });
  }
  if (!non_blocking) {
    synchronizeInOperation(stream, "a copy to the device");
  }
}

void copyToHost(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  const c10::DeviceGuard guard(source.device());
  Device& here = device(-1);
  Stream& stream = currentStream(-1);
  const size_t bytes = source.nbytes();
  const double seconds = linkSeconds(double(bytes), settings().cost.to_host_bytes_per_s);
  const char* from = Place::of(source).data;
  void* to = target.mutable_data_ptr();
  auto pinned = findPinned(to, bytes);
  here.count(Counter::copies);
  here.count(Counter::to_host_bytes, int64_t(bytes));
  if (pinned) {
    enqueue(stream, Engine::kToHost, seconds, [pinned, to, from, bytes] {
      pinned->write(reinterpret_cast<uintptr_t>(to), from, bytes);
    });
    pinned->use(stream);
  } else {
    here.count(Counter::pageable_copies);
    here.count(Counter::pageable_bytes, int64_t(bytes));
    enqueue(stream, Engine::kToHost, seconds, [to, from, bytes] { std::memcpy(to, from, bytes); });
  }
  if (!non_blocking) {
    synchronizeInOperation(stream, "a copy to the host");
  } else if (!pinned) {
    synchronize(stream);  // the driver's: the host gets the data from its pinned memory
  }
}

at::Tensor copyFrom(const at::Tensor& given, const at::Tensor& target, bool non_blocking) {
  if (!target.numel()) {
    return target;
  }
  const LaunchTimer timer;
  const at::Tensor source = given.expand_as(target);
  if (isOurs(source) && source.device() == target.device()) {
    copyWithin(source, target);
    return target;
  }
  if (!isPlain(source, target)) {
    const at::Tensor plain_source = source.to(target.scalar_type()).contiguous().resolve_conj().resolve_neg();
    const bool is_plain_target = target.is_contiguous() && !target.is_conj() && !target.is_neg();
    const at::Tensor plain_target = is_plain_target ? target : at::empty_like(target, at::MemoryFormat::Contiguous);
    copyFrom(plain_source, plain_target, non_blocking);
    if (!is_plain_target) {
      at::Tensor(target).copy_(plain_target, non_blocking);
    }
    return target;
  }
  if (isOurs(source) && isOurs(target)) {
    copyBetween(source, target);
  } else if (isOurs(target)) {
    copyToDevice(source, target, non_blocking);
  } else {
    copyToHost(source, target, non_blocking);
  }
  return target;
}

at::Tensor copyFromAndResize(const at::Tensor& source, const at::Tensor& target) {
  at::Tensor(target).resize_(source.sizes());
  return copyFrom(source, target, /*non_blocking=*/false);
}

at::Scalar readNumber(const at::Tensor& tensor) {
  const c10::DeviceGuard guard(tensor.device());
  Device& here = device(-1);
  here.count(Counter::copies);
  here.count(Counter::to_host_bytes, int64_t(tensor.nbytes()));
  synchronizeInOperation(currentStream(-1), "item");
  return Place::of(tensor).tensor().item();
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("_copy_from", copyFrom);
  library.impl("_copy_from_and_resize", copyFromAndResize);
  library.impl("_local_scalar_dense", readNumber);
}

// They are copied as they are; torch's fallback would make a copy without them first, by the same operation.
TORCH_LIBRARY_IMPL(aten, Conjugate, library) { library.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, library) { library.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

}  // namespace sim
