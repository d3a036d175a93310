// Paged attention on the CPU.
//
// The keys of a sequence are cut into partitions of kKeyPartition positions, at multiples of it. A query's result in a
// partition depends only on the query and the keys there (maximum, sum of exponentials, weighted values), and
// partitions are joined in ascending order, so a query has the same bits in any batch, chunk or thread count.
//
// A *block* is up to kBlockRows query rows (token x head of the KV head's group, tokens outermost) of one sequence and
// one KV head, which share the packed keys. With few blocks and many keys (decode of a long context), each partition of
// a block is an item and the joining happens after a barrier; otherwise a worker walks through the partitions itself.
#include <algorithm>
#include <cstring>
#include <vector>

#include "dense_kernels.h"
#include "row_kernels.h"
#include "work_queue.h"

namespace ft {
namespace {

using detail::AttentionPartition;
using detail::kKeyPartition;
using detail::RowKernels;

constexpr std::int64_t kBlockRows = 64;
constexpr std::size_t kMaxPartialBytes = std::size_t{32} << 20;

struct Block {
  std::int64_t sequence = 0;
  std::int64_t kv_head = 0;
  std::int64_t first_row = 0;  // of the sequence's query rows for this KV head
  std::int64_t num_rows = 0;
  std::int64_t key_begin = 0;  // union over the rows
  std::int64_t key_end = 0;
  std::int64_t partial = 0;  // first partial result, when partitions are items

  std::int64_t first_partition() const { return key_begin / kKeyPartition; }
  std::int64_t end_partition() const { return (key_end + kKeyPartition - 1) / kKeyPartition; }
  std::int64_t num_partitions() const { return end_partition() - first_partition(); }
};

// The rows of a block and their key ranges, and one worker's buffers.
class Worker {
 public:
  Worker(const RowKernels& kernels, const PagedAttention& call, const KvLayer& kv, std::int64_t stride, float* scratch)
      : kernels_(kernels), call_(call), kv_(kv), group_(call.num_heads / kv.num_kv_heads), stride_(stride) {
    packed_keys_ = scratch;
    scores_ = packed_keys_ + kv.head_dim * detail::kMaxKeyTile;
    part_ = scores_ + kBlockRows * kKeyPartition;
    out_ = part_ + kBlockRows * stride_;
  }

  static std::size_t scratch_floats(const KvLayer& kv, std::int64_t stride) {
    return static_cast<std::size_t>(kv.head_dim * detail::kMaxKeyTile + kBlockRows * kKeyPartition +
                                    2 * kBlockRows * stride);
  }

  void run_block(const Block& block) {
    enter(block);
    std::fill_n(joint_sums_, block.num_rows, 0.0f);
    for (std::int64_t p = block.first_partition(); p < block.end_partition(); ++p) {
      run_partition(block, p, maxima_, sums_, part_);
      for (std::int64_t i = 0; i < block.num_rows; ++i) {
        kernels_.attention_merge(&joint_maxima_[i], &joint_sums_[i], out_ + i * stride_, maxima_[i], sums_[i],
                                 part_ + i * stride_, kv_.head_dim);
      }
    }
    for (std::int64_t i = 0; i < block.num_rows; ++i) write(block, i, out_ + i * stride_, joint_sums_[i]);
  }

  // Partition p (counted from the block's first) into its partial result: [maxima][sums][rows].
  void run_partial(const Block& block, std::int64_t p, float* partial) {
    enter(block);
    run_partition(block, block.first_partition() + p, partial, partial + block.num_rows, partial + 2 * block.num_rows);
  }

  void join(const Block& block, std::int64_t row, const float* partials) {
    const std::int64_t size = block.num_rows * (stride_ + 2);
    float maximum = 0.0f;
    float sum = 0.0f;
    for (std::int64_t p = 0; p < block.num_partitions(); ++p) {
      const float* partial = partials + p * size;
      kernels_.attention_merge(&maximum, &sum, out_, partial[row], partial[block.num_rows + row],
                               partial + 2 * block.num_rows + row * stride_, kv_.head_dim);
    }
    write(block, row, out_, sum);
  }

 private:
  std::int64_t token(const Block& block, std::int64_t row) const {
    return call_.row_starts[block.sequence] + (block.first_row + row) / group_;
  }

