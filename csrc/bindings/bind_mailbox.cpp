// Mailbox, the two servers and the CPU device's client.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstddef>
#include <limits>
#include <memory>
#include <string>
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

const std::vector<std::pair<std::string, AbortReason>> kAbortNames = {
    {"requested", AbortReason::kRequested},
    {"bad_publish", AbortReason::kBadPublish},
    {"plan_late", AbortReason::kPlanLate},
    {"partial_late", AbortReason::kPartialLate},
    {"client_failed", AbortReason::kClientFailed},
    {"cache_failed", AbortReason::kCacheFailed},
    {"cpu_failed", AbortReason::kCpuFailed},
    {"not_fetchable", AbortReason::kNotFetchable},
    {"no_bell", AbortReason::kNoBell},
};

std::uint32_t unsigned_argument(const char* name, std::int64_t value) {
  if (value < 0 || value > std::numeric_limits<std::uint32_t>::max()) {
    throw py::value_error(std::string(name) + " " + std::to_string(value) + " is out of range");
  }
  return static_cast<std::uint32_t>(value);
}

MailboxGeometry make_geometry(std::int64_t max_tokens, std::int64_t top_k, std::int64_t hidden, std::int64_t num_layers,
                              std::int64_t num_experts, std::int64_t max_shared_tokens, bool route_rows) {
  return MailboxGeometry{unsigned_argument("max_tokens", max_tokens),
                         unsigned_argument("top_k", top_k),
                         unsigned_argument("hidden", hidden),
                         unsigned_argument("num_layers", num_layers),
                         unsigned_argument("num_experts", num_experts),
                         unsigned_argument("max_shared_tokens", max_shared_tokens),
                         route_rows ? 1u : 0u};
}

