// Smoke tests for the sanitizers: odd shapes at the very end of allocations, every instruction set, several threads.
// What the kernels compute is checked from Python, against PyTorch.
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "bandwidth.h"
#include "check.h"
#include "cpu_info.h"
#include "dense_kernels.h"
#include "expert_kernels.h"
#include "worker_pool.h"

namespace {

using ft::DType;
using ft::Isa;
using ft::WorkerPool;

std::mt19937 generator(5);

float random_float() { return std::uniform_real_distribution<float>(-1.0f, 1.0f)(generator); }

std::vector<float> random_floats(std::size_t count) {
  std::vector<float> values(count);
  for (float& value : values) value = random_float();
  return values;
}

// Exact in BF16, so that one expected value serves both dtypes. The buffer ends with the last element.
std::vector<std::byte> random_weights(std::size_t count, DType dtype, std::vector<float>& values) {
  std::vector<std::byte> bytes(count * dtype_bytes(dtype));
  values.resize(count);
  for (std::size_t i = 0; i < count; ++i) {
    std::uint32_t bits = 0;
    const float value = random_float();
    std::memcpy(&bits, &value, 4);
    bits &= 0xffff0000u;
    std::memcpy(&values[i], &bits, 4);
    const auto half = static_cast<std::uint16_t>(bits >> 16);
    if (dtype == DType::kF32) {
      std::memcpy(bytes.data() + 4 * i, &bits, 4);
    } else {
      std::memcpy(bytes.data() + 2 * i, &half, 2);
    }
  }
  return bytes;
}

std::vector<Isa> available() {
  std::vector<Isa> isas = {Isa::kScalar};
  const Isa best = ft::resolve_isa("auto");
  if (best >= Isa::kAvx2) isas.push_back(Isa::kAvx2);
  if (best >= Isa::kAvx512) isas.push_back(Isa::kAvx512);
  return isas;
}

void check_close(float actual, double expected, double tolerance) {
  CHECK(std::fabs(static_cast<double>(actual) - expected) <= tolerance);
}

void linear(WorkerPool& pool, DType dtype) {
  struct Shape {
    std::int64_t rows, inputs, outputs;
  };
  for (const Shape s : {Shape{1, 1, 1}, {1, 45, 21}, {3, 64, 9}, {6, 33, 70}, {35, 96, 130}, {2, 4, 0}, {0, 4, 2}}) {
    const std::vector<float> x = random_floats(s.rows * s.inputs);
    const std::vector<float> bias = random_floats(s.outputs);
    std::vector<float> values;
    const std::vector<std::byte> weight = random_weights(s.outputs * s.inputs, dtype, values);
    std::vector<float> out(s.rows * s.outputs);
    ft::linear(pool, x.data(), s.rows, s.inputs, weight.data(), dtype, s.outputs, bias.data(), out.data());
    for (std::int64_t r = 0; r < s.rows; ++r) {
      for (std::int64_t o = 0; o < s.outputs; ++o) {
        double expected = bias[o];
        for (std::int64_t i = 0; i < s.inputs; ++i) {
          expected += static_cast<double>(x[r * s.inputs + i]) * values[o * s.inputs + i];
        }
        check_close(out[r * s.outputs + o], expected, 1e-4);
      }
    }
  }
}

void experts(WorkerPool& pool, DType dtype) {
  struct Shape {
    std::int32_t tokens, hidden, intermediate, tile_columns, experts, top_k;
  };
  for (const Shape s : {Shape{1, 1, 1, 1, 1, 1},
                        {1, 40, 12, 4, 3, 2},
                        {5, 37, 6, 1, 2, 2},
                        {9, 64, 66, 33, 4, 2},
                        {40, 33, 8, 8, 2, 1},
                        {2, 256, 128, 64, 3, 3}}) {
    const auto element = static_cast<std::int64_t>(dtype_bytes(dtype));
    ft::RecordLayout layout;
    layout.dtype = dtype;
    layout.hidden = s.hidden;
    layout.intermediate = s.intermediate;
    layout.tile_columns = s.tile_columns;
    layout.num_tiles = s.intermediate / s.tile_columns;
    const std::int64_t field = static_cast<std::int64_t>(s.tile_columns) * s.hidden;
    layout.up_offset = field * element;
    layout.down_offset = 2 * field * element;
    layout.tile_stride_bytes = 3 * field * element;
    layout.stride_bytes = layout.num_tiles * layout.tile_stride_bytes;

    std::vector<std::vector<std::byte>> records;
    std::vector<std::vector<float>> values(s.experts);
    for (int e = 0; e < s.experts; ++e) {
      records.push_back(random_weights(3 * field * layout.num_tiles, dtype, values[e]));
    }
    const std::vector<float> hidden = random_floats(s.tokens * s.hidden);
    const std::vector<float> weights = random_floats(s.tokens * s.top_k);
    std::vector<std::vector<std::int32_t>> routes(s.experts);
    for (std::int32_t r = 0; r < s.tokens * s.top_k; ++r) {
      routes[(r / s.top_k + r % s.top_k) % s.experts].push_back(r);
    }
    std::vector<ft::ExpertJob> jobs;
    for (int e = 0; e < s.experts; ++e) {
      jobs.push_back({records[e].data(), &layout, routes[e].data(), static_cast<std::int32_t>(routes[e].size())});
    }
    std::vector<float> route_out(s.tokens * s.top_k * s.hidden);
    const ft::ExpertBatch batch = {hidden.data(), weights.data(), route_out.data(), s.tokens, s.top_k, s.hidden};
    ft::run_expert_jobs(pool, jobs, batch, true);
    for (int cut = 1; cut < layout.num_tiles; ++cut) {  // both parts of every record add up to it
      std::vector<float> parts(route_out.size());
      for (const auto& [first, count] : {std::pair{0, cut}, {cut, layout.num_tiles - cut}}) {
        std::vector<ft::ExpertJob> some = jobs;
        for (ft::ExpertJob& job : some) job.first_tile = first, job.num_tiles = count;
        std::vector<float> out(route_out.size());
        const ft::ExpertBatch part = {hidden.data(), weights.data(), out.data(), s.tokens, s.top_k, s.hidden};
        ft::run_expert_jobs(pool, some, part, true);
        for (std::size_t i = 0; i < out.size(); ++i) parts[i] += out[i];
      }
      for (std::size_t i = 0; i < parts.size(); ++i) {
        CHECK(std::abs(parts[i] - route_out[i]) <= 1e-4f * (1.0f + std::abs(route_out[i])));
      }
    }

    for (int e = 0; e < s.experts; ++e) {
      for (const std::int32_t route : routes[e]) {
        const float* x = hidden.data() + route / s.top_k * s.hidden;
        std::vector<double> expected(s.hidden, 0.0);
        for (std::int32_t column = 0; column < s.intermediate; ++column) {
          const float* tile = values[e].data() + column / s.tile_columns * 3 * field;
          const std::int64_t within = static_cast<std::int64_t>(column % s.tile_columns) * s.hidden;
          double gate = 0.0;
          double up = 0.0;
          for (std::int32_t h = 0; h < s.hidden; ++h) {
            gate += static_cast<double>(tile[within + h]) * x[h];
            up += static_cast<double>(tile[field + within + h]) * x[h];
          }
          const double activation = gate / (1.0 + std::exp(-gate)) * up;
          for (std::int32_t h = 0; h < s.hidden; ++h) expected[h] += activation * tile[2 * field + within + h];
        }
        for (std::int32_t h = 0; h < s.hidden; ++h) {
          const double wanted = weights[route] * expected[h];
          check_close(route_out[route * s.hidden + h], wanted, 2e-4 * (1.0 + std::fabs(wanted)));
        }
      }
    }

    std::vector<std::uint8_t> selected(s.tokens * s.top_k, 1);
    selected[0] = 0;
    std::vector<float> out(s.tokens * s.hidden, 1.0f);
    ft::combine_routes(pool, batch, selected.data(), true, out.data());
    for (std::int32_t h = 0; h < s.hidden; ++h) {
      double expected = 1.0;
      for (std::int32_t k = 1; k < s.top_k; ++k) expected += route_out[k * s.hidden + h];
      check_close(out[h], expected, 1e-3);
    }
  }
}

void attention(WorkerPool& pool, DType dtype, std::int64_t window) {
  constexpr std::int64_t kHeads = 6;
  constexpr std::int64_t kBlockSize = 5;
  for (const std::int64_t head_dim : {1, 7, 16, 40}) {
    ft::KvLayer kv;
    kv.block_size = kBlockSize;
    kv.num_kv_heads = 2;
    kv.head_dim = head_dim;
    kv.dtype = dtype;
    kv.block_stride_bytes = 2 * kv.plane_bytes();
    const std::vector<std::int32_t> lengths = {1, 300, 23};
    const std::vector<std::int32_t> starts = {0, 1, 13, 14};
    const std::int64_t max_blocks = 60;
    std::vector<std::int32_t> tables(lengths.size() * max_blocks, -1);
    std::int32_t num_blocks = 0;
    for (std::size_t row = 0; row < lengths.size(); ++row) {
      for (std::int64_t b = 0; b * kBlockSize < lengths[row]; ++b) tables[row * max_blocks + b] = num_blocks++;
    }
    std::vector<float> values;
    std::vector<std::byte> memory = random_weights(num_blocks * 2 * kBlockSize * 2 * head_dim, dtype, values);
    kv.base = memory.data();
    std::vector<std::int32_t> positions;
    for (std::size_t row = 0; row < lengths.size(); ++row) {
      for (std::int32_t t = starts[row]; t < starts[row + 1]; ++t) {
        positions.push_back(lengths[row] - (starts[row + 1] - t));
      }
    }
    const auto tokens = static_cast<std::int64_t>(positions.size());
    const std::vector<float> queries = random_floats(tokens * kHeads * head_dim);
    std::vector<float> out(queries.size());
    ft::PagedAttention call;
    call.queries = queries.data();
    call.row_starts = starts.data();
    call.positions = positions.data();
    call.block_tables = tables.data();
    call.num_rows = static_cast<std::int64_t>(lengths.size());
    call.max_blocks = max_blocks;
    call.num_heads = kHeads;
    call.scale = 0.5f;
    call.sliding_window = window;
    call.out = out.data();
    ft::paged_attention(pool, call, kv);

    for (std::size_t row = 0; row < lengths.size(); ++row) {
      for (std::int64_t t = starts[row]; t < starts[row + 1]; ++t) {
        for (std::int64_t head = 0; head < kHeads; ++head) {
          const float* q = queries.data() + (t * kHeads + head) * head_dim;
          const std::int64_t first = window > 0 ? std::max<std::int64_t>(0, positions[t] + 1 - window) : 0;
          std::vector<double> expected(head_dim, 0.0);
          double total = 0.0;
          for (std::int64_t p = first; p <= positions[t]; ++p) {
            const std::int64_t block = tables[row * max_blocks + p / kBlockSize];
            const std::int64_t key = ((block * 2 * kBlockSize + p % kBlockSize) * 2 + head / 3) * head_dim;
            double score = 0.0;
            for (std::int64_t d = 0; d < head_dim; ++d) score += static_cast<double>(q[d]) * values[key + d];
            const double weight = std::exp(0.5 * score);
            total += weight;
            for (std::int64_t d = 0; d < head_dim; ++d) {
              expected[d] += weight * values[key + kBlockSize * 2 * head_dim + d];
            }
          }
          for (std::int64_t d = 0; d < head_dim; ++d) {
            check_close(out[(t * kHeads + head) * head_dim + d], expected[d] / total, 1e-5);
          }
        }
      }
    }
  }
}

void light_kernels(WorkerPool& pool) {
  for (const std::int64_t width : {1, 5, 16, 37, 200}) {
    const std::int64_t rows = 7;
    std::vector<float> x = random_floats(rows * width);
    const std::vector<float> y = random_floats(rows * width);
    const std::vector<float> weight = random_floats(width);
    std::vector<float> out(rows * width);
    ft::rms_norm(pool, x.data(), weight.data(), 1e-6f, rows, width, out.data());
    ft::silu_and_mul(pool, x.data(), y.data(), rows, width, out.data());
    ft::add_rms_norm(pool, x.data(), y.data(), weight.data(), 1e-6f, rows, width, out.data());
    std::vector<std::int32_t> ids(rows * width);
    std::vector<float> probabilities(rows * width);
    ft::router_topk(pool, x.data(), rows, width, width, true, 1.0f, ids.data(), probabilities.data());
    for (std::int64_t r = 0; r < rows; ++r) {
      double total = 0.0;
      for (std::int64_t k = 0; k < width; ++k) total += probabilities[r * width + k];
      check_close(static_cast<float>(total), 1.0, 1e-5);
    }
  }
  std::vector<float> x = random_floats(3 * 2 * 6);
  const std::vector<std::int32_t> positions = {0, 3, 1};
  const std::vector<float> table = random_floats(4 * 2);
  ft::rotary(pool, x.data(), 3, 2, 6, 4, positions.data(), table.data(), table.data());
}

}  // namespace

int main() {
  for (const Isa isa : available()) {
    for (const int threads : {1, 3}) {
      WorkerPool pool(threads, {}, 0, isa);
      for (const DType dtype : {DType::kF32, DType::kBF16}) {
        linear(pool, dtype);
        experts(pool, dtype);
        attention(pool, dtype, 0);
        attention(pool, dtype, 9);
      }
      light_kernels(pool);
      const std::vector<std::byte> data(3 << 20);
      CHECK(ft::stream_read_gbps(pool, data.data(), data.size() - 3, 2) > 0.0);
    }
  }
  return 0;
}
