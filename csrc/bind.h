// Shared parts of the Python module.
#pragma once

#include <nanobind/nanobind.h>
#include <unistd.h>

namespace offload {

// The GIL is free while a kernel runs, so the lanes and the data loader continue.
// A daemon thread that wants it back while the interpreter shuts down is ended by Python before 3.14 with pthread_exit,
// whose unwinding would abort the process at nanobind's noexcept frames. It sleeps until the exit instead, as in 3.14.
struct WithoutGil {
  PyThreadState* state = PyEval_SaveThread();
  ~WithoutGil() {
    try {
      PyEval_RestoreThread(state);
    } catch (...) {
      for (;;) pause();
    }
  }
};

void bind_io(nanobind::module_& module);  // bind_io.cpp

}  // namespace offload
