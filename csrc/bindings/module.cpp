// The extension module freetoken._native: one binding function per domain.
#include <pybind11/pybind11.h>

#include "bindings.h"

PYBIND11_MODULE(_native, m) {
  m.doc() = "Native core of FreeToken; see freetoken/_native.pyi for the typed surface.";
  ft::bind_shared(m);
  ft::bind_machine(m);
  ft::bind_reading(m);
  ft::bind_dense(m);
  ft::bind_experts(m);
  ft::bind_q4_0(m);
  ft::bind_slots(m);
  ft::bind_split(m);
  ft::bind_mailbox(m);
}