// Everything a client without this library needs. Names: X_offset from the start of the segment, X_field within its
// struct, X_bytes the size of one, flag_X, kind_X and abort_X values, the rest geometry.
py::dict describe_layout(const Mailbox& mailbox) {
  const MailboxGeometry& g = mailbox.geometry();
  const MailboxOffsets& o = mailbox.offsets();
  py::dict d;
  d["version"] = kMailboxVersion;
  d["max_tokens"] = g.max_tokens;
  d["top_k"] = g.top_k;
  d["hidden"] = g.hidden;
  d["num_layers"] = g.num_layers;
  d["num_experts"] = g.num_experts;
  d["max_shared_tokens"] = g.max_shared_tokens;
  d["route_rows"] = g.route_rows;
  d["max_entries"] = mailbox.max_entries();

  d["total_bytes"] = o.total_bytes;
  d["req_offset"] = o.req + offsetof(Word, value);
  d["plan_offset"] = o.plan + offsetof(Word, value);
  d["part_offset"] = o.part + offsetof(Word, value);
  d["hint_offset"] = o.hint + offsetof(Word, value);
  d["abort_offset"] = o.abort;
  d["request_offset"] = o.request;
  d["hint_request_offset"] = o.hint_request;
  d["hidden_offset"] = o.hidden;
  d["ids_offset"] = o.ids;
  d["weights_offset"] = o.weights;
  d["admit_offset"] = o.admit;
  d["plan_header_offset"] = o.plan_header;
  d["entries_offset"] = o.entries;
  d["routes_offset"] = o.routes;
  d["brief_offset"] = o.brief;
  d["ahead_offset"] = o.ahead;
  d["slot_of_offset"] = o.slot_of;
  d["stamps_offset"] = o.stamps;
  d["partial_offset"] = o.partial;

  d["request_bytes"] = sizeof(RequestHeader);
  d["request_seq_field"] = offsetof(RequestHeader, seq);
  d["request_layer_field"] = offsetof(RequestHeader, layer);
  d["request_step_id_field"] = offsetof(RequestHeader, step_id);
  d["request_num_tokens_field"] = offsetof(RequestHeader, num_tokens);
  d["request_top_k_field"] = offsetof(RequestHeader, top_k);
  d["request_flags_field"] = offsetof(RequestHeader, flags);

  d["max_hinted"] = kMaxHinted;
  d["hint_step_id_field"] = offsetof(HintRequest, step_id);
  d["hint_layer_field"] = offsetof(HintRequest, layer);
  d["hint_num_ids_field"] = offsetof(HintRequest, num_ids);
  d["hint_ids_field"] = offsetof(HintRequest, ids);

  d["plan_header_bytes"] = sizeof(PlanHeader);
  d["plan_seq_field"] = offsetof(PlanHeader, seq);
  d["plan_num_hits_field"] = offsetof(PlanHeader, num_hits);
  d["plan_num_fetches_field"] = offsetof(PlanHeader, num_fetches);
  d["plan_num_cpu_field"] = offsetof(PlanHeader, num_cpu);
  d["plan_num_routes_field"] = offsetof(PlanHeader, num_routes);
  d["plan_num_admitted_field"] = offsetof(PlanHeader, num_admitted);
  d["plan_num_evicted_field"] = offsetof(PlanHeader, num_evicted);
  d["plan_num_split_field"] = offsetof(PlanHeader, num_split);
  d["plan_split_tiles_field"] = offsetof(PlanHeader, split_tiles);

  d["entry_bytes"] = sizeof(PlanEntry);
  d["entry_expert_field"] = offsetof(PlanEntry, expert);
  d["entry_kind_field"] = offsetof(PlanEntry, kind);
  d["entry_source_slot_field"] = offsetof(PlanEntry, source_slot);
  d["entry_destination_slot_field"] = offsetof(PlanEntry, destination_slot);
  d["entry_first_route_field"] = offsetof(PlanEntry, first_route);
  d["entry_num_routes_field"] = offsetof(PlanEntry, num_routes);
  d["entry_first_tile_field"] = offsetof(PlanEntry, first_tile);
  d["entry_num_tiles_field"] = offsetof(PlanEntry, num_tiles);

  d["stamps_bytes"] = sizeof(LayerStamps);
  d["stamps_client_field"] = offsetof(LayerStamps, client);

  d["flag_deterministic"] = static_cast<std::uint32_t>(kDeterministic);
  d["flag_device_only"] = static_cast<std::uint32_t>(kDeviceOnly);
  d["flag_device_client"] = static_cast<std::uint32_t>(kDeviceClient);
  d["flag_splittable"] = static_cast<std::uint32_t>(kSplittable);
  d["flag_staged"] = static_cast<std::uint32_t>(kStaged);
  d["kind_hit"] = static_cast<std::int32_t>(EntryKind::kHit);
  d["kind_fetch"] = static_cast<std::int32_t>(EntryKind::kFetch);
  d["kind_ahead"] = static_cast<std::int32_t>(EntryKind::kAhead);
  d["kind_cpu"] = static_cast<std::int32_t>(EntryKind::kCpu);
  for (const auto& [name, reason] : kAbortNames) d[("abort_" + name).c_str()] = static_cast<std::uint32_t>(reason);
  return d;
}

AbortReason parse_abort_reason(const std::string& name) {
  for (const auto& [known, reason] : kAbortNames) {
    if (known == name) return reason;
  }
  throw py::value_error("reason '" + name + "' is not the name of an abort reason");
}

