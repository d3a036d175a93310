// Binding functions, one per domain; each is implemented in bind_<domain>.cpp.
#pragma once

#include <pybind11/pybind11.h>

#include "split_planner.h"

namespace ft {

void bind_shared(pybind11::module_& m);
void bind_machine(pybind11::module_& m);
void bind_reading(pybind11::module_& m);
void bind_dense(pybind11::module_& m);
void bind_experts(pybind11::module_& m);
void bind_q4_0(pybind11::module_& m);
void bind_slots(pybind11::module_& m);
void bind_split(pybind11::module_& m);
void bind_mailbox(pybind11::module_& m);

// As the planner and CacheServer show it.
pybind11::dict describe_split(const SplitPlanner::Status& status);

}  // namespace ft
