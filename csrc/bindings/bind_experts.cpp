#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "arrays.h"
#include "bandwidth.h"
#include "bindings.h"
#include "expert_kernels.h"
#include "expert_store.h"
#include "worker_pool.h"

namespace py = pybind11;

namespace ft {
namespace {

void require(bool condition, const std::string& message) {
  if (!condition) throw py::value_error(message);
}

DType parse_record_dtype(const std::string& name, const char* argument) {
  if (name == "q4_0") return DType::kQ4_0;
  if (name == "f32" || name == "bf16") return parse_dtype(name, argument);
  throw py::value_error(std::string(argument) + " must be 'f32', 'bf16' or 'q4_0', got '" + name + "'");
}

struct Field {
  const char* name;
  std::int64_t offset;
  std::int64_t bytes;
  std::int64_t alignment;
};

RecordLayout make_layout(const std::string& dtype, std::int32_t hidden, std::int32_t intermediate,
                         std::int32_t tile_columns, std::int32_t num_tiles, std::int64_t tile_stride_bytes,
                         std::int64_t stride_bytes, std::int64_t gate_offset, std::int64_t up_offset,
                         std::int64_t down_offset, std::int64_t gate_scales_offset, std::int64_t up_scales_offset,
                         std::int64_t down_scales_offset) {
  RecordLayout layout;
  layout.dtype = parse_record_dtype(dtype, "dtype");
  require(hidden >= 1, "hidden must be at least 1, got " + std::to_string(hidden));
  require(intermediate >= 1, "intermediate must be at least 1, got " + std::to_string(intermediate));
  require(tile_columns >= 1, "tile_columns must be at least 1, got " + std::to_string(tile_columns));
  require(num_tiles >= 1 && static_cast<std::int64_t>(num_tiles) * tile_columns == intermediate,
          "num_tiles " + std::to_string(num_tiles) + " of " + std::to_string(tile_columns) +
              " columns do not make intermediate " + std::to_string(intermediate));
  const std::int64_t elements = static_cast<std::int64_t>(tile_columns) * hidden;
  std::vector<Field> fields;
  if (layout.dtype == DType::kQ4_0) {
    require(hidden % 32 == 0, "hidden must be a multiple of 32 for q4_0, got " + std::to_string(hidden));
    require(tile_columns % 32 == 0,
            "tile_columns must be a multiple of 32 for q4_0, got " + std::to_string(tile_columns));
    fields = {{"gate_offset", gate_offset, elements / 2, 1},
              {"up_offset", up_offset, elements / 2, 1},
              {"down_offset", down_offset, elements / 2, 1},
              {"gate_scales_offset", gate_scales_offset, elements / 16, 2},
              {"up_scales_offset", up_scales_offset, elements / 16, 2},
              {"down_scales_offset", down_scales_offset, elements / 16, 2}};
  } else {
    require(gate_scales_offset < 0 && up_scales_offset < 0 && down_scales_offset < 0, "only q4_0 records have scales");
    const auto element = static_cast<std::int64_t>(dtype_bytes(layout.dtype));
    fields = {{"gate_offset", gate_offset, elements * element, element},
              {"up_offset", up_offset, elements * element, element},
              {"down_offset", down_offset, elements * element, element}};
  }
  std::int64_t payload = 0;
  for (const Field& field : fields) payload += field.bytes;
  require(tile_stride_bytes >= payload && tile_stride_bytes % fields.back().alignment == 0,
          "tile_stride_bytes " + std::to_string(tile_stride_bytes) + " does not hold its fields of " +
              std::to_string(payload) + " bytes");
  for (const Field& field : fields) {
    require(field.offset >= 0 && field.offset % field.alignment == 0 && field.offset <= tile_stride_bytes - field.bytes,
            std::string(field.name) + " " + std::to_string(field.offset) + " does not fit a field of " +
                std::to_string(field.bytes) + " bytes into a tile of " + std::to_string(tile_stride_bytes) + " bytes");
  }
  require(stride_bytes / num_tiles >= tile_stride_bytes,
          "stride_bytes " + std::to_string(stride_bytes) + " does not hold " + std::to_string(num_tiles) +
              " tiles of " + std::to_string(tile_stride_bytes) + " bytes");
  layout.hidden = hidden;
  layout.intermediate = intermediate;
  layout.tile_columns = tile_columns;
  layout.num_tiles = num_tiles;
  layout.tile_stride_bytes = tile_stride_bytes;
  layout.stride_bytes = stride_bytes;
  layout.gate_offset = gate_offset;
  layout.up_offset = up_offset;
  layout.down_offset = down_offset;
  if (layout.dtype == DType::kQ4_0) {
    layout.gate_scales_offset = gate_scales_offset;
    layout.up_scales_offset = up_scales_offset;
    layout.down_scales_offset = down_scales_offset;
  }
  return layout;
}

std::shared_ptr<ExpertStore> make_store(std::vector<std::shared_ptr<SharedSegment>> segments,
                                        std::vector<RecordLayout> layouts, std::vector<std::int32_t> layer_layout,
                                        const py::object& record_segment, const py::object& record_offset) {
  for (const auto& segment : segments) require(segment != nullptr, "segments must not hold None");
  const auto segment_view = view_array<const std::int32_t>(record_segment, "record_segment", 2);
  const auto offset_view = view_array<const std::int64_t>(record_offset, "record_offset", 2);
  check_extent("record_segment", 0, segment_view.shape[0], static_cast<std::int64_t>(layer_layout.size()));
  check_extent("record_offset", 0, offset_view.shape[0], segment_view.shape[0]);
  check_extent("record_offset", 1, offset_view.shape[1], segment_view.shape[1]);
  return std::make_shared<ExpertStore>(
      std::move(segments), std::move(layouts), std::move(layer_layout),
      std::vector<std::int32_t>(segment_view.data, segment_view.data + segment_view.size),
      std::vector<std::int64_t>(offset_view.data, offset_view.data + offset_view.size));
}

void expert_ffn(WorkerPool& pool, const ExpertStore& store, int layer, const py::object& hidden, const py::object& ids,
                const py::object& weights, const py::object& out, bool deterministic) {
  require(layer >= 0 && layer < store.num_layers(),
          "layer must be 0.." + std::to_string(store.num_layers() - 1) + ", got " + std::to_string(layer));
  const RecordLayout& layout = store.layout(layer);
  const auto hidden_view = view_array<const float>(hidden, "hidden", 2);
  const auto ids_view = view_array<const std::int32_t>(ids, "ids", 2);
  const auto weights_view = view_array<const float>(weights, "weights", 2);
  const auto out_view = view_array<float>(out, "out", 2);
  const std::int64_t tokens = hidden_view.shape[0];
  const std::int64_t top_k = ids_view.shape[1];
  check_extent("hidden", 1, hidden_view.shape[1], layout.hidden);
  check_extent("ids", 0, ids_view.shape[0], tokens);
  check_extent("weights", 0, weights_view.shape[0], tokens);
  check_extent("weights", 1, weights_view.shape[1], top_k);
  check_extent("out", 0, out_view.shape[0], tokens);
  check_extent("out", 1, out_view.shape[1], layout.hidden);

  // Counting sort of the routes by expert.
  const std::int64_t num_routes = tokens * top_k;
  std::vector<std::int32_t> starts(store.num_experts() + 1, 0);
  std::vector<std::uint8_t> selected(num_routes, 0);
  for (std::int64_t r = 0; r < num_routes; ++r) {
    const std::int32_t id = ids_view.data[r];
    require(id >= -1 && id < store.num_experts(),
            "ids must be -1.." + std::to_string(store.num_experts() - 1) + ", got " + std::to_string(id));
    if (id < 0) continue;
    starts[id + 1] += 1;
    selected[r] = 1;
  }
  for (int e = 0; e < store.num_experts(); ++e) starts[e + 1] += starts[e];
  std::vector<std::int32_t> routes(starts.back());
  std::vector<std::int32_t> next(starts.begin(), starts.end() - 1);
  for (std::int64_t r = 0; r < num_routes; ++r) {
    if (selected[r] != 0) routes[next[ids_view.data[r]]++] = static_cast<std::int32_t>(r);
  }
  std::vector<ExpertJob> jobs;
  for (int e = 0; e < store.num_experts(); ++e) {
    if (starts[e + 1] == starts[e]) continue;
    jobs.push_back({store.record(layer, e), &layout, routes.data() + starts[e], starts[e + 1] - starts[e]});
  }

  const py::gil_scoped_release release;
  const std::unique_ptr<float[]> route_out(new float[std::max<std::int64_t>(num_routes * layout.hidden, 1)]);
  ExpertBatch batch;
  batch.hidden = hidden_view.data;
  batch.weights = weights_view.data;
  batch.route_out = route_out.get();
  batch.num_tokens = static_cast<std::int32_t>(tokens);
  batch.top_k = static_cast<std::int32_t>(top_k);
  batch.hidden_size = layout.hidden;
  run_expert_jobs(pool, jobs, batch, deterministic);
  combine_routes(pool, batch, selected.data(), false, out_view.data);
}

}  // namespace

void bind_experts(py::module_& m) {
  py::class_<RecordLayout>(m, "NativeLayout", py::is_final())
      .def(py::init(&make_layout), py::arg("dtype"), py::arg("hidden"), py::arg("intermediate"),
           py::arg("tile_columns"), py::arg("num_tiles"), py::arg("tile_stride_bytes"), py::arg("stride_bytes"),
           py::arg("gate_offset"), py::arg("up_offset"), py::arg("down_offset"), py::arg("gate_scales_offset") = -1,
           py::arg("up_scales_offset") = -1, py::arg("down_scales_offset") = -1);

  py::class_<ExpertStore, std::shared_ptr<ExpertStore>>(m, "ExpertStore", py::is_final())
      .def(py::init(&make_store), py::arg("segments"), py::arg("layouts"), py::arg("layer_layout"),
           py::arg("record_segment"), py::arg("record_offset"))
      .def_property_readonly("num_layers", &ExpertStore::num_layers)
      .def_property_readonly("num_experts", &ExpertStore::num_experts);

  m.def("expert_ffn", &expert_ffn, py::arg("pool"), py::arg("store"), py::arg("layer"), py::arg("hidden"),
        py::arg("ids"), py::arg("weights"), py::arg("out"), py::arg("deterministic") = false);

  m.def(
      "time_experts",
      [](WorkerPool& pool, const ExpertStore& store, int layer, int num_experts, int num_tokens, double window_s,
         SharedSegment* slots) {
        require(window_s >= 0 && window_s <= 60, "window_s must be 0..60, got " + std::to_string(window_s));
        std::vector<std::int64_t> times;
        {
          const py::gil_scoped_release release;
          times = time_experts(pool, store, layer, num_experts, num_tokens, static_cast<std::int64_t>(window_s * 1e9),
                               slots);
        }
        py::array_t<std::int64_t> result(static_cast<py::ssize_t>(times.size()));
        std::copy(times.begin(), times.end(), result.mutable_data());
        return result;
      },
      py::arg("pool"), py::arg("store"), py::arg("layer"), py::arg("num_experts"), py::arg("num_tokens"),
      py::arg("window_s"), py::arg("slots").none(true) = py::none());
}

}  // namespace ft
