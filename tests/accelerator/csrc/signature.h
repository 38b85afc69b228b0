// What an operation's results are like, found out once for each combination of shapes, dtypes and other arguments.
#pragma once

#include "cost.h"

#include <ATen/core/DimVector.h>
#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/ScalarType.h>

#include <memory>
#include <optional>
#include <vector>

namespace sim {

struct Shape {
  bool is_defined = false;
  at::DimVector sizes, strides;
  at::ScalarType dtype = at::kFloat;
};

struct ResultShape {
  bool is_list = false;
  std::vector<Shape> tensors;  // one, unless a list
};

struct Signature {
  bool depends_on_data = false;        // the shapes of the results do, or a result is a number: the host has to wait
  bool waits = false;                  // the shapes are known, and the host has to wait all the same
  std::vector<ResultShape> results;     // those that are no arguments
  std::vector<at::DimVector> written;   // sizes of the arguments that are written to, which `out=` may have resized
  KernelCost cost;
};

// `alias_of` has an entry for each result: the argument that it is, or -1. Raises what the operation does about its
// arguments' shapes.
std::shared_ptr<const Signature> signatureOf(
    const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments, const std::vector<int>& alias_of);

}  // namespace sim
