#include "bindings.h"

namespace ft {

void bind_experts(pybind11::module_&) {}

}  // namespace ft
