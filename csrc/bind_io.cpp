// The I/O engines as Python sees them. offload/native/io.py holds on to the memory and the files of every request.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>

#include <memory>
#include <tuple>
#include <utility>

#include "bind.h"
#include "io_engine.h"

namespace nb = nanobind;

namespace offload {
namespace {

std::pair<std::unique_ptr<IoEngine>, int> py_io_engine(bool use_io_uring, int depth, int64_t block_bytes) {
  const WithoutGil no_gil;
  int error = 0;
  const IoOptions options{depth, block_bytes};
  auto engine = use_io_uring ? make_io_uring(options, &error) : make_io_threads(options, &error);
  return {std::move(engine), error};
}

std::shared_ptr<IoRequest> py_submit(IoEngine& engine, bool is_write, int fd, int64_t offset, uintptr_t address,
                                     int64_t bytes) {
  return engine.submit(is_write, fd, offset, reinterpret_cast<void*>(address), bytes);
}

std::tuple<int, int64_t, int64_t, int64_t> py_wait(IoEngine& engine, const IoRequest& request) {
  IoResult result;
  if (engine.is_done(request)) {  // giving the GIL away can mean waiting long for its return
    result = engine.wait(request);
  } else {
    const WithoutGil no_gil;
    result = engine.wait(request);
  }
  return {result.error, result.offset, result.bytes, result.moved};
}

std::pair<int64_t, int> py_add_memory(IoEngine& engine, uintptr_t address, int64_t bytes) {
  const WithoutGil no_gil;
  int64_t registered_bytes = 0;
  const int error = engine.add_memory(reinterpret_cast<void*>(address), bytes, &registered_bytes);
  return {registered_bytes, error};
}

void py_close(IoEngine& engine) {
  const WithoutGil no_gil;
  engine.close();
}

}  // namespace

void bind_io(nb::module_& module) {
  nb::class_<IoRequest>(module, "IoRequest");
  nb::class_<IoEngine>(module, "IoEngine")
      .def("submit", &py_submit)
      .def("wait", &py_wait)
      .def("is_done", &IoEngine::is_done)
      .def("add_file", &IoEngine::add_file)
      .def("remove_file", &IoEngine::remove_file)
      .def("add_memory", &py_add_memory)
      .def("close", &py_close);
  module.def("io_engine", &py_io_engine);
}

}  // namespace offload
