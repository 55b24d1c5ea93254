// What the executor works on: tensors in the arena, packed weights, the paged KV cache, and one step's batch.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "op_records.h"
#include "thread_pool.h"

namespace octavo {

// How a backend keeps a row of numbers.
//   FLOAT32      float[width]
//   BFLOAT16     uint16[width rounded up to 2], padded with 0
//   INT8_BLOCKS  int8[width] codes | float[blocks] scale | float[blocks] scale * sum of codes | int32[blocks] sum of
//                codes; blocks of 32, width a multiple of 32
//   INT8_TWICE   int8[width] codes | int8[width] fine codes | float[blocks] scale | float[blocks] scale * (sum of codes +
//                sum of fine codes / 254) | int32[blocks] sum of codes | int32[blocks] sum of fine codes;
//                a value is scale * (code + fine code / 254): 16 bits for the logits, where nothing averages errors out
// Every row begins at a multiple of 64 bytes.
enum class Storage : int64_t { FLOAT32 = 0, BFLOAT16 = 1, INT8_BLOCKS = 2, INT8_TWICE = 3 };
inline constexpr float kFineSteps = 254.0f;
inline constexpr int kBlock = 32;
int64_t row_bytes(Storage storage, int64_t width);

struct TensorInfo {
  int64_t offset;  // bytes from the arena's begin
  int64_t stride;  // bytes a row
  int width;
  Rows rows;
  int copies;  // rows for each of the step's
  Storage storage;
};

struct TensorView {
  std::byte *base;
  int64_t stride;
  int width;
  Storage storage;
  std::byte *row(int64_t i) const { return base + i * stride; }
  float *row_f32(int64_t i) const { return reinterpret_cast<float *>(row(i)); }
};

// GGML's type numbers.
enum class WeightType : int { F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q8_0 = 8, BF16 = 30 };

// A matrix [n, k] in panels of 16 rows; n is padded to whole panels with zeros. One panel, bytes:
//   Q4_0, Q4_1  codes[k/32][4][16][4]: in group g, row r: inputs 4g..4g+3 in the low and 16+4g.. in the high nibbles
//   Q8_0        codes[k/32][8][16][4]: unsigned (value + 128)
//               then float16 scale[k/32][16], then for Q4_1 float16 minimum[k/32][16]
//   BF16        [k/2][16][2] (k padded to 2)        F16, F32  [k][16]
// Panels begin at multiples of 64 bytes and follow each other, so a matrix is read as one stream.
// A vector (norm weight, bias) has k = 0 and is float[n]. Experts' matrices [experts, n, k] follow each other.
inline constexpr int kPanel = 16;
struct PackedWeight {
  WeightType type;
  int n, k;
  const std::byte *data;
  int experts = 1;
  PackedWeight expert(int e) const { return {type, n, k, panel(e * panels())}; }
  int panels() const { return (n + kPanel - 1) / kPanel; }
  const std::byte *panel(int i) const { return data + i * panel_bytes(type, k); }
  const float *vector() const { return reinterpret_cast<const float *>(data); }
  static int64_t panel_bytes(WeightType type, int64_t k);
  // Of one block of 32 inputs in a panel.
  static constexpr int64_t code_bytes(WeightType type) { return type == WeightType::Q8_0 ? 512 : 256; }
  // The unsigned code that stands for 0; Q4_1 has a minimum instead.
  static constexpr int zero_point(WeightType type) { return type == WeightType::Q8_0 ? 128 : type == WeightType::Q4_0 ? 8 : 0; }
};

// Anonymous memory that costs nothing until it is touched, on huge pages where the system grants them.
class Memory {
 public:
  explicit Memory(size_t bytes);
  ~Memory();
  Memory(const Memory &) = delete;
  Memory &operator=(const Memory &) = delete;
  std::byte *data() const { return data_; }
  size_t size() const { return size_; }

