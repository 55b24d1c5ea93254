// Runs programs: owns the thread pool and the chosen kernels, plans a step's phases and executes them in one go.
#pragma once
#include <span>
#include <string>

#include "fault.h"
#include "kernel_table.h"

namespace octavo {

class Executor {
 public:
  // isa: a name of available_kernels(), or empty for the best. Throws std::invalid_argument for another name. `pulse` is
  // the thread pool's.
  Executor(const std::string &isa, int threads, std::atomic<uint64_t> *pulse = nullptr);
  const KernelTable &kernels() const { return kernels_; }
  ThreadPool &pool() { return pool_; }

 private:
  const KernelTable &kernels_;
  ThreadPool pool_;
};

// All weights of a model in the panel layout, in one stretch of memory in the order they were added.
class WeightStore {
 public:
  WeightStore(std::shared_ptr<Executor> executor, size_t bytes) : executor_(std::move(executor)), memory_(bytes) {}
  static int64_t matrix_bytes(WeightType type, int64_t n, int64_t k);
  static int64_t vector_bytes(int64_t n);
  // rows: the matrix as the file has it, row by row, expert by expert. row_scales: [experts * n], or empty. Returns the
  // weight's id. Throws std::invalid_argument if their sizes are others.
  WeightId add_matrix(WeightType type, int experts, int n, int k, std::span<const std::byte> rows, std::span<const float> row_scales);
  WeightId add_vector(std::span<const float> values);
  const std::vector<PackedWeight> &weights() const { return weights_; }
  size_t num_bytes() const { return used_; }

 private:
  std::byte *take(int64_t bytes);
  const float *copy(std::span<const float> values);
  std::shared_ptr<Executor> executor_;
  Memory memory_;
  size_t used_ = 0;
  std::vector<PackedWeight> weights_;
};

struct KVShape {
  KVType type;
  int num_layers, num_blocks, block_size, num_kv_heads, head_dim;
  int64_t block_bytes() const;  // of one block over all layers
};

// One memory for all KV groups; whose a block is, the caller knows.
class KVPool {
 public:
  KVPool(const KVShape &shape, int num_groups);
  KVPool(const KVPool &) = delete;
  KVPool &operator=(const KVPool &) = delete;
  // Copies whole blocks (all layers), in order.
  void copy_blocks(std::span<const int32_t> from, std::span<const int32_t> to);
  void fill(uint8_t byte);  // 0xff: every float, half and bfloat16 is NaN
  const KVCache &cache() const { return cache_; }
  int num_groups() const { return num_groups_; }

 private:
  Memory memory_;
  KVCache cache_;
  int num_groups_;
};

struct ProgramShape {
  size_t arena_bytes;
  int max_tokens, max_sequences;
};

class Program {
 public:
  Program(std::shared_ptr<Executor> executor, std::shared_ptr<WeightStore> weights, std::shared_ptr<KVPool> pool,
          std::span<const int64_t> records, std::vector<TensorInfo> tensors, const ProgramShape &shape);
  // Bytes beyond arena, weights and cache: the threads' scratch memory and the partial results of attention.
  static size_t extra_bytes(int threads, int vocab_size, int num_heads, int head_dim);
  // One step. Throws std::invalid_argument if the batch does not fit the program.
  void run(const Batch &batch);
  // The outputs for other rows of the step that ran last: its operations on selected rows run again. Throws
  // std::invalid_argument if these are no rows of the step, or too many.
  void select(std::span<const int32_t> rows);
  // Rows of a tensor after the step, as floats.
  void read(TensorId id, float *out) const;
  size_t num_kv_groups() const { return static_cast<size_t>(pool_->num_groups()); }
  int rows(TensorId id) const { return step_.rows(id); }  // in the last step
  void fill_workspace(uint8_t byte);                      // 0xff: NaN everywhere; for tests of recycled memory
  const TensorInfo &tensor(TensorId id) const { return tensors_.at(id); }
  // Samples from the rows of a FLOAT32 tensor; args.logits and args.stride are set here.
  void sample(TensorId logits, SampleArgs args);
  // The same for tokens that are given: their log-probabilities and those of the best.
  void score(TensorId logits, SampleArgs args);

 private:
  using RowKernel = void (*)(const SampleArgs &, int row, void *scratch);
  void run_rows(TensorId logits, SampleArgs &args, RowKernel kernel);
  void add_phases(const Op &op);
  void run_phases();
  void check(const Batch &batch) const;
  void prepare_attention();
  void prepare_experts();
  void plan_attention(AttentionPlan &plan) const;

  std::shared_ptr<Executor> executor_;
  std::shared_ptr<WeightStore> weights_;
  std::shared_ptr<KVPool> pool_;
  std::vector<Op> ops_;
  std::vector<TensorInfo> tensors_;
  ProgramShape shape_;
  int vocab_size_ = 0;
  int64_t max_positions_ = INT32_MAX;  // of learned position embeddings
  int queries_a_head_ = 1;             // of the attention operations, the most
  int num_heads_ = 0, padded_dim_ = 0;
  Memory arena_, partials_;
  std::vector<int32_t> positions_, sequences_;
  std::vector<AttentionPlan> attention_plans_;
  std::vector<int64_t> group_windows_;  // the widest of each KV group; 0: all positions
  std::vector<int32_t> expert_rows_, active_experts_, row_tokens_;
  RoutedRows routed_{};
  PhaseList phases_;
  Fault fault_;
  Step step_{};
};

}  // namespace octavo
