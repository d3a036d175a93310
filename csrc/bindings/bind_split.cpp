// The split planner, for tests and simulations beside the servers that use it.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "bindings.h"
#include "split_planner.h"

namespace py = pybind11;

namespace ft {

py::dict describe_split(const SplitPlanner::Status& status) {
  py::dict d;
  d["layers"] = status.layers;
  d["changes"] = status.changes;
  d["probes"] = status.probes;
  d["live"] = status.live;
  d["applied"] = status.applied;
  d["timings"] = status.timings;
  d["mean_misses"] = status.mean_misses;
  d["mean_fetches"] = status.mean_fetches;
  d["predicted_ns"] = status.predicted_ns;
  d["measured_ns"] = status.measured_ns;
  const SplitPlanner::Change& change = status.last_change;
  py::dict last;
  last["at_layer"] = change.at_layer;
  last["gain"] = change.gain;
  last["before"] = change.before;
  last["after"] = change.after;
  last["fetched_before"] = change.fetched_before;
  last["fetched_after"] = change.fetched_after;
  last["misses"] = change.misses;
  d["last_change"] = last;
  return d;
}

namespace {

// For tests and simulations: the very planner that the server uses. miss_routes in the order of fetching.
int choose_split(SplitPlanner& planner, const std::vector<std::int32_t>& miss_routes, double record_bytes, int num_hits,
                 int hit_extra, int num_fetchable, int num_free_slots) {
  if (num_fetchable < -1 || num_fetchable > static_cast<int>(miss_routes.size())) {
    throw py::value_error("num_fetchable " + std::to_string(num_fetchable) + " is not in 0.." +
                          std::to_string(miss_routes.size()));
  }
  for (const std::int32_t routes : miss_routes) {
    if (routes < 1) throw py::value_error("miss_routes has " + std::to_string(routes) + "; each is at least 1");
  }
  return planner
      .choose(LayerWork{.num_hits = num_hits,
                        .hit_extra = hit_extra,
                        .record_bytes = record_bytes,
                        .miss_routes = miss_routes,
                        .num_fetchable = num_fetchable < 0 ? static_cast<int>(miss_routes.size()) : num_fetchable,
                        .num_free_slots = num_free_slots})
      .whole;
}

}  // namespace

void bind_split(py::module_& m) {
  py::class_<SideCost>(m, "SideCost", py::is_final())
      .def(py::init([](double fixed_ns, double byte_ns, double route_byte_ns) {
             return SideCost{fixed_ns, byte_ns, route_byte_ns};
           }),
           py::arg("fixed_ns"), py::arg("byte_ns"), py::arg("route_byte_ns") = 0.0)
      .def_readonly("fixed_ns", &SideCost::fixed_ns)
      .def_readonly("byte_ns", &SideCost::byte_ns)
      .def_readonly("route_byte_ns", &SideCost::route_byte_ns);
  py::class_<SplitCosts>(m, "SplitCosts", py::is_final())
      .def(py::init([](const SideCost& fetch, const SideCost& fetch_beside, const SideCost& cpu,
                       const SideCost& cpu_beside, double hit_byte_ns, bool hits_load_memory) {
             SplitCosts costs{fetch, fetch_beside, cpu, cpu_beside, hit_byte_ns, hits_load_memory};
             check_split_costs(costs);
             return costs;
           }),
           py::arg("fetch"), py::arg("fetch_beside"), py::arg("cpu"), py::arg("cpu_beside"),
           py::arg("hit_byte_ns") = 0.0, py::arg("hits_load_memory") = false);
  py::class_<LayerShares>(m, "LayerShares", py::is_final())
      .def(py::init([](int num_hits, int num_fetches, int num_cpu, double record_bytes, int hit_extra, int fetch_extra,
                       int cpu_extra) {
             return LayerShares{num_hits, num_fetches, num_cpu, hit_extra, fetch_extra, cpu_extra, record_bytes};
           }),
           py::arg("num_hits"), py::arg("num_fetches"), py::arg("num_cpu"), py::arg("record_bytes"),
           py::arg("hit_extra") = 0, py::arg("fetch_extra") = 0, py::arg("cpu_extra") = 0)
      .def_readonly("num_hits", &LayerShares::num_hits)
      .def_readonly("num_fetches", &LayerShares::num_fetches)
      .def_readonly("num_cpu", &LayerShares::num_cpu)
      .def_readonly("hit_extra", &LayerShares::hit_extra)
      .def_readonly("fetch_extra", &LayerShares::fetch_extra)
      .def_readonly("cpu_extra", &LayerShares::cpu_extra)
      .def_readonly("record_bytes", &LayerShares::record_bytes)
      .def_readonly("split_part", &LayerShares::split_part)
      .def_readonly("split_extra", &LayerShares::split_extra);
  py::class_<SplitPlanner>(m, "SplitPlanner", py::is_final())
      .def(py::init<const SplitCosts&>(), py::arg("costs"))
      .def("choose", &choose_split, py::arg("miss_routes"), py::arg("record_bytes"), py::arg("num_hits") = 0,
           py::arg("hit_extra") = 0, py::arg("num_fetchable") = -1, py::arg("num_free_slots") = 0)
      .def("follow", &SplitPlanner::follow, py::arg("shares"))
      .def(
          "observe",
          [](SplitPlanner& planner, const LayerShares& shares, double device_ns, double cpu_ns, double wait_ns,
             double start_ns) { planner.observe(SplitTiming{shares, device_ns, wait_ns, cpu_ns, start_ns}); },
          py::arg("shares"), py::arg("device_ns"), py::arg("cpu_ns"), py::arg("wait_ns") = 0.0,
          py::arg("start_ns") = 0.0)
      .def(
          "best",
          [](SplitPlanner& planner, const std::vector<std::int32_t>& miss_routes, double record_bytes, int num_hits) {
            return planner.best(LayerWork{.num_hits = num_hits,
                                          .record_bytes = record_bytes,
                                          .miss_routes = miss_routes,
                                          .num_fetchable = static_cast<int>(miss_routes.size())},
                                planner.status().applied);
          },
          py::arg("miss_routes"), py::arg("record_bytes"), py::arg("num_hits") = 0)
      .def("device_ns", &SplitPlanner::device_ns, py::arg("shares"), py::arg("factors"))
      .def("cpu_ns", &SplitPlanner::cpu_ns, py::arg("shares"), py::arg("factors"))
      .def("status", [](const SplitPlanner& planner) { return describe_split(planner.status()); });
}

}  // namespace ft
