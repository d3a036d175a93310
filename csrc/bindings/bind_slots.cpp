// Slot table, and the replay of recorded publishes through planner and table.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "arrays.h"
#include "bindings.h"
#include "layer_planner.h"
#include "mailbox.h"
#include "slot_table.h"

namespace py = pybind11;

namespace ft {
namespace {

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
                                        int num_tokens, bool is_run) {
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
    const int tokens = admit[i] ? token_counts[i] : 0;
    uses.push_back(ExpertUse{.expert = experts[i], .tokens = is_run ? 0 : tokens, .run_tokens = is_run ? tokens : 0});
  }
  table.begin_publish(layer, uses, is_run ? 0 : num_tokens, is_run ? num_tokens : 0);
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

// The planner's and the table's own code without a mailbox: what a server does between a publish and its plan.
class PublishReplay {
 public:
  PublishReplay(std::shared_ptr<SlotTable> slots, int top_k, int max_tokens)
      : slots_(std::move(slots)),
        top_k_(top_k),
        planner_(geometry_of(*slots_, top_k, max_tokens), slots_->num_experts()),
        entries_(static_cast<std::size_t>(slots_->num_experts()) + 1),
        routes_(static_cast<std::size_t>(max_tokens) * top_k) {}

  SlotTable& slots() { return unowned(*slots_); }

  // False: it names an expert that does not exist, or too many tokens.
  bool plan(PublishView publish, double fetch_fraction, SplitPlanner* split, PlanHeader& header) {
    publish.top_k = top_k_;
    const AbortReason refusal =
        planner_.plan(publish, *slots_, fetch_fraction, false, header, entries_.data(), routes_.data(), split);
    planner_.settle(*slots_);
    shares_ = planner_.shares();
    shares_.num_hits = static_cast<int>(header.num_hits);  // the planner has no shares of a publish without misses
    shares_.record_bytes = publish.record_bytes;
    return refusal == AbortReason::kNone;
  }

  const LayerShares& shares() const { return shares_; }
  int top_k() const { return top_k_; }

 private:
  static MailboxGeometry geometry_of(const SlotTable& slots, int top_k, int max_tokens) {
    if (top_k < 1 || top_k > slots.num_experts()) throw py::value_error("top_k is not in 1..num_experts");
    if (max_tokens < 1) throw py::value_error("max_tokens is below 1");
    MailboxGeometry geometry;
    geometry.max_tokens = geometry.max_shared_tokens = static_cast<std::uint32_t>(max_tokens);
    geometry.top_k = static_cast<std::uint32_t>(top_k);
    geometry.num_layers = static_cast<std::uint32_t>(slots.num_layers());
    geometry.num_experts = static_cast<std::uint32_t>(slots.num_experts());
    return geometry;
  }

  std::shared_ptr<SlotTable> slots_;
  int top_k_;
  LayerPlanner planner_;
  LayerShares shares_;
  std::vector<PlanEntry> entries_;
  std::vector<std::int32_t> routes_;
};

// See _native.pyi.
LayerShares plan_publish(PublishReplay& replay, int layer, const py::object& ids_object, const py::object& admit_object,
                         double record_bytes, double fetch_fraction, SplitPlanner* split, int num_tiles) {
  const auto ids = view_array<const std::int32_t>(ids_object, "ids", 2);
  const auto admit = view_array<const std::uint8_t>(admit_object, "admit", 1);
  check_extent("ids", 1, ids.shape[1], replay.top_k());
  check_extent("admit", 0, admit.shape[0], ids.shape[0]);
  check_index("layer", layer, replay.slots().num_layers());
  if (!(fetch_fraction >= 0.0 && fetch_fraction <= 1.0)) throw py::value_error("fetch_fraction is not in 0..1");
  if (num_tiles < 1) throw py::value_error("num_tiles is below 1");
  PublishView publish{.layer = layer,
                      .num_tokens = static_cast<int>(ids.shape[0]),
                      .ids = ids.data,
                      .admit = admit.data,
                      .record_bytes = record_bytes,
                      .num_tiles = num_tiles};
  PlanHeader header{};
  if (!replay.plan(publish, fetch_fraction, split, header)) {
    throw py::value_error("the publish names an expert that does not exist, or has more tokens than max_tokens");
  }
  return replay.shares();
}

// See _native.pyi. Publish by publish.
py::array_t<std::int64_t> replay_publishes(const std::shared_ptr<SlotTable>& owned_table, int top_k,
                                           double fetch_fraction, const py::object& layers_object,
                                           const py::object& token_counts_object, const py::object& ids_object,
                                           const py::object& admit_object) {
  SlotTable& table = unowned(*owned_table);
  const auto layers = view_array<const std::int32_t>(layers_object, "layers", 1);
  const auto token_counts = view_array<const std::int32_t>(token_counts_object, "token_counts", 1);
  const auto ids = view_array<const std::int32_t>(ids_object, "ids", 2);
  const auto admit = view_array<const std::uint8_t>(admit_object, "admit", 1);
  check_extent("token_counts", 0, token_counts.shape[0], layers.shape[0]);
  check_extent("ids", 1, ids.shape[1], top_k);
  check_extent("admit", 0, admit.shape[0], ids.shape[0]);
  if (!(fetch_fraction >= 0.0 && fetch_fraction <= 1.0)) throw py::value_error("fetch_fraction is not in 0..1");
  std::int64_t total = 0;
  std::int32_t most = 1;
  for (std::int64_t i = 0; i < layers.shape[0]; ++i) {
    check_index("layer", layers.data[i], table.num_layers());
    if (token_counts.data[i] < 0) throw py::value_error("token_counts has a negative entry");
    total += token_counts.data[i];
    most = std::max(most, token_counts.data[i]);
  }
  check_extent("ids", 0, ids.shape[0], total);
  PublishReplay replay(owned_table, top_k, most);
  py::array_t<std::int64_t> result({static_cast<py::ssize_t>(layers.shape[0]), py::ssize_t{5}});
  std::int64_t* out = result.mutable_data();
  py::gil_scoped_release release;
  std::int64_t row = 0;
  for (std::int64_t i = 0; i < layers.shape[0]; ++i) {
    const int count = token_counts.data[i];
    const PublishView publish{layers.data[i], count, top_k, ids.data + row * top_k, admit.data + row, false};
    PlanHeader header{};
    if (!replay.plan(publish, fetch_fraction, nullptr, header)) {
      throw std::invalid_argument("publish " + std::to_string(i) + " names an expert that does not exist");
    }
    for (const std::uint32_t n :
         {header.num_hits, header.num_fetches, header.num_cpu, header.num_admitted, header.num_evicted}) {
      *out++ = n;
    }
    row += count;
  }
  return result;
}

}  // namespace

