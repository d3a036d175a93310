#include "bindings.h"

namespace ft {

void bind_mailbox(pybind11::module_&) {}

}  // namespace ft
