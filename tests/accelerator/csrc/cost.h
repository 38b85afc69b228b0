// How long a kernel or a copy takes on the device that is played.
#pragma once

#include "settings.h"

#include <ATen/core/stack.h>
#include <c10/util/ArrayRef.h>

#include <string>

namespace sim {

struct KernelCost {
  double flops = 0;
  double bytes = 0;       // read and written, each tensor once
  bool is_half = false;   // a matrix product of 16-bit numbers
  double seconds() const;  // under the present model, latency included
};

// Of an operation with these arguments and results; tensors need only have shapes.
KernelCost costOf(const std::string& name, c10::ArrayRef<c10::IValue> arguments, c10::ArrayRef<c10::IValue> results);

double linkSeconds(double bytes, double bytes_per_s);
double memorySeconds(double bytes);

// Keeps the calling thread busy until a launch that began when this was made has taken its time.
class LaunchTimer {
 public:
  LaunchTimer();
  ~LaunchTimer();

 private:
  int64_t end_ns_ = 0;
};

}  // namespace sim
