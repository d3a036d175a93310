#include "bindings.h"

namespace ft {

void bind_dense(pybind11::module_&) {}

}  // namespace ft