  std::int64_t head(const Block& block, std::int64_t row) const {
    return block.kv_head * group_ + (block.first_row + row) % group_;
  }

  void enter(const Block& block) {
    if (current_ == &block) return;
    current_ = &block;
    for (std::int64_t i = 0; i < block.num_rows; ++i) {
      const std::int64_t t = token(block, i);
      query_rows_[i] = call_.queries + (t * call_.num_heads + head(block, i)) * kv_.head_dim;
      key_end_[i] = static_cast<std::int64_t>(call_.positions[t]) + 1;
      key_begin_[i] = call_.sliding_window > 0 ? std::max<std::int64_t>(0, key_end_[i] - call_.sliding_window) : 0;
    }
  }

  void run_partition(const Block& block, std::int64_t p, float* maxima, float* sums, float* out) {
    const std::int64_t origin = p * kKeyPartition;
    const auto within = [&](std::int64_t key) {
      return static_cast<std::int32_t>(std::clamp<std::int64_t>(key - origin, 0, kKeyPartition));
    };
    AttentionPartition partition;
    partition.key_begin = within(block.key_begin);
    partition.key_end = within(block.key_end);
    const std::int32_t* table = call_.block_tables + block.sequence * call_.max_blocks;
    for (std::int64_t j = partition.key_begin; j < partition.key_end; ++j) {
      const std::int64_t position = origin + j;
      const std::int64_t kv_block = table[position / kv_.block_size];
      keys_[j] = kv_.key(kv_block, position % kv_.block_size, block.kv_head);
      values_[j] = keys_[j] + kv_.plane_bytes();
    }
    for (std::int64_t i = 0; i < block.num_rows; ++i) {
      first_key_[i] = within(key_begin_[i]);
      end_key_[i] = within(key_end_[i]);
    }
    partition.query_rows = query_rows_;
    partition.first_key = first_key_;
    partition.end_key = end_key_;
    partition.num_rows = static_cast<std::int32_t>(block.num_rows);
    partition.head_dim = static_cast<std::int32_t>(kv_.head_dim);
    partition.keys = keys_;
    partition.values = values_;
    partition.dtype = kv_.dtype;
    partition.scale = call_.scale;
    partition.packed_keys = packed_keys_;
    partition.scores = scores_;
    partition.maxima = maxima;
    partition.sums = sums;
    partition.out = out;
    kernels_.attention_partition(partition);
  }

  void write(const Block& block, std::int64_t row, const float* out, float sum) {
    float* to = call_.out + (token(block, row) * call_.num_heads + head(block, row)) * kv_.head_dim;
    const float scale = 1.0f / sum;
    for (std::int64_t d = 0; d < kv_.head_dim; ++d) to[d] = out[d] * scale;
  }