 private:
  std::byte *data_;
  size_t size_;
};

enum class KVType : int { FLOAT32 = 0, FLOAT16 = 1, BFLOAT16 = 2 };
inline constexpr int kTile = 8;  // tokens in a micro-tile

// The pool, layer-major. All KV groups share it: a block belongs to one group at a time and has room for as many layers
// as the largest group has. In each layer, `num_blocks` blocks; in a block, for each KV head, first the keys, then the
// values, both in micro-tiles of 8 tokens (d: head dimension padded to 16 with zeros):
//
//   layer 0                                          layer 1
//   | block 0               | block 1 | ...          | block 0 ...
//   | head 0    | head 1 .. |
//   | K K | V V |             K, V: block_size / 8 tiles each
//
//   FLOAT32, FLOAT16   K tile [d][8 tokens]            V tile [8 tokens][d]
//   BFLOAT16           K tile [d/2][8 tokens][2]       V tile [4 pairs of tokens][d][2]   (for pairwise dot products)
struct KVCache {
  KVType type;
  int num_layers, num_blocks, block_size, num_kv_heads, head_dim;
  std::byte *data;
  int padded_dim() const { return (head_dim + 15) / 16 * 16; }
  int element_bytes() const { return type == KVType::FLOAT32 ? 4 : 2; }
  int64_t tile_bytes() const { return static_cast<int64_t>(kTile) * padded_dim() * element_bytes(); }
  int64_t head_bytes() const { return 2 * (block_size / kTile) * tile_bytes(); }
  int64_t block_bytes() const { return num_kv_heads * head_bytes(); }  // of one layer
  int64_t layer_bytes() const { return num_blocks * block_bytes(); }
  std::byte *keys(int layer, int64_t block, int head) const {
    return data + layer * layer_bytes() + block * block_bytes() + head * head_bytes();
  }
  std::byte *values(int layer, int64_t block, int head) const { return keys(layer, block, head) + head_bytes() / 2; }
};

// The block tables of one KV group, a row a sequence.
struct BlockTables {
  const int32_t *data;
  int64_t stride;
  const int32_t *of(int sequence) const { return data + sequence * stride; }
};

// One step's ragged batch. Sequence s owns rows [first_row[s], first_row[s + 1]), at positions from first_position[s].
struct Batch {
  int num_tokens, num_sequences, num_selected;
  const int32_t *token_ids;         // [num_tokens]
  const int32_t *first_row;         // [num_sequences + 1]
  const int32_t *first_position;    // [num_sequences]
  const BlockTables *block_tables;  // [KV groups]
  const int32_t *selected_rows;     // [num_selected]
};

// Attention cuts a context into partitions by absolute position; each is softmaxed alone and they are merged in order,
// so that any split of the work gives the same bits.
inline constexpr int kPartition = 256;
// The first position that a token at `position` sees; window 0: all.
inline int first_visible(int position, int64_t window) {
  return window > 0 && position >= window ? static_cast<int>(position - window + 1) : 0;
}
// One KV head's share of work is (unit, head). partition: kAllPartitions, or one partition of a single-token sequence
// whose partial result goes to slot `slot` of the workspace.
inline constexpr int kAllPartitions = -1;
struct AttentionUnit {
  int sequence, first_token, num_tokens;  // tokens of the sequence in this step
  int partition, slot;
};
struct AttentionMerge {  // a single-token sequence whose partitions lie in slots [slot, slot + partitions)
  int sequence, slot, partitions;
};
// How the attention operations with one window are cut in this step.
struct AttentionPlan {
  int64_t window;
  std::vector<AttentionUnit> units;
  std::vector<AttentionMerge> merges;
};

// The rows of Dispatch, as the Route operation that ran last has ordered them.
struct RoutedRows {
  int32_t *first;   // [experts + 1]: expert e owns rows [first[e], first[e + 1])
  int32_t *active;  // [num_active]: the experts that own some
  int32_t *token;   // [rows]: whose copy a row is
  int num_active;
};

// What the kernels see of a program and a step.
struct Step {
  const TensorInfo *tensors;
  const PackedWeight *weights;
  KVCache cache;
  std::byte *arena;
  Batch batch;
  int threads;
  const int32_t *positions;              // [num_tokens]
  const int32_t *sequences;              // [num_tokens]: which sequence a token belongs to
  const AttentionPlan *attention_plans;  // one for each window that the program has
  RoutedRows *routed;
  float *partials;         // [slots, num_heads, 2 + padded head_dim]: maximum, sum, weighted values
  int64_t partial_stride;  // floats a slot

  TensorView view(TensorId id) const {
    const TensorInfo &t = tensors[id];
    return {arena + t.offset, t.stride, t.width, t.storage};
  }
  int rows(TensorId id) const {
    const TensorInfo &t = tensors[id];
    return (t.rows == Rows::TOKENS ? batch.num_tokens : batch.num_selected) * t.copies;
  }
  const AttentionPlan &attention(int64_t window) const {
    const AttentionPlan *plan = attention_plans;
    while (plan->window != window) plan++;
    return *plan;
  }
};

class PhaseList {
 public:
  void add(Phase phase) {
    if (phase.chunks > 0) phases_.push_back(phase);
  }
  void clear() { phases_.clear(); }
  const Phase *data() const { return phases_.data(); }
  int size() const { return static_cast<int>(phases_.size()); }

 private:
  std::vector<Phase> phases_;
};

}  // namespace octavo
