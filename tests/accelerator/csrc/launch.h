// Running any of torch's operations on the device: torch's CPU kernel, in the current stream's thread.
#pragma once

#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace sim {

// A boxed kernel for every operation: takes the arguments from the stack, leaves the results there. `kernel` may be
// another operation with the same arguments and results.
void launch(const c10::OperatorHandle& kernel, torch::jit::Stack* stack);

c10::OperatorHandle findOperator(const char* name, const char* overload = "");

}  // namespace sim
