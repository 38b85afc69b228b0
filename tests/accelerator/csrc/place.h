// A tensor as a kernel sees it: an address that can be used, and a shape. It holds nothing: as on a real device,
// whoever frees memory that a kernel of another stream still needs has to say so by record_stream.
#pragma once

#include "device.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/DimVector.h>
#include <ATen/ops/from_blob.h>

namespace sim {

inline bool isOurs(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kDeviceType; }

struct Place {
  char* data = nullptr;
  at::DimVector sizes, strides;
  at::ScalarType dtype = at::kFloat;
  bool is_number = false;  // a Python number, which does not take part in type promotion as a tensor does

  static Place of(const at::Tensor& tensor) {
    Place place;
    place.sizes = tensor.sizes();
    place.strides = tensor.strides();
    place.dtype = tensor.scalar_type();
    place.is_number = tensor.unsafeGetTensorImpl()->is_wrapped_number();
    const void* begin = tensor.storage().data();
    if (begin && tensor.numel()) {
      char* base = isOurs(tensor) ? device(tensor.device().index()).heap().real(begin) : (char*)begin;
      place.data = base + tensor.storage_offset() * int64_t(tensor.element_size());
    }
    return place;
  }

  at::Tensor tensor() const {
    at::Tensor made = at::from_blob(data, sizes, strides, at::TensorOptions().dtype(dtype));
    if (is_number) {
      made.unsafeGetTensorImpl()->set_wrapped_number(true);
    }
    return made;
  }
};

}  // namespace sim
