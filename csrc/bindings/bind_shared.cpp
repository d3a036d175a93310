#include "bindings.h"

namespace ft {

void bind_shared(pybind11::module_&) {}

}  // namespace ft