  const RowKernels& kernels_;
  const PagedAttention& call_;
  const KvLayer& kv_;
  const std::int64_t group_;
  const std::int64_t stride_;
  float* packed_keys_ = nullptr;
  float* scores_ = nullptr;
  float* part_ = nullptr;
  float* out_ = nullptr;
  const Block* current_ = nullptr;
  const float* query_rows_[kBlockRows];
  std::int64_t key_begin_[kBlockRows];
  std::int64_t key_end_[kBlockRows];
  std::int32_t first_key_[kBlockRows];
  std::int32_t end_key_[kBlockRows];
  float maxima_[kBlockRows];
  float sums_[kBlockRows];
  float joint_maxima_[kBlockRows];
  float joint_sums_[kBlockRows];
  const std::byte* keys_[kKeyPartition];
  const std::byte* values_[kKeyPartition];
};

std::vector<Block> cut_blocks(const PagedAttention& call, const KvLayer& kv) {
  const std::int64_t group = call.num_heads / kv.num_kv_heads;
  std::vector<Block> blocks;
  for (std::int64_t sequence = 0; sequence < call.num_rows; ++sequence) {
    const std::int64_t start = call.row_starts[sequence];
    const std::int64_t rows = (call.row_starts[sequence + 1] - start) * group;
    for (std::int64_t first = 0; first < rows; first += kBlockRows) {
      Block block;
      block.sequence = sequence;
      block.first_row = first;
      block.num_rows = std::min(kBlockRows, rows - first);
      block.key_begin = INT64_MAX;
      for (std::int64_t t = start + first / group; t <= start + (first + block.num_rows - 1) / group; ++t) {
        const std::int64_t end = static_cast<std::int64_t>(call.positions[t]) + 1;
        const std::int64_t begin = call.sliding_window > 0 ? std::max<std::int64_t>(0, end - call.sliding_window) : 0;
        block.key_begin = std::min(block.key_begin, begin);
        block.key_end = std::max(block.key_end, end);
      }
      for (block.kv_head = 0; block.kv_head < kv.num_kv_heads; ++block.kv_head) blocks.push_back(block);
    }
  }
  // The longest first, so that the short ones level the end out.
  std::stable_sort(blocks.begin(), blocks.end(), [](const Block& a, const Block& b) {
    return a.num_rows * (a.key_end - a.key_begin) > b.num_rows * (b.key_end - b.key_begin);
  });
  return blocks;
}

}  // namespace

void paged_attention(WorkerPool& pool, const PagedAttention& call, const KvLayer& kv) {
  const RowKernels& kernels = detail::row_kernels(pool.isa());
  const std::int64_t stride = detail::packed_length(kv.head_dim);
  std::vector<Block> blocks = cut_blocks(call, kv);
  if (blocks.empty()) return;
  std::int64_t work = 0;
  std::int64_t partial_floats = 0;
  struct Part {
    const Block* block;
    std::int64_t partition;
  };
  std::vector<Part> parts;
  struct Row {
    const Block* block;
    std::int64_t row;
  };
  std::vector<Row> rows;
  for (Block& block : blocks) {
    block.partial = partial_floats;
    partial_floats += block.num_partitions() * block.num_rows * (stride + 2);
    // Packing a key costs about as much as four query rows.
    work += (block.num_rows + 4) * (block.key_end - block.key_begin) * kv.head_dim * 2;
    for (std::int64_t p = 0; p < block.num_partitions(); ++p) parts.push_back({&block, p});
    for (std::int64_t i = 0; i < block.num_rows; ++i) rows.push_back({&block, i});
  }
  const std::size_t scratch_bytes = Worker::scratch_floats(kv, stride) * sizeof(float);
  const std::size_t partial_bytes = static_cast<std::size_t>(partial_floats) * sizeof(float);
  const auto num_blocks = static_cast<std::int64_t>(blocks.size());
  detail::WorkQueue queue(num_blocks);
  const auto run_blocks = [&](int worker) {
    Worker self(kernels, call, kv, stride, static_cast<float*>(pool.scratch(worker, scratch_bytes)));
    for (std::int64_t i = queue.take(); i >= 0; i = queue.take()) self.run_block(blocks[static_cast<std::size_t>(i)]);
  };
  if (work <= detail::kSoloWork || pool.num_threads() == 1) {
    pool.parallel_for(1, 1, [&](std::int64_t, std::int64_t, int worker) { run_blocks(worker); });
    return;
  }
  const bool by_partition =
      num_blocks < 4 * pool.num_threads() && parts.size() > blocks.size() && partial_bytes <= kMaxPartialBytes;
  if (!by_partition) {
    pool.run(run_blocks);
    return;
  }
  detail::WorkQueue part_queue(static_cast<std::int64_t>(parts.size()));
  detail::WorkQueue row_queue(static_cast<std::int64_t>(rows.size()));
  pool.run_shared(partial_bytes, [&](int worker, std::byte* shared) {
    auto* partials = reinterpret_cast<float*>(shared);
    Worker self(kernels, call, kv, stride, static_cast<float*>(pool.scratch(worker, scratch_bytes)));
    for (std::int64_t i = part_queue.take(); i >= 0; i = part_queue.take()) {
      const Part& part = parts[static_cast<std::size_t>(i)];
      self.run_partial(*part.block, part.partition,
                       partials + part.block->partial + part.partition * part.block->num_rows * (stride + 2));
    }
    pool.barrier(worker);
    for (std::int64_t i = row_queue.take(); i >= 0; i = row_queue.take()) {
      const Row& row = rows[static_cast<std::size_t>(i)];
      self.join(*row.block, row.row, partials + row.block->partial);
    }
  });
}

}  // namespace ft
