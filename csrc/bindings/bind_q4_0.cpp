#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <string>

#include "arrays.h"
#include "bindings.h"
#include "q4_0_linear.h"
#include "worker_pool.h"

namespace py = pybind11;

namespace ft {
namespace {

// float16 has no C++ type that NumPy's dtype could be compared with by template.
const std::uint16_t* view_halves(const py::object& object, const char* name, std::int64_t rows, std::int64_t columns) {
  const py::array array = detail::checked_array(object, name, 2);
  if (!array.dtype().equal(py::dtype("float16"))) {
    throw py::value_error(std::string(name) + " must have dtype float16, got " + std::string(py::str(array.dtype())));
  }
  check_extent(name, 0, array.shape(0), rows);
  check_extent(name, 1, array.shape(1), columns);
  return static_cast<const std::uint16_t*>(array.data());
}

void bind_linear_q4_0(WorkerPool& pool, const py::object& x, const py::object& nibbles, const py::object& scales,
                      const py::object& bias, const py::object& out) {
  const auto x_view = view_array<const float>(x, "x", 2);
  const auto nibble_view = view_array<const std::uint8_t>(nibbles, "nibbles", 2);
  const auto out_view = view_array<float>(out, "out", 2);
  const std::int64_t inputs = x_view.shape[1];
  const std::int64_t outputs = nibble_view.shape[0];
  if (inputs < 32 || inputs % 32 != 0) {
    throw py::value_error("x must have a positive multiple of 32 columns, got " + std::to_string(inputs));
  }
  check_extent("nibbles", 1, nibble_view.shape[1], inputs / 2);
  const std::uint16_t* scale_data = view_halves(scales, "scales", outputs, inputs / 32);
  check_extent("out", 0, out_view.shape[0], x_view.shape[0]);
  check_extent("out", 1, out_view.shape[1], outputs);
  const float* bias_data = nullptr;
  if (!bias.is_none()) {
    const auto bias_view = view_array<const float>(bias, "bias", 1);
    check_extent("bias", 0, bias_view.shape[0], outputs);
    bias_data = bias_view.data;
  }
  const py::gil_scoped_release release;
  linear_q4_0(pool, x_view.data, x_view.shape[0], inputs, nibble_view.data, scale_data, outputs, bias_data,
              out_view.data);
}

}  // namespace

void bind_q4_0(py::module_& m) {
  m.def("linear_q4_0", &bind_linear_q4_0, py::arg("pool"), py::arg("x"), py::arg("nibbles"), py::arg("scales"),
        py::arg("bias"), py::arg("out"));
}

}  // namespace ft