const char* overdue_party(Mailbox& mailbox) {
  switch (mailbox.overdue()) {
    case AbortReason::kPlanLate:
      return "ExpertCache";
    case AbortReason::kPartialLate:
      return "CpuExecutor";
    default:
      return "";
  }
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

void bind_mailbox_class(py::module_& m) {
  py::class_<Mailbox, std::shared_ptr<Mailbox>>(m, "Mailbox", py::is_final())
      .def_static(
          "required_bytes",
          [](std::int64_t max_tokens, std::int64_t top_k, std::int64_t hidden, std::int64_t num_layers,
             std::int64_t num_experts, std::int64_t max_shared_tokens, bool route_rows) {
            return Mailbox::required_bytes(
                make_geometry(max_tokens, top_k, hidden, num_layers, num_experts, max_shared_tokens, route_rows));
          },
          py::arg("max_tokens"), py::arg("top_k"), py::arg("hidden"), py::arg("num_layers"), py::arg("num_experts"),
          py::arg("max_shared_tokens") = 0, py::arg("route_rows") = true)
      .def_static(
          "create",
          [](std::shared_ptr<SharedSegment> segment, std::int64_t epoch, std::int64_t max_tokens, std::int64_t top_k,
             std::int64_t hidden, std::int64_t num_layers, std::int64_t num_experts, std::int64_t max_shared_tokens,
             bool route_rows) {
            return Mailbox::create(
                std::move(segment), epoch,
                make_geometry(max_tokens, top_k, hidden, num_layers, num_experts, max_shared_tokens, route_rows));
          },
          py::arg("segment").none(false), py::arg("epoch"), py::arg("max_tokens"), py::arg("top_k"), py::arg("hidden"),
          py::arg("num_layers"), py::arg("num_experts"), py::arg("max_shared_tokens") = 0, py::arg("route_rows") = true)
      .def_static("attach", &Mailbox::attach, py::arg("segment").none(false))
      .def_property_readonly("epoch", &Mailbox::epoch)
      .def_property_readonly("segment", &Mailbox::segment)
      .def("layout", &describe_layout)
      .def("stamps",
           [](Mailbox& mailbox) {
             const py::ssize_t layers = mailbox.geometry().num_layers;
             py::array_t<std::int64_t> result({layers, py::ssize_t{8}});
             std::int64_t* out = result.mutable_data();
             const auto put = [&out](const std::atomic<std::int64_t>& ns) {
               *out++ = ns.load(std::memory_order_relaxed);
             };
             for (std::uint32_t layer = 0; layer < layers; ++layer) {
               const LayerStamps& s = mailbox.stamps(layer);
               for (const auto* ns : {&s.cache.seen, &s.cache.planned, &s.cpu.taken, &s.cpu.done, &s.client.published,
                                      &s.client.planned, &s.client.own, &s.client.part}) {
                 put(*ns);
               }
             }
             return result;
           })
      .def(
          "abort", [](Mailbox& mailbox, const std::string& reason) { mailbox.abort(parse_abort_reason(reason)); },
          py::arg("reason") = "requested")
      .def_property_readonly("aborted", &Mailbox::aborted)
      .def_property_readonly(
          "abort_reason",
          [](const Mailbox& mailbox) { return mailbox.aborted() ? abort_reason_text(mailbox.abort_reason()) : ""; })
      .def_property_readonly("overdue", &overdue_party);
}

void bind_servers(py::module_& m) {
  py::class_<CacheServer, std::shared_ptr<CacheServer>>(m, "CacheServer", py::is_final())
      .def(py::init([](std::shared_ptr<Mailbox> mailbox, std::shared_ptr<SlotTable> slots, double fetch_fraction,
                       bool in_place, int spin_us, std::vector<std::int64_t> record_bytes, bool device_client,
                       const py::object& fetchable, std::vector<std::int32_t> num_tiles) {
             std::vector<std::uint8_t> mask;
             if (!fetchable.is_none()) {
               const auto view = view_array<const bool>(fetchable, "fetchable", 2);
               check_extent("fetchable", 0, view.shape[0], mailbox->geometry().num_layers);
               check_extent("fetchable", 1, view.shape[1], mailbox->geometry().num_experts);
               mask.assign(view.data, view.data + view.size);
             }
             return std::make_shared<CacheServer>(std::move(mailbox), std::move(slots), fetch_fraction, in_place,
                                                  spin_us, std::move(record_bytes), device_client, std::move(mask),
                                                  std::move(num_tiles));
           }),
           py::arg("mailbox").none(false), py::arg("slots").none(false), py::arg("fetch_fraction"), py::arg("in_place"),
           py::arg("spin_us"), py::arg("record_bytes"), py::arg("device_client") = false,
           py::arg("fetchable") = py::none(), py::arg("num_tiles") = std::vector<std::int32_t>{})
      .def("start", &CacheServer::start)
      .def("stop", &CacheServer::stop, py::call_guard<py::gil_scoped_release>())
      .def("notice", &CacheServer::notice)
      .def("rest", &CacheServer::rest)
      .def("set_fetch_fraction", &CacheServer::set_fetch_fraction, py::arg("fraction"))
      .def("set_auto_split", &CacheServer::set_auto_split, py::arg("costs"))
      .def("watch_rates", &CacheServer::watch_rates, py::arg("costs"))
      .def("split_status",
           [](const CacheServer& server) -> py::object {
             const std::optional<SplitPlanner::Status> status = server.split_status();
             return status ? py::object(describe_split(*status)) : py::none();
           })
      .def("set_lookahead", &CacheServer::set_lookahead, py::arg("on"))
      .def("lookahead_status",
           [](const CacheServer& server) {
             const CacheServer::LookaheadStatus status = server.lookahead_status();
             py::dict result;
             result["accuracy"] = status.accuracy;
             result["idle_ns"] = status.idle_ns;
             return result;
           })
      .def("vacate", &CacheServer::vacate, py::arg("num_slots"), py::call_guard<py::gil_scoped_release>())
      .def("finish_vacate", &CacheServer::finish_vacate, py::call_guard<py::gil_scoped_release>())
      .def("cancel_vacate", &CacheServer::cancel_vacate, py::call_guard<py::gil_scoped_release>())
      .def("empty", &CacheServer::empty, py::arg("num_slots"), py::call_guard<py::gil_scoped_release>())
      .def("grow", &CacheServer::grow, py::arg("num_slots"), py::call_guard<py::gil_scoped_release>())
      .def(
          "score_curve",
          [](CacheServer& server, const std::vector<std::int64_t>& capacities) {
            return score_curve(server.scores(), capacities);
          },
          py::arg("capacities"), py::call_guard<py::gil_scoped_release>())
      .def(
          "log_routes",
          [](CacheServer& server, const std::string& mode, const std::vector<int>& sampled_layers) {
            using Mode = RouteLog::Mode;
            if (mode != "off" && mode != "sample" && mode != "all") {
              throw py::value_error("mode '" + mode + "' is not 'off', 'sample' or 'all'");
            }
            const py::gil_scoped_release release;  // it waits for whoever drains the log
            server.route_log().set_mode(mode == "off"      ? Mode::kOff
                                        : mode == "sample" ? Mode::kSample
                                                           : Mode::kAll,
                                        sampled_layers);
          },
          py::arg("mode"), py::arg("sampled_layers"))
      .def("drain_routes",
           [](CacheServer& server) {
             std::string records;
             {
               py::gil_scoped_release release;
               records = server.route_log().drain();
             }
             return py::bytes(records);
           })
      .def_property_readonly("dropped_routes", [](CacheServer& server) { return server.route_log().num_dropped(); })
      .def("counters",
           [](const CacheServer& server) {
             const CacheCounters c = server.counters();
             py::dict result;
             result["hits"] = c.hits;
             result["fetches"] = c.fetches;
             result["cpu"] = c.cpu;
             result["split"] = c.split;
             result["admitted"] = c.admitted;
             result["evicted"] = c.evicted;
             result["fetched_bytes"] = c.fetched_bytes;
             result["cpu_bytes"] = c.cpu_bytes;
             result["publishes"] = c.publishes;
             result["resident"] = c.resident;
             result["in_flight"] = c.in_flight;
             result["hints"] = c.hints;
             result["copied_ahead"] = c.copied_ahead;
             result["used_ahead"] = c.used_ahead;
             result["plan_ns"] = c.plan_ns;
             result["own_timed"] = c.timing.own;
             result["own_ns"] = c.timing.own_ns;
             result["cpu_timed"] = c.timing.cpu;
             result["cpu_ns"] = c.timing.cpu_ns;
             result["cpu_start_ns"] = c.timing.start_ns;
             result["cpu_wait_ns"] = c.timing.wait_ns;
             result["turn_ns"] = c.timing.turn_ns;
             return result;
           })
      .def("layer_counters", [](const CacheServer& server) {
        const std::vector<std::int64_t> counts = server.layer_counters();
        py::array_t<std::int64_t> result({static_cast<py::ssize_t>(counts.size() / 3), py::ssize_t{3}});
        std::copy(counts.begin(), counts.end(), result.mutable_data());
        return result;
      });

  py::class_<CpuServer, std::shared_ptr<CpuServer>>(m, "CpuServer", py::is_final())
      .def(py::init<std::shared_ptr<Mailbox>, std::shared_ptr<ExpertStore>, std::shared_ptr<WorkerPool>, int, bool>(),
           py::arg("mailbox").none(false), py::arg("store").none(false), py::arg("pool").none(false),
           py::arg("spin_us"), py::arg("device_client") = false)
      .def("start", &CpuServer::start)
      .def("stop", &CpuServer::stop, py::call_guard<py::gil_scoped_release>())
      .def("notice", &CpuServer::notice)
      .def("rest", &CpuServer::rest)
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
      .def("set_num_slots", &DeviceClient::set_num_slots, py::arg("num_slots"))
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
  bind_servers(m);
  bind_device_client(m);
}

}  // namespace ft
