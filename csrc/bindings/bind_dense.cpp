#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <string>

#include "arrays.h"
#include "bindings.h"
#include "dense_kernels.h"
#include "shared_segment.h"
#include "worker_pool.h"

namespace py = pybind11;

namespace ft {
namespace {

void require(bool condition, const std::string& message) {
  if (!condition) throw py::value_error(message);
}

void bind_linear(WorkerPool& pool, const py::object& x, const py::object& weight, const py::object& bias,
                 const py::object& out) {
  const auto x_view = view_array<const float>(x, "x", 2);
  const auto weight_view = view_weights(weight, "weight", 2);
  const auto out_view = view_array<float>(out, "out", 2);
  check_extent("weight", 1, weight_view.shape[1], x_view.shape[1]);
  check_extent("out", 0, out_view.shape[0], x_view.shape[0]);
  check_extent("out", 1, out_view.shape[1], weight_view.shape[0]);
  const float* bias_data = nullptr;
  if (!bias.is_none()) {
    const auto bias_view = view_array<const float>(bias, "bias", 1);
    check_extent("bias", 0, bias_view.shape[0], weight_view.shape[0]);
    bias_data = bias_view.data;
  }
  const py::gil_scoped_release release;
  linear(pool, x_view.data, x_view.shape[0], x_view.shape[1], weight_view.data, weight_view.dtype, weight_view.shape[0],
         bias_data, out_view.data);
}

void bind_rms_norm(WorkerPool& pool, const py::object& x, const py::object& weight, float eps, const py::object& out) {
  const auto x_view = view_array<const float>(x, "x", 2);
  const auto weight_view = view_array<const float>(weight, "weight", 1);
  const auto out_view = view_array<float>(out, "out", 2);
  check_extent("weight", 0, weight_view.shape[0], x_view.shape[1]);
  check_extent("out", 0, out_view.shape[0], x_view.shape[0]);
  check_extent("out", 1, out_view.shape[1], x_view.shape[1]);
  const py::gil_scoped_release release;
  rms_norm(pool, x_view.data, weight_view.data, eps, x_view.shape[0], x_view.shape[1], out_view.data);
}

void bind_add_rms_norm(WorkerPool& pool, const py::object& residual, const py::object& delta, const py::object& weight,
                       float eps, const py::object& out) {
  const auto residual_view = view_array<float>(residual, "residual", 2);
  const auto delta_view = view_array<const float>(delta, "delta", 2);
  const auto weight_view = view_array<const float>(weight, "weight", 1);
  const auto out_view = view_array<float>(out, "out", 2);
  const std::int64_t rows = residual_view.shape[0];
  const std::int64_t width = residual_view.shape[1];
  check_extent("delta", 0, delta_view.shape[0], rows);
  check_extent("delta", 1, delta_view.shape[1], width);
  check_extent("weight", 0, weight_view.shape[0], width);
  check_extent("out", 0, out_view.shape[0], rows);
  check_extent("out", 1, out_view.shape[1], width);
  const py::gil_scoped_release release;
  add_rms_norm(pool, residual_view.data, delta_view.data, weight_view.data, eps, rows, width, out_view.data);
}

void bind_rotary(WorkerPool& pool, const py::object& x, const py::object& positions, const py::object& cos,
                 const py::object& sin) {
  const auto x_view = view_array<float>(x, "x", 3);
  const auto position_view = view_array<const std::int32_t>(positions, "positions", 1);
  const auto cos_view = view_array<const float>(cos, "cos", 2);
  const auto sin_view = view_array<const float>(sin, "sin", 2);
  check_extent("positions", 0, position_view.shape[0], x_view.shape[0]);
  const std::int64_t rotated = 2 * cos_view.shape[1];
  require(rotated <= x_view.shape[2], "cos rotates " + std::to_string(rotated) + " elements, but x has heads of " +
                                          std::to_string(x_view.shape[2]));
  check_extent("sin", 0, sin_view.shape[0], cos_view.shape[0]);
  check_extent("sin", 1, sin_view.shape[1], cos_view.shape[1]);
  for (std::int64_t t = 0; t < position_view.size; ++t) {
    const std::int32_t position = position_view.data[t];
    require(position >= 0 && position < cos_view.shape[0],
            "positions must be 0.." + std::to_string(cos_view.shape[0] - 1) + ", got " + std::to_string(position));
  }
  const py::gil_scoped_release release;
  rotary(pool, x_view.data, x_view.shape[0], x_view.shape[1], x_view.shape[2], rotated, position_view.data,
         cos_view.data, sin_view.data);
}

void bind_silu_and_mul(WorkerPool& pool, const py::object& gate, const py::object& up, const py::object& out) {
  const auto gate_view = view_array<const float>(gate, "gate", 2);
  const auto up_view = view_array<const float>(up, "up", 2);
  const auto out_view = view_array<float>(out, "out", 2);
  for (int axis = 0; axis < 2; ++axis) {
    check_extent("up", axis, up_view.shape[axis], gate_view.shape[axis]);
    check_extent("out", axis, out_view.shape[axis], gate_view.shape[axis]);
  }
  const py::gil_scoped_release release;
  silu_and_mul(pool, gate_view.data, up_view.data, gate_view.shape[0], gate_view.shape[1], out_view.data);
}

void bind_router_topk(WorkerPool& pool, const py::object& logits, std::int64_t top_k, bool renormalize, float scaling,
                      const py::object& ids, const py::object& weights) {
  const auto logits_view = view_array<const float>(logits, "logits", 2);
  const auto ids_view = view_array<std::int32_t>(ids, "ids", 2);
  const auto weights_view = view_array<float>(weights, "weights", 2);
  const std::int64_t rows = logits_view.shape[0];
  const std::int64_t experts = logits_view.shape[1];
  require(top_k >= 1 && top_k <= experts,
          "top_k must be 1.." + std::to_string(experts) + ", got " + std::to_string(top_k));
  check_extent("ids", 0, ids_view.shape[0], rows);
  check_extent("ids", 1, ids_view.shape[1], top_k);
  check_extent("weights", 0, weights_view.shape[0], rows);
  check_extent("weights", 1, weights_view.shape[1], top_k);
  const py::gil_scoped_release release;
  router_topk(pool, logits_view.data, rows, experts, top_k, renormalize, scaling, ids_view.data, weights_view.data);
}

// Checks the geometry and returns the number of blocks that lie wholly inside the segment.
std::int64_t describe_kv(const SharedSegment& kv, std::int64_t layer_offset_bytes, std::int64_t block_stride_bytes,
                         std::int64_t block_size, std::int64_t num_kv_heads, std::int64_t head_dim,
                         const std::string& kv_dtype, KvLayer& layer) {
  layer.dtype = parse_dtype(kv_dtype, "kv_dtype");
  require(block_size >= 1, "block_size must be at least 1, got " + std::to_string(block_size));
  require(num_kv_heads >= 1, "num_kv_heads must be at least 1, got " + std::to_string(num_kv_heads));
  require(head_dim >= 1, "head_dim must be at least 1, got " + std::to_string(head_dim));
  layer.block_size = block_size;
  layer.num_kv_heads = num_kv_heads;
  layer.head_dim = head_dim;
  const std::int64_t layer_bytes = 2 * layer.plane_bytes();
  const auto element = static_cast<std::int64_t>(dtype_bytes(layer.dtype));
  require(block_stride_bytes >= layer_bytes && block_stride_bytes % element == 0,
          "block_stride_bytes " + std::to_string(block_stride_bytes) + " does not hold a layer of " +
              std::to_string(layer_bytes) + " bytes");
  const auto size = static_cast<std::int64_t>(kv.size_bytes());
  require(layer_offset_bytes >= 0 && layer_offset_bytes % element == 0 && layer_offset_bytes <= size,
          "layer_offset_bytes " + std::to_string(layer_offset_bytes) + " does not lie in a segment of " +
              std::to_string(size) + " bytes");
  layer.block_stride_bytes = block_stride_bytes;
  layer.base = kv.data() + layer_offset_bytes;
  const std::int64_t room = size - layer_offset_bytes;
  return room < layer_bytes ? 0 : (room - layer_bytes) / block_stride_bytes + 1;
}

void bind_kv_store(WorkerPool& pool, const py::object& keys, const py::object& values, const py::object& slot_mapping,
                   const SharedSegment& kv, std::int64_t layer_offset_bytes, std::int64_t block_stride_bytes,
                   std::int64_t block_size, const std::string& kv_dtype) {
  const auto key_view = view_array<const float>(keys, "keys", 3);
  const auto value_view = view_array<const float>(values, "values", 3);
  const auto slot_view = view_array<const std::int64_t>(slot_mapping, "slot_mapping", 1);
  for (int axis = 0; axis < 3; ++axis) check_extent("values", axis, value_view.shape[axis], key_view.shape[axis]);
  check_extent("slot_mapping", 0, slot_view.shape[0], key_view.shape[0]);
  KvLayer layer;
  const std::int64_t blocks = describe_kv(kv, layer_offset_bytes, block_stride_bytes, block_size, key_view.shape[1],
                                          key_view.shape[2], kv_dtype, layer);
  for (std::int64_t t = 0; t < slot_view.size; ++t) {
    const std::int64_t slot = slot_view.data[t];
    require(slot >= -1 && slot < blocks * block_size,
            "slot_mapping must be -1.." + std::to_string(blocks * block_size - 1) + ", got " + std::to_string(slot));
  }
  const py::gil_scoped_release release;
  kv_store(pool, key_view.data, value_view.data, slot_view.data, key_view.shape[0], layer);
}

void bind_paged_attention(WorkerPool& pool, const py::object& queries, const py::object& row_starts,
                          const py::object& positions, const py::object& block_tables, const SharedSegment& kv,
                          std::int64_t layer_offset_bytes, std::int64_t block_stride_bytes, std::int64_t block_size,
                          std::int64_t num_kv_heads, const std::string& kv_dtype, float scale,
                          std::int64_t sliding_window, const py::object& out) {
  const auto query_view = view_array<const float>(queries, "queries", 3);
  const auto start_view = view_array<const std::int32_t>(row_starts, "row_starts", 1);
  const auto position_view = view_array<const std::int32_t>(positions, "positions", 1);
  const auto table_view = view_array<const std::int32_t>(block_tables, "block_tables", 2);
  const auto out_view = view_array<float>(out, "out", 2);
  const std::int64_t tokens = query_view.shape[0];
  const std::int64_t heads = query_view.shape[1];
  check_extent("positions", 0, position_view.shape[0], tokens);
  check_extent("out", 0, out_view.shape[0], tokens);
  check_extent("out", 1, out_view.shape[1], heads * query_view.shape[2]);
  check_extent("row_starts", 0, start_view.shape[0], table_view.shape[0] + 1);
  require(sliding_window >= 0, "sliding_window must not be negative, got " + std::to_string(sliding_window));
  require(num_kv_heads >= 1, "num_kv_heads must be at least 1, got " + std::to_string(num_kv_heads));
  require(heads % num_kv_heads == 0, "num_kv_heads " + std::to_string(num_kv_heads) + " does not divide the " +
                                         std::to_string(heads) + " heads of queries");
  KvLayer layer;
  const std::int64_t blocks = describe_kv(kv, layer_offset_bytes, block_stride_bytes, block_size, num_kv_heads,
                                          query_view.shape[2], kv_dtype, layer);
  const std::int64_t num_rows = table_view.shape[0];
  const std::int64_t max_blocks = table_view.shape[1];
  require(start_view.data[0] == 0 && start_view.data[num_rows] == tokens,
          "row_starts must begin with 0 and end with " + std::to_string(tokens));
  for (std::int64_t row = 0; row < num_rows; ++row) {
    require(start_view.data[row] <= start_view.data[row + 1] && start_view.data[row + 1] <= tokens,
            "row_starts must not descend");
    std::int64_t first = INT64_MAX;
    std::int64_t end = 0;
    for (std::int64_t t = start_view.data[row]; t < start_view.data[row + 1]; ++t) {
      const std::int64_t position = position_view.data[t];
      require(
          position >= 0 && position < max_blocks * block_size,
          "positions must be 0.." + std::to_string(max_blocks * block_size - 1) + ", got " + std::to_string(position));
      first = std::min(first, sliding_window > 0 ? std::max<std::int64_t>(0, position + 1 - sliding_window) : 0);
      end = std::max(end, position + 1);
    }
    for (std::int64_t b = end == 0 ? 0 : first / block_size; b * block_size < end; ++b) {
      const std::int32_t block = table_view.data[row * max_blocks + b];
      require(block >= 0 && block < blocks, "block_tables of row " + std::to_string(row) + " names block " +
                                                std::to_string(block) + " of " + std::to_string(blocks));
    }
  }
  PagedAttention call;
  call.queries = query_view.data;
  call.row_starts = start_view.data;
  call.positions = position_view.data;
  call.block_tables = table_view.data;
  call.num_rows = num_rows;
  call.max_blocks = max_blocks;
  call.num_heads = heads;
  call.scale = scale;
  call.sliding_window = sliding_window;
  call.out = out_view.data;
  const py::gil_scoped_release release;
  paged_attention(pool, call, layer);
}

}  // namespace

void bind_dense(py::module_& m) {
  m.def("linear", &bind_linear, py::arg("pool"), py::arg("x"), py::arg("weight"), py::arg("bias"), py::arg("out"));
  m.def("rms_norm", &bind_rms_norm, py::arg("pool"), py::arg("x"), py::arg("weight"), py::arg("eps"), py::arg("out"));
  m.def("add_rms_norm", &bind_add_rms_norm, py::arg("pool"), py::arg("residual"), py::arg("delta"), py::arg("weight"),
        py::arg("eps"), py::arg("out"));
  m.def("rotary", &bind_rotary, py::arg("pool"), py::arg("x"), py::arg("positions"), py::arg("cos"), py::arg("sin"));
  m.def("silu_and_mul", &bind_silu_and_mul, py::arg("pool"), py::arg("gate"), py::arg("up"), py::arg("out"));
  m.def("router_topk", &bind_router_topk, py::arg("pool"), py::arg("logits"), py::arg("top_k"), py::arg("renormalize"),
        py::arg("scaling"), py::arg("ids"), py::arg("weights"));
  m.def("kv_store", &bind_kv_store, py::arg("pool"), py::arg("keys"), py::arg("values"), py::arg("slot_mapping"),
        py::arg("kv"), py::arg("layer_offset_bytes"), py::arg("block_stride_bytes"), py::arg("block_size"),
        py::arg("kv_dtype"));
  m.def("paged_attention", &bind_paged_attention, py::arg("pool"), py::arg("queries"), py::arg("row_starts"),
        py::arg("positions"), py::arg("block_tables"), py::arg("kv"), py::arg("layer_offset_bytes"),
        py::arg("block_stride_bytes"), py::arg("block_size"), py::arg("num_kv_heads"), py::arg("kv_dtype"),
        py::arg("scale"), py::arg("sliding_window"), py::arg("out"));
}

}  // namespace ft
