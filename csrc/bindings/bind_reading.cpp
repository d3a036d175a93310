#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <string>

#include "arrays.h"
#include "bindings.h"
#include "crc32c.h"
#include "direct_reader.h"
#include "shared_segment.h"
#include "worker_pool.h"

namespace py = pybind11;

namespace ft {
namespace {

constexpr int kSignalPollMs = 100;

// Waits without the GIL, but lets Ctrl-C through.
void wait_for_reader(DirectReader& reader) {
  for (;;) {
    bool done = false;
    {
      const py::gil_scoped_release release;
      done = reader.wait_for(kSignalPollMs);
    }
    if (done) return;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }
}

py::array_t<std::uint32_t> checksum_ranges(const SharedSegment& segment, const py::object& offsets,
                                           const py::object& sizes, int num_threads) {
  const auto offset_view = view_array<const std::int64_t>(offsets, "offsets", 1);
  const auto size_view = view_array<const std::int64_t>(sizes, "sizes", 1);
  const std::int64_t count = offset_view.shape[0];
  check_extent("sizes", 0, size_view.shape[0], count);
  const auto segment_size = static_cast<std::int64_t>(segment.size_bytes());
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t offset = offset_view.data[i];
    const std::int64_t size = size_view.data[i];
    if (offset < 0 || offset > segment_size) {
      throw py::value_error("offsets[" + std::to_string(i) + "] is " + std::to_string(offset) +
                            ", outside the segment of " + std::to_string(segment_size) + " bytes");
    }
    if (size < 0 || size > segment_size - offset) {
      throw py::value_error("sizes[" + std::to_string(i) + "] is " + std::to_string(size) + " at offset " +
                            std::to_string(offset) + ", outside the segment of " + std::to_string(segment_size) +
                            " bytes");
    }
  }
  py::array_t<std::uint32_t> result(count);
  std::uint32_t* out = result.mutable_data();
  const py::gil_scoped_release release;
  WorkerPool pool(num_threads, {}, 0, Isa::kScalar);
  pool.parallel_for(count, 1, [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t i = begin; i < end; ++i) {
      out[i] = crc32c(segment.data() + offset_view.data[i], static_cast<std::size_t>(size_view.data[i]));
    }
  });
  return result;
}

}  // namespace

void bind_reading(py::module_& m) {
  py::class_<DirectReader, std::shared_ptr<DirectReader>>(m, "DirectReader", py::is_final())
      .def(py::init<int, std::size_t, bool>(), py::arg("num_threads"), py::arg("chunk_bytes"), py::arg("direct") = true)
      .def("submit", &DirectReader::submit, py::arg("path"), py::arg("size_bytes"), py::arg("destination").none(false),
           py::arg("destination_offset") = 0, py::call_guard<py::gil_scoped_release>())
      .def("progress", &DirectReader::progress)
      .def("wait", &wait_for_reader)
      .def_property_readonly("used_direct", &DirectReader::used_direct)
      .def("cancel", &DirectReader::cancel, py::call_guard<py::gil_scoped_release>());

  m.def("crc32c_ranges", &checksum_ranges, py::arg("segment"), py::arg("offsets"), py::arg("sizes"),
        py::arg("num_threads"));
}

}  // namespace ft
