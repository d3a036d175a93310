#include "bindings.h"

namespace ft {

void bind_reading(pybind11::module_&) {}

}  // namespace ft
