// Runs programs: owns the thread pool and the chosen kernels, plans a step's phases and executes them in one go.
#pragma once
#include <span>
#include <string>

#include "kernel_table.h"

namespace octavo {

class Executor {
 public:
  // isa: a name of available_kernels(), or empty for the best. Throws std::invalid_argument for another name.
  Executor(const std::string &isa, int threads);
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
  // rows: the matrix as the file has it, row by row. Returns the weight's id.
  WeightId add_matrix(WeightType type, int n, int k, std::span<const std::byte> rows);
  WeightId add_vector(std::span<const float> values);
  const std::vector<PackedWeight> &weights() const { return weights_; }
  size_t num_bytes() const { return used_; }

 private:
  std::byte *take(int64_t bytes);
  std::shared_ptr<Executor> executor_;
  Memory memory_;
  size_t used_ = 0;
  std::vector<PackedWeight> weights_;
};

struct KVGroupShape {
  KVType type;
  int num_layers, num_blocks, block_size, num_kv_heads, head_dim;
};

class KVPool {
 public:
  explicit KVPool(const std::vector<KVGroupShape> &groups);
  KVPool(const KVPool &) = delete;
  KVPool &operator=(const KVPool &) = delete;
  static int64_t block_bytes(const KVGroupShape &g);  // of one block in all layers of the group
  // Copies whole blocks (all layers of one group), in order.
  void copy_blocks(int group, std::span<const int32_t> from, std::span<const int32_t> to);
  void fill(int group, uint8_t byte);  // 0xff: every float, half and bfloat16 is NaN
  const std::vector<KVCache> &caches() const { return caches_; }

 private:
  std::vector<std::unique_ptr<Memory>> memory_;
  std::vector<KVCache> caches_;
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
  // Rows of a tensor after the step, as floats.
  void read(TensorId id, float *out) const;
  size_t num_kv_groups() const { return pool_->caches().size(); }
  int rows(TensorId id) const { return step_.rows(id); }  // in the last step
  void fill_workspace(uint8_t byte);                      // 0xff: NaN everywhere; for tests of recycled memory
  const TensorInfo &tensor(TensorId id) const { return tensors_.at(id); }
  // Samples from the rows of a FLOAT32 tensor; args.logits and args.stride are set here.
  void sample(TensorId logits, SampleArgs args);

 private:
  void check(const Batch &batch) const;
  void plan_attention();

  std::shared_ptr<Executor> executor_;
  std::shared_ptr<WeightStore> weights_;
  std::shared_ptr<KVPool> pool_;
  std::vector<Op> ops_;
  std::vector<TensorInfo> tensors_;
  ProgramShape shape_;
  int vocab_size_ = 0;
  int queries_a_head_ = 1;  // of the attention operations, the most
  int num_heads_ = 0, padded_dim_ = 0;
  Memory arena_, partials_;
  std::vector<int32_t> positions_, sequences_;
  std::vector<AttentionUnit> units_;
  std::vector<AttentionMerge> merges_;
  PhaseList phases_;
  Step step_{};
};

}  // namespace octavo
