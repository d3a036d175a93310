// Checked views of numpy arguments: a wrong dtype, rank, shape or contiguity is a ValueError naming the argument.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "record_layout.h"

namespace ft {

template <typename T>
struct ArrayView {
  T* data = nullptr;
  std::array<std::int64_t, 4> shape = {};
  std::int64_t size = 0;
};

struct WeightView {
  const std::byte* data = nullptr;
  DType dtype = DType::kF32;
  std::array<std::int64_t, 4> shape = {};
};

namespace detail {

inline pybind11::array checked_array(const pybind11::handle& object, const char* name, int rank) {
  if (!pybind11::isinstance<pybind11::array>(object)) {
    throw pybind11::value_error(std::string(name) + " must be a numpy array");
  }
  auto array = pybind11::reinterpret_borrow<pybind11::array>(object);
  if (array.ndim() != rank) {
    throw pybind11::value_error(std::string(name) + " must have " + std::to_string(rank) + " dimensions, got " +
                                std::to_string(array.ndim()));
  }
  if ((array.flags() & pybind11::array::c_style) == 0) {
    throw pybind11::value_error(std::string(name) + " must be C-contiguous");
  }
  return array;
}

}  // namespace detail

// T const: read only. T mutable: the array must be writeable.
template <typename T>
ArrayView<T> view_array(const pybind11::handle& object, const char* name, int rank) {
  using Plain = std::remove_const_t<T>;
  pybind11::array array = detail::checked_array(object, name, rank);
  if (!array.dtype().equal(pybind11::dtype::of<Plain>())) {
    throw pybind11::value_error(std::string(name) + " must have dtype " +
                                std::string(pybind11::str(pybind11::dtype::of<Plain>())) + ", got " +
                                std::string(pybind11::str(array.dtype())));
  }
  ArrayView<T> view;
  if constexpr (std::is_const_v<T>) {
    view.data = static_cast<T*>(array.data());
  } else {
    if (!array.writeable()) throw pybind11::value_error(std::string(name) + " must be writeable");
    view.data = static_cast<T*>(array.mutable_data());
  }
  for (int i = 0; i < rank; ++i) view.shape[i] = array.shape(i);
  view.size = array.size();
  return view;
}

// float32, or uint16 holding BF16.
inline WeightView view_weights(const pybind11::handle& object, const char* name, int rank) {
  pybind11::array array = detail::checked_array(object, name, rank);
  WeightView view;
  if (array.dtype().equal(pybind11::dtype::of<float>())) {
    view.dtype = DType::kF32;
  } else if (array.dtype().equal(pybind11::dtype::of<std::uint16_t>())) {
    view.dtype = DType::kBF16;
  } else {
    throw pybind11::value_error(std::string(name) + " must have dtype float32 or uint16 (BF16), got " +
                                std::string(pybind11::str(array.dtype())));
  }
  view.data = static_cast<const std::byte*>(array.data());
  for (int i = 0; i < rank; ++i) view.shape[i] = array.shape(i);
  return view;
}

inline void check_extent(const char* name, int axis, std::int64_t actual, std::int64_t expected) {
  if (actual == expected) return;
  throw pybind11::value_error(std::string(name) + " must have " + std::to_string(expected) + " entries along axis " +
                              std::to_string(axis) + ", got " + std::to_string(actual));
}

inline DType parse_dtype(const std::string& name, const char* argument) {
  if (name == "f32") return DType::kF32;
  if (name == "bf16") return DType::kBF16;
  throw pybind11::value_error(std::string(argument) + " must be 'f32' or 'bf16', got '" + name + "'");
}

}  // namespace ft
