#include <pybind11/pybind11.h>

#include <cerrno>
#include <string>
#include <system_error>

#include "bindings.h"
#include "shared_segment.h"

namespace py = pybind11;

namespace ft {
namespace {

// std::system_error becomes OSError with its errno (hence FileNotFoundError and kin), or MemoryError.
void translate_system_error(std::exception_ptr pointer) {
  if (!pointer) return;
  try {
    std::rethrow_exception(pointer);
  } catch (const std::system_error& error) {
    if (error.code() == std::errc::not_enough_memory) {
      PyErr_SetString(PyExc_MemoryError, error.what());
    } else {
      PyErr_SetObject(PyExc_OSError, py::make_tuple(error.code().value(), error.what()).ptr());
    }
  }
}

std::string describe(const SharedSegment& segment) {
  return "<SharedSegment " + segment.name() + " " + std::to_string(segment.size_bytes()) + " bytes>";
}

}  // namespace

void bind_shared(py::module_& m) {
  py::register_exception_translator(translate_system_error);

  py::class_<SharedSegment, std::shared_ptr<SharedSegment>>(m, "SharedSegment", py::buffer_protocol(), py::is_final())
      .def_static("create", &SharedSegment::create, py::arg("name"), py::arg("size_bytes"))
      .def_static("attach", &SharedSegment::attach, py::arg("fd"), py::arg("size_bytes"), py::arg("name") = "")
      .def_static("reserve", &SharedSegment::reserve, py::arg("name"), py::arg("size_bytes"))
      .def("map", &SharedSegment::map, py::arg("offset"), py::arg("size_bytes"), py::arg("source"),
           py::arg("source_offset"), py::call_guard<py::gil_scoped_release>())
      .def("unmap", &SharedSegment::unmap, py::arg("offset"), py::arg("size_bytes"),
           py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("fd", &SharedSegment::fd)
      .def_property_readonly("name", &SharedSegment::name)
      .def_property_readonly("size_bytes", &SharedSegment::size_bytes)
      .def("populate",
           [](SharedSegment& segment) {
             try {
               const py::gil_scoped_release release;
               segment.populate();
             } catch (const std::system_error& error) {
               if (error.code().value() != ENOMEM && error.code().value() != ENOSPC) throw;
               PyErr_SetString(PyExc_MemoryError, error.what());
               throw py::error_already_set();
             }
           })
      .def("__repr__", &describe)
      .def_buffer([](SharedSegment& segment) {
        return py::buffer_info(reinterpret_cast<std::uint8_t*>(segment.data()),
                               static_cast<py::ssize_t>(segment.size_bytes()));
      });
}

}  // namespace ft
