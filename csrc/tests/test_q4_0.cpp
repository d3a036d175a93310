// Q4_0 kernels: every instruction set against the plain one, memory at the very end of allocations, and run_expert_jobs
// against float32 arithmetic on decoded weights. The format itself is checked from Python, against the gguf package.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "check.h"
#include "expert_kernels.h"
#include "q4_0_kernels.h"
#include "q4_0_linear.h"

namespace {

using ft::DType;
using ft::ExpertBatch;
using ft::ExpertJob;
using ft::Isa;
using ft::RecordLayout;
using ft::WorkerPool;
using ft::detail::Q4Kernels;
using ft::detail::Q8Block;
using ft::detail::Q8Chunk;

std::mt19937 generator(11);

float random_float() { return std::normal_distribution<float>(0.0f, 1.0f)(generator); }

std::vector<float> random_floats(std::size_t count) {
  std::vector<float> values(count);
  for (float& value : values) value = random_float();
  return values;
}

// float16 of a small power of two times 1 + k / 1024, and what it is worth.
std::uint16_t random_half(float& value) {
  const unsigned exponent = 7 + generator() % 3;
  const unsigned fraction = generator() % 1024;
  const unsigned sign = generator() % 2;
  value = (sign != 0 ? -1.0f : 1.0f) * std::ldexp(1.0f + static_cast<float>(fraction) / 1024.0f, int(exponent) - 15);
  return static_cast<std::uint16_t>(sign << 15 | exponent << 10 | fraction);
}

// rows x n in blocks along the row; both vectors end with their last element.
struct Matrix {
  std::vector<std::uint8_t> nibbles;
  std::vector<std::uint16_t> scales;
  std::vector<float> values;
};

Matrix random_matrix(std::int64_t rows, std::int64_t n) {
  Matrix m;
  m.nibbles.resize(rows * n / 2);
  m.scales.resize(rows * n / 32);
  m.values.resize(rows * n);
  for (std::int64_t block = 0; block < rows * n / 32; ++block) {
    float scale = 0.0f;
    m.scales[block] = random_half(scale);
    for (int j = 0; j < 16; ++j) {
      const unsigned byte = generator() % 256;
      m.nibbles[block * 16 + j] = static_cast<std::uint8_t>(byte);
      m.values[block * 32 + j] = (static_cast<float>(byte & 15) - 8.0f) * scale;
      m.values[block * 32 + j + 16] = (static_cast<float>(byte >> 4) - 8.0f) * scale;
    }
  }
  return m;
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

void quantised_codes(const Q4Kernels& kernels) {
  const Q4Kernels& plain = ft::detail::q4_kernels_scalar();
  for (const std::int64_t n : {32, 64, 480, 512, 544, 1312}) {
    std::vector<float> x = random_floats(n);
    std::fill(x.begin(), x.begin() + 32, 0.0f);
    if (n > 64) {
      for (int i = 0; i < 32; ++i) x[32 + i] = 1e-33f * static_cast<float>(i);
      for (int i = 0; i < 32; ++i) x[64 + i] = static_cast<float>(i - 16) * 0.5f;  // ties
    }
    const auto chunks = static_cast<std::size_t>(ft::detail::q8_chunks(n));
    std::vector<Q8Chunk> a(chunks);
    std::vector<Q8Chunk> b(chunks);
    std::memset(static_cast<void*>(a.data()), 0x55, chunks * sizeof(Q8Chunk));
    kernels.quantize_row(x.data(), n, a.data());
    plain.quantize_row(x.data(), n, b.data());
    CHECK(std::memcmp(a.data(), b.data(), chunks * sizeof(Q8Chunk)) == 0);
  }
  const std::vector<float> x = random_floats(32);
  Q8Block a;
  Q8Block b;
  kernels.quantize_block(x.data(), &a);
  plain.quantize_block(x.data(), &b);
  CHECK(std::memcmp(a.low, b.low, 16) == 0 && std::memcmp(a.high, b.high, 16) == 0);
  CHECK(std::memcmp(a.offsets, b.offsets, 16) == 0 && a.scale == b.scale);
}

void products(const Q4Kernels& kernels) {
  const Q4Kernels& plain = ft::detail::q4_kernels_scalar();
  for (const std::int64_t n : {32, 96, 256, 288, 512, 736, 2048}) {
    for (const std::int64_t rows : {1, 2, 3, 4, 9}) {
      const std::int64_t columns = 1 + static_cast<std::int64_t>(generator() % 9);
      const Matrix m = random_matrix(columns, n);
      const auto chunks = ft::detail::q8_chunks(n);
      std::vector<Q8Chunk> memory(rows * chunks);
      std::vector<const Q8Chunk*> activations(rows);
      for (std::int64_t r = 0; r < rows; ++r) {
        plain.quantize_row(random_floats(n).data(), n, &memory[r * chunks]);
        activations[r] = &memory[r * chunks];
      }
      const std::vector<float> bias = random_floats(columns);
      std::vector<float> out(rows * columns);
      std::vector<float> expected(rows * columns);
      kernels.dot_rows({m.nibbles.data(), m.scales.data(), columns}, n, activations.data(), rows, bias.data(),
                       out.data(), columns);
      plain.dot_rows({m.nibbles.data(), m.scales.data(), columns}, n, activations.data(), rows, bias.data(),
                     expected.data(), columns);
      for (std::size_t i = 0; i < out.size(); ++i) check_close(out[i], expected[i], 1e-5);
      for (std::int64_t r = 0; r < rows; ++r) {  // a row alone has the same bits
        std::vector<float> alone(columns);
        kernels.dot_rows({m.nibbles.data(), m.scales.data(), columns, m.nibbles.data(), m.scales.data()}, n,
                         &activations[r], 1, bias.data(), alone.data(), columns);
        CHECK(std::memcmp(alone.data(), &out[r * columns], columns * sizeof(float)) == 0);
      }
    }
  }
  for (const std::int64_t row_blocks : {1, 2, 3}) {
    for (const std::int64_t rows : {1, 2, 3, 4, 7}) {
      constexpr std::int64_t kOutputs = 96;
      const Matrix m = random_matrix(kOutputs, 32 * row_blocks);
      std::vector<Q8Block> blocks(rows * row_blocks);
      for (Q8Block& block : blocks) plain.quantize_block(random_floats(32).data(), &block);
      std::vector<float> sums(rows * kOutputs);
      std::vector<float> plain_sums(rows * kOutputs);
      for (std::int64_t b = 0; b < row_blocks; ++b) {
        std::vector<const Q8Block*> activations(rows);
        for (std::int64_t r = 0; r < rows; ++r) activations[r] = &blocks[r * row_blocks + b];
        kernels.add_down(&m.nibbles[b * 16], &m.scales[b], row_blocks, kOutputs, activations.data(), rows, sums.data(),
                         kOutputs, b == 1 ? 64 : 0);
        plain.add_down(&m.nibbles[b * 16], &m.scales[b], row_blocks, kOutputs, activations.data(), rows,
                       plain_sums.data(), kOutputs, 0);
      }
      std::vector<float> out(kOutputs);
      for (std::int64_t r = 0; r < rows; ++r) {
        kernels.finish_down(&sums[r * kOutputs], kOutputs, 2.0f, out.data());
        for (std::int64_t i = 0; i < kOutputs; ++i) check_close(out[i], 2.0 * plain_sums[r * kOutputs + i], 1e-5);
      }
    }
  }
}

void strange_values(const Q4Kernels& kernels) {
  const Matrix m = random_matrix(1, 64);
  for (const float strange : {std::numeric_limits<float>::infinity(), std::nanf(""), -std::nanf("3")}) {
    std::vector<float> x = random_floats(64);
    x[40] = strange;
    Q8Chunk chunk;
    kernels.quantize_row(x.data(), 64, &chunk);
    const Q8Chunk* activations = &chunk;
    float out = 0.0f;
    kernels.dot_rows({m.nibbles.data(), m.scales.data(), 1}, 64, &activations, 1, nullptr, &out, 1);
    CHECK(!std::isfinite(out));
  }
}

void linear(WorkerPool& pool) {
  struct Shape {
    std::int64_t rows, inputs, outputs;
  };
  for (const Shape s : {Shape{1, 32, 1},
                        {1, 96, 21},
                        {3, 64, 9},
                        {6, 544, 70},
                        {35, 96, 130},
                        {1, 2048, 300},
                        {2, 32, 0},
                        {0, 32, 2}}) {
    const std::vector<float> x = random_floats(s.rows * s.inputs);
    const std::vector<float> bias = random_floats(s.outputs);
    const Matrix m = random_matrix(s.outputs, s.inputs);
    std::vector<float> out(s.rows * s.outputs);
    ft::linear_q4_0(pool, x.data(), s.rows, s.inputs, m.nibbles.data(), m.scales.data(), s.outputs, bias.data(),
                    out.data());
    double error = 0.0;
    double size = 1e-9;
    for (std::int64_t r = 0; r < s.rows; ++r) {
      for (std::int64_t o = 0; o < s.outputs; ++o) {
        double expected = bias[o];
        for (std::int64_t i = 0; i < s.inputs; ++i) {
          expected += static_cast<double>(x[r * s.inputs + i]) * m.values[o * s.inputs + i];
        }
        error += std::pow(out[r * s.outputs + o] - expected, 2);
        size += expected * expected;
      }
    }
    CHECK(std::sqrt(error / size) < 0.02);
  }
}

struct Experts {
  RecordLayout layout;
  std::vector<std::vector<std::byte>> records;
  std::vector<std::vector<float>> gate, up, down;  // [I, H], [I, H], [H, I]
};

Experts random_experts(int count, int hidden, int intermediate, int tile_columns) {
  Experts e;
  RecordLayout& l = e.layout;
  l.dtype = DType::kQ4_0;
  l.hidden = hidden;
  l.intermediate = intermediate;
  l.tile_columns = tile_columns;
  l.num_tiles = intermediate / tile_columns;
  const std::int64_t nibbles = static_cast<std::int64_t>(tile_columns) * hidden / 2;
  const std::int64_t scales = (static_cast<std::int64_t>(tile_columns) * hidden / 32 * 2 + 63) / 64 * 64;
  l.gate_offset = 0;
  l.up_offset = nibbles;
  l.gate_scales_offset = 2 * nibbles;
  l.up_scales_offset = l.gate_scales_offset + scales;
  l.down_offset = l.up_scales_offset + scales;
  l.down_scales_offset = l.down_offset + nibbles;
  l.tile_stride_bytes = l.down_scales_offset + scales;
  l.stride_bytes = l.num_tiles * l.tile_stride_bytes;
  for (int i = 0; i < count; ++i) {
    const Matrix gate = random_matrix(intermediate, hidden);
    const Matrix up = random_matrix(intermediate, hidden);
    const Matrix down = random_matrix(hidden, intermediate);
    std::vector<std::byte> record(static_cast<std::size_t>(l.stride_bytes));
    for (int t = 0; t < l.num_tiles; ++t) {
      std::byte* tile = record.data() + t * l.tile_stride_bytes;
      const std::int64_t row = static_cast<std::int64_t>(t) * tile_columns;
      const auto scale_bytes = static_cast<std::size_t>(tile_columns) * hidden / 32 * 2;
      std::memcpy(tile + l.gate_offset, &gate.nibbles[row * hidden / 2], nibbles);
      std::memcpy(tile + l.up_offset, &up.nibbles[row * hidden / 2], nibbles);
      std::memcpy(tile + l.gate_scales_offset, &gate.scales[row * hidden / 32], scale_bytes);
      std::memcpy(tile + l.up_scales_offset, &up.scales[row * hidden / 32], scale_bytes);
      const std::int64_t per_tile = tile_columns / 32;
      for (int h = 0; h < hidden; ++h) {
        const std::int64_t block = h * (intermediate / 32) + t * per_tile;
        std::memcpy(tile + l.down_offset + h * per_tile * 16, &down.nibbles[block * 16], per_tile * 16);
        std::memcpy(tile + l.down_scales_offset + h * per_tile * 2, &down.scales[block], per_tile * 2);
      }
    }
    e.records.push_back(std::move(record));
    e.gate.push_back(gate.values);
    e.up.push_back(up.values);
    e.down.push_back(down.values);
  }
  return e;
}

double dot(const float* a, const float* b, int n) {
  double sum = 0.0;
  for (int i = 0; i < n; ++i) sum += static_cast<double>(a[i]) * b[i];
  return sum;
}

void experts(const std::vector<std::unique_ptr<WorkerPool>>& pools, int tile_columns) {
  constexpr int kHidden = 160;
  constexpr int kIntermediate = 192;
  constexpr int kTokens = 11;
  constexpr int kTopK = 3;
  const Experts e = random_experts(4, kHidden, kIntermediate, tile_columns);
  // Expert 0 has many routes, 2 one, 3 none.
  std::vector<std::vector<std::int32_t>> routes(4);
  for (int t = 0; t < kTokens; ++t) {
    routes[0].push_back(t * kTopK);
    if (t % 2 == 0) routes[1].push_back(t * kTopK + 1);
  }
  routes[2].push_back(5 * kTopK + 2);
  std::vector<float> hidden = random_floats(kTokens * kHidden);
  for (float& v : hidden) v *= 0.3f;
  const std::vector<float> weights = random_floats(kTokens * kTopK);
  std::vector<ExpertJob> jobs;
  for (int i = 0; i < 4; ++i) {
    jobs.push_back({e.records[i].data(), &e.layout, routes[i].data(), static_cast<std::int32_t>(routes[i].size())});
  }
  std::vector<float> expected(kTokens * kTopK * kHidden, 7.0f);
  for (int i = 0; i < 4; ++i) {
    for (const std::int32_t route : routes[i]) {
      const float* x = &hidden[route / kTopK * kHidden];
      std::vector<float> inner(kIntermediate);
      for (int c = 0; c < kIntermediate; ++c) {
        const double g = dot(x, &e.gate[i][c * kHidden], kHidden);
        inner[c] = static_cast<float>(g / (1.0 + std::exp(-g)) * dot(x, &e.up[i][c * kHidden], kHidden));
      }
      for (int h = 0; h < kHidden; ++h) {
        expected[route * kHidden + h] =
            weights[route] * static_cast<float>(dot(inner.data(), &e.down[i][h * kIntermediate], kIntermediate));
      }
    }
  }
  std::vector<float> first;
  for (const auto& pool : pools) {
    std::vector<float> out(expected.size(), 7.0f);
    const ExpertBatch batch{hidden.data(), weights.data(), out.data(), kTokens, kTopK, kHidden};
    ft::run_expert_jobs(*pool, jobs, batch, true);
    double error = 0.0;
    double size = 0.0;
    for (std::size_t i = 0; i < out.size(); ++i) {
      error += std::pow(static_cast<double>(out[i]) - expected[i], 2);
      size += std::pow(static_cast<double>(expected[i]), 2);
      CHECK((expected[i] == 7.0f) == (out[i] == 7.0f));
    }
    CHECK(std::sqrt(error / size) < 0.02);
    if (first.empty()) first = out;
    for (int cut = 1; cut < e.layout.num_tiles; ++cut) {  // both parts of every record add up to it
      std::vector<float> parts(out.size());
      for (const auto& [begin, count] : {std::pair{0, cut}, {cut, e.layout.num_tiles - cut}}) {
        std::vector<ExpertJob> some = jobs;
        for (ExpertJob& job : some) job.first_tile = begin, job.num_tiles = count;
        std::vector<float> rows(out.size());
        const ExpertBatch part{hidden.data(), weights.data(), rows.data(), kTokens, kTopK, kHidden};
        ft::run_expert_jobs(*pool, some, part, true);
        for (std::size_t i = 0; i < out.size(); ++i) parts[i] += rows[i];
      }
      for (std::size_t i = 0; i < out.size(); ++i) {
        if (expected[i] != 7.0f) CHECK(std::abs(parts[i] - out[i]) <= 1e-4f * (1.0f + std::abs(out[i])));
      }
    }
    CHECK(out == first);                 // pools of one instruction set
    for (const ExpertJob& job : jobs) {  // one job and one route at a time: the same bits
      for (std::int32_t r = 0; r < job.num_routes; ++r) {
        const ExpertJob alone{job.record, job.layout, job.routes + r, 1};
        std::vector<float> single(expected.size());
        const ExpertBatch one{hidden.data(), weights.data(), single.data(), kTokens, kTopK, kHidden};
        ft::run_expert_jobs(*pool, {&alone, 1}, one, true);
        const std::size_t at = static_cast<std::size_t>(job.routes[r]) * kHidden;
        CHECK(std::memcmp(&single[at], &out[at], kHidden * sizeof(float)) == 0);
      }
    }
  }
}

}  // namespace

int main() {
  for (const Isa isa : available()) {
    const Q4Kernels& kernels = ft::detail::q4_kernels(isa);
    quantised_codes(kernels);
    products(kernels);
    strange_values(kernels);
    std::vector<std::unique_ptr<WorkerPool>> pools;
    for (const int threads : {1, 2, 5})
      pools.push_back(std::make_unique<WorkerPool>(threads, std::vector<int>{}, 0, isa));
    for (const auto& pool : pools) linear(*pool);
    for (const int tile_columns : {32, 64, 96}) experts(pools, tile_columns);
  }
  return 0;
}
