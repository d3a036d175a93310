// Mailbox, slot table, the two servers and the CPU device's client.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "arrays.h"
#include "bindings.h"
#include "cache_server.h"
#include "cpu_server.h"
#include "device_client.h"
#include "mailbox.h"
#include "slot_table.h"

namespace py = pybind11;

namespace ft {
namespace {

std::uint32_t unsigned_argument(const char* name, std::int64_t value) {
  if (value < 0 || value > std::numeric_limits<std::uint32_t>::max()) {
    throw py::value_error(std::string(name) + " " + std::to_string(value) + " is out of range");
  }
  return static_cast<std::uint32_t>(value);
}

MailboxGeometry make_geometry(std::int64_t max_tokens, std::int64_t top_k, std::int64_t hidden, std::int64_t num_layers,
                              std::int64_t num_experts) {
  return MailboxGeometry{unsigned_argument("max_tokens", max_tokens), unsigned_argument("top_k", top_k),
                         unsigned_argument("hidden", hidden), unsigned_argument("num_layers", num_layers),
                         unsigned_argument("num_experts", num_experts)};
}

void forward(DeviceClient& client, int layer, const py::object& hidden_object, const py::object& ids_object,
             const py::object& weights_object, const py::object& admit_object, const py::object& out_object) {
  const auto hidden = view_array<const float>(hidden_object, "hidden", 2);
  const auto ids = view_array<const std::int32_t>(ids_object, "ids", 2);
  const auto weights = view_array<const float>(weights_object, "weights", 2);
  const auto admit = view_array<const std::uint8_t>(admit_object, "admit", 1);
  const auto out = view_array<float>(out_object, "out", 2);
  const MailboxGeometry& geometry = client.geometry();
  const std::int64_t tokens = hidden.shape[0];
  if (tokens > static_cast<std::int64_t>(geometry.max_tokens)) {
    throw py::value_error("hidden has " + std::to_string(tokens) + " tokens; the mailbox holds " +
                          std::to_string(geometry.max_tokens));
  }
  check_extent("hidden", 1, hidden.shape[1], geometry.hidden);
  check_extent("ids", 0, ids.shape[0], tokens);
  check_extent("ids", 1, ids.shape[1], geometry.top_k);
  check_extent("weights", 0, weights.shape[0], tokens);
  check_extent("weights", 1, weights.shape[1], ids.shape[1]);
  check_extent("admit", 0, admit.shape[0], tokens);
  check_extent("out", 0, out.shape[0], tokens);
  check_extent("out", 1, out.shape[1], geometry.hidden);
  py::gil_scoped_release release;
  client.forward(layer, static_cast<int>(tokens), static_cast<int>(ids.shape[1]), hidden.data, ids.data, weights.data,
                 admit.data, out.data);
}

// The Python view of a table that a running server may own.
SlotTable& unowned(SlotTable& table) {
  if (table.is_owned()) throw std::runtime_error("slot table: a running cache server owns it");
  return table;
}

void check_index(const char* name, int value, int limit) {
  if (value < 0 || value >= limit) {
    throw py::value_error(std::string(name) + " " + std::to_string(value) + " is not in 0.." +
                          std::to_string(limit - 1));
  }
}

std::vector<std::pair<int, int>> access(SlotTable& owned_table, int layer, const std::vector<int>& experts,
                                        const std::vector<int>& token_counts, const std::vector<bool>& admit,
                                        int num_tokens) {
  SlotTable& table = unowned(owned_table);
  check_index("layer", layer, table.num_layers());
  check_extent("token_counts", 0, token_counts.size(), experts.size());
  check_extent("admit", 0, admit.size(), experts.size());
  if (num_tokens < 0) throw py::value_error("num_tokens " + std::to_string(num_tokens) + " is negative");
  std::unordered_set<int> seen;
  std::vector<ExpertUse> uses;
  std::vector<ExpertUse*> misses;
  for (std::size_t i = 0; i < experts.size(); ++i) {
    check_index("expert", experts[i], table.num_experts());
    if (!seen.insert(experts[i]).second) {
      throw py::value_error("expert " + std::to_string(experts[i]) + " is named twice");
    }
    if (token_counts[i] < 0 || token_counts[i] > num_tokens) {
      throw py::value_error("token_counts[" + std::to_string(i) + "] " + std::to_string(token_counts[i]) +
                            " is not in 0.." + std::to_string(num_tokens));
    }
    uses.push_back(ExpertUse{.expert = experts[i], .tokens = admit[i] ? token_counts[i] : 0});
  }
  table.begin_publish(layer, uses, num_tokens);
  for (ExpertUse& use : uses) {
    if (use.slot < 0) misses.push_back(&use);
  }
  std::stable_sort(misses.begin(), misses.end(), [&](const ExpertUse* a, const ExpertUse* b) {
    return table.score(layer, a->expert) > table.score(layer, b->expert);
  });
  for (ExpertUse* use : misses) table.admit(layer, *use);
  table.end_publish(layer, uses);
  std::vector<std::pair<int, int>> result;
  for (const ExpertUse& use : uses) result.emplace_back(use.slot, use.destination);
  return result;
}

void bind_mailbox_class(py::module_& m) {
  py::class_<Mailbox, std::shared_ptr<Mailbox>>(m, "Mailbox", py::is_final())
      .def_static(
          "required_bytes",
          [](std::int64_t max_tokens, std::int64_t top_k, std::int64_t hidden, std::int64_t num_experts) {
            return Mailbox::required_bytes(make_geometry(max_tokens, top_k, hidden, 1, num_experts));
          },
          py::arg("max_tokens"), py::arg("top_k"), py::arg("hidden"), py::arg("num_experts"))
      .def_static(
          "create",
          [](std::shared_ptr<SharedSegment> segment, std::int64_t epoch, std::int64_t max_tokens, std::int64_t top_k,
             std::int64_t hidden, std::int64_t num_layers, std::int64_t num_experts) {
            return Mailbox::create(std::move(segment), epoch,
                                   make_geometry(max_tokens, top_k, hidden, num_layers, num_experts));
          },
          py::arg("segment").none(false), py::arg("epoch"), py::arg("max_tokens"), py::arg("top_k"), py::arg("hidden"),
          py::arg("num_layers"), py::arg("num_experts"))
      .def_static("attach", &Mailbox::attach, py::arg("segment").none(false))
      .def_property_readonly("epoch", &Mailbox::epoch)
      .def("abort", [](Mailbox& mailbox) { mailbox.abort(); })
      .def_property_readonly("aborted", &Mailbox::aborted);
}

void bind_slot_table(py::module_& m) {
  py::class_<SlotTable, std::shared_ptr<SlotTable>>(m, "SlotTable", py::is_final())
      .def(py::init(
               [](int num_layers, int num_experts, int num_slots, const std::string& policy, double half_life_tokens) {
                 return std::make_shared<SlotTable>(num_layers, num_experts, num_slots, parse_slot_policy(policy),
                                                    half_life_tokens);
               }),
           py::arg("num_layers"), py::arg("num_experts"), py::arg("num_slots"), py::arg("policy") = "crf",
           py::arg("half_life_tokens") = 32.0)
      .def_property_readonly("num_slots", &SlotTable::num_slots)
      .def_property_readonly("num_resident", [](SlotTable& table) { return unowned(table).num_resident(); })
      .def(
          "lookup",
          [](SlotTable& table, int layer, int expert) {
            check_index("layer", layer, table.num_layers());
            check_index("expert", expert, table.num_experts());
            return unowned(table).lookup(layer, expert);
          },
          py::arg("layer"), py::arg("expert"))
      .def("access", &access, py::arg("layer"), py::arg("experts"), py::arg("token_counts"), py::arg("admit"),
           py::arg("num_tokens"))
      .def("resident",
           [](SlotTable& table) {
             std::vector<std::tuple<int, int, int>> result;
             unowned(table).for_each_resident(
                 [&](int slot, int layer, int expert) { result.emplace_back(slot, layer, expert); });
             return result;
           })
      .def("invalidate_all", [](SlotTable& table) { unowned(table).invalidate_all(); })
      .def("check_integrity", [](SlotTable& table) {
        unowned(table);
        try {
          table.check_integrity();
        } catch (const std::logic_error& error) {
          PyErr_SetString(PyExc_AssertionError, error.what());
          throw py::error_already_set();
        }
      });
}

void bind_servers(py::module_& m) {
  py::class_<CacheServer, std::shared_ptr<CacheServer>>(m, "CacheServer", py::is_final())
      .def(py::init<std::shared_ptr<Mailbox>, std::shared_ptr<SlotTable>, double, bool, int,
                    std::vector<std::int64_t>>(),
           py::arg("mailbox").none(false), py::arg("slots").none(false), py::arg("fetch_fraction"), py::arg("in_place"),
           py::arg("spin_us"), py::arg("record_bytes"))
      .def("start", &CacheServer::start)
      .def("stop", &CacheServer::stop, py::call_guard<py::gil_scoped_release>())
      .def("set_fetch_fraction", &CacheServer::set_fetch_fraction, py::arg("fraction"))
      .def("counters",
           [](const CacheServer& server) {
             const CacheCounters c = server.counters();
             py::dict result;
             result["hits"] = c.hits;
             result["fetches"] = c.fetches;
             result["cpu"] = c.cpu;
             result["admitted"] = c.admitted;
             result["evicted"] = c.evicted;
             result["fetched_bytes"] = c.fetched_bytes;
             result["cpu_bytes"] = c.cpu_bytes;
             result["publishes"] = c.publishes;
             result["resident"] = c.resident;
             result["in_flight"] = c.in_flight;
             return result;
           })
      .def("layer_counters", [](const CacheServer& server) {
        const std::vector<std::int64_t> counts = server.layer_counters();
        py::array_t<std::int64_t> result({static_cast<py::ssize_t>(counts.size() / 3), py::ssize_t{3}});
        std::copy(counts.begin(), counts.end(), result.mutable_data());
        return result;
      });

  py::class_<CpuServer, std::shared_ptr<CpuServer>>(m, "CpuServer", py::is_final())
      .def(py::init<std::shared_ptr<Mailbox>, std::shared_ptr<ExpertStore>, std::shared_ptr<WorkerPool>, int>(),
           py::arg("mailbox").none(false), py::arg("store").none(false), py::arg("pool").none(false),
           py::arg("spin_us"))
      .def("start", &CpuServer::start)
      .def("stop", &CpuServer::stop, py::call_guard<py::gil_scoped_release>())
      .def("counters", [](const CpuServer& server) {
        const CpuCounters c = server.counters();
        py::dict result;
        result["experts"] = c.experts;
        result["routes"] = c.routes;
        result["layers"] = c.layers;
        result["bytes"] = c.bytes;
        result["busy_ns"] = c.busy_ns;
        return result;
      });
}

void bind_device_client(py::module_& m) {
  py::class_<DeviceClient, std::shared_ptr<DeviceClient>>(m, "DeviceClient", py::is_final())
      .def(py::init<std::shared_ptr<Mailbox>, std::shared_ptr<ExpertStore>, std::shared_ptr<SharedSegment>,
                    std::int64_t, std::shared_ptr<WorkerPool>, int, double, bool>(),
           py::arg("mailbox").none(false), py::arg("store").none(false), py::arg("slots").none(true),
           py::arg("slot_stride_bytes"), py::arg("pool").none(false), py::arg("spin_us"), py::arg("wait_timeout_s"),
           py::arg("deterministic"))
      .def(
          "begin_step",
          [](DeviceClient& client, std::int64_t step_id) { client.begin_step(static_cast<std::uint64_t>(step_id)); },
          py::arg("step_id"))
      .def("forward", &forward, py::arg("layer"), py::arg("hidden"), py::arg("ids"), py::arg("weights"),
           py::arg("admit"), py::arg("out"))
      .def("step_counters", [](const DeviceClient& client) {
        const StepCounters& c = client.step_counters();
        py::dict result;
        result["hits"] = c.hits;
        result["fetches"] = c.fetches;
        result["cpu"] = c.cpu;
        result["admitted"] = c.admitted;
        result["evicted"] = c.evicted;
        result["fetched_bytes"] = c.fetched_bytes;
        result["cpu_bytes"] = c.cpu_bytes;
        result["layer_steps"] = c.layer_steps;
        return result;
      });
}

}  // namespace

void bind_mailbox(py::module_& m) {
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const AnswerLate& error) {
      PyErr_SetString(PyExc_TimeoutError, error.what());
    }
  });
  bind_mailbox_class(m);
  bind_slot_table(m);
  bind_servers(m);
  bind_device_client(m);
}

}  // namespace ft
