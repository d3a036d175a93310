#include "bindings.h"

namespace ft {

void bind_machine(pybind11::module_&) {}

}  // namespace ft
