#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "bandwidth.h"
#include "bindings.h"
#include "cpu_info.h"
#include "crc32c.h"
#include "shared_segment.h"
#include "worker_pool.h"

namespace py = pybind11;

namespace ft {
namespace {

py::dict features_dict() {
  const CpuFeatures& features = cpu_features();
  py::dict result;
  result["avx2"] = features.avx2;
  result["f16c"] = features.f16c;
  result["fma"] = features.fma;
  result["avx512f"] = features.avx512f;
  result["avx512bw"] = features.avx512bw;
  result["avx512vl"] = features.avx512vl;
  result["avx512_bf16"] = features.avx512_bf16;
  result["avx512_vnni"] = features.avx512_vnni;
  result["amx_bf16"] = features.amx_bf16;
  result["amx_int8"] = features.amx_int8;
  return result;
}

std::uint32_t crc32c_buffer(const py::object& data, std::uint32_t crc) {
  Py_buffer view;
  if (PyObject_GetBuffer(data.ptr(), &view, PyBUF_C_CONTIGUOUS) != 0) {
    PyErr_Clear();
    throw py::value_error("data must be a C-contiguous buffer");
  }
  struct Release {
    Py_buffer* view;
    ~Release() { PyBuffer_Release(view); }
  } release_view{&view};
  const py::gil_scoped_release release;
  return crc32c(view.buf, static_cast<std::size_t>(view.len), crc);
}

std::shared_ptr<WorkerPool> make_pool(int num_threads, std::vector<int> core_ids, int spin_us, const std::string& isa) {
  auto pool = std::make_shared<WorkerPool>(num_threads, std::move(core_ids), spin_us, resolve_isa(isa));
  for (const std::string& warning : pool->warnings()) {
    if (PyErr_WarnEx(PyExc_RuntimeWarning, warning.c_str(), 1) != 0) throw py::error_already_set();
  }
  return pool;
}

double measure_stream_read(WorkerPool& pool, const SharedSegment& segment, int repetitions) {
  if (repetitions < 1) {
    throw py::value_error("repetitions must be at least 1, got " + std::to_string(repetitions));
  }
  const py::gil_scoped_release release;
  return stream_read_gbps(pool, segment.data(), segment.size_bytes(), repetitions);
}

}  // namespace

void bind_machine(py::module_& m) {
  m.def("cpu_features", &features_dict);
  m.def("physical_cores", &physical_cores);
  m.def("crc32c", &crc32c_buffer, py::arg("data"), py::arg("crc") = 0);

  py::class_<WorkerPool, std::shared_ptr<WorkerPool>>(m, "WorkerPool", py::is_final())
      .def(py::init(&make_pool), py::arg("num_threads"), py::arg("core_ids") = std::vector<int>{},
           py::arg("spin_us") = 0, py::arg("isa") = "auto")
      .def_property_readonly("num_threads", &WorkerPool::num_threads)
      .def_property_readonly("isa", [](const WorkerPool& pool) { return isa_name(pool.isa()); })
      .def("close", &WorkerPool::close, py::call_guard<py::gil_scoped_release>());

  m.def("stream_read_gbps", &measure_stream_read, py::arg("pool"), py::arg("segment"), py::arg("repetitions") = 3);
}

}  // namespace ft