void bind_slots(py::module_& m) {
  py::class_<Vacated>(m, "Vacated", py::is_final())
      .def_property_readonly("moves",
                             [](const Vacated& vacated) {
                               std::vector<std::pair<int, int>> result;
                               for (const SlotMove& move : vacated.moves) result.emplace_back(move.from, move.to);
                               return result;
                             })
      .def_readonly("num_evicted", &Vacated::num_evicted);
  m.def("replay_publishes", &replay_publishes, py::arg("slots").none(false), py::arg("top_k"),
        py::arg("fetch_fraction"), py::arg("layers"), py::arg("token_counts"), py::arg("ids"), py::arg("admit"));
  py::class_<PublishReplay>(m, "PublishReplay", py::is_final())
      .def(py::init<std::shared_ptr<SlotTable>, int, int>(), py::arg("slots").none(false), py::arg("top_k"),
           py::arg("max_tokens") = 1)
      .def("plan", &plan_publish, py::arg("layer"), py::arg("ids"), py::arg("admit"), py::arg("record_bytes"),
           py::arg("fetch_fraction") = 1.0, py::arg("split") = nullptr, py::arg("num_tiles") = 1);
  py::class_<SlotTable, std::shared_ptr<SlotTable>>(m, "SlotTable", py::is_final())
      .def(py::init([](int num_layers, int num_experts, int num_slots, const std::string& policy,
                       double half_life_tokens, double long_half_life_tokens, double margin, double floor) {
             const SlotPolicyOptions options{parse_slot_policy(policy), half_life_tokens, long_half_life_tokens, margin,
                                             floor};
             return std::make_shared<SlotTable>(num_layers, num_experts, num_slots, options);
           }),
           py::arg("num_layers"), py::arg("num_experts"), py::arg("num_slots"), py::arg("policy") = "crf",
           py::arg("half_life_tokens") = SlotPolicyOptions{}.half_life_tokens,
           py::arg("long_half_life_tokens") = SlotPolicyOptions{}.long_half_life_tokens,
           py::arg("margin") = SlotPolicyOptions{}.margin, py::arg("floor") = SlotPolicyOptions{}.floor)
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
           py::arg("num_tokens"), py::arg("is_run") = false)
      .def("resident",
           [](SlotTable& table) {
             std::vector<std::tuple<int, int, int>> result;
             unowned(table).for_each_resident(
                 [&](int slot, int layer, int expert) { result.emplace_back(slot, layer, expert); });
             return result;
           })
      .def(
          "vacate", [](SlotTable& table, int num_slots) { return unowned(table).vacate(num_slots); },
          py::arg("num_slots"))
      .def("finish_vacate", [](SlotTable& table) { unowned(table).finish_vacate(); })
      .def("cancel_vacate", [](SlotTable& table) { unowned(table).cancel_vacate(); })
      .def(
          "grow", [](SlotTable& table, int num_slots) { unowned(table).grow(num_slots); }, py::arg("num_slots"))
      .def(
          "score_curve",
          [](SlotTable& table, const std::vector<std::int64_t>& capacities) {
            return score_curve(unowned(table).scores(), capacities);
          },
          py::arg("capacities"))
      .def(
          "empty", [](SlotTable& table, int num_slots) { unowned(table).empty(num_slots); }, py::arg("num_slots"))
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

}  // namespace ft
