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
//   INT8_BLOCKS  int8[width] codes | Int8Block[blocks]; blocks of 32, width a multiple of 32; a value is scale * code
//   INT8_TWICE   two INT8_BLOCKS rows that are added, the second in steps of 1/254 of the first's: 16 bits for the
//                logits, where nothing averages errors out
// Every row begins at a multiple of 64 bytes.
enum class Storage : int64_t { FLOAT32 = 0, BFLOAT16 = 1, INT8_BLOCKS = 2, INT8_TWICE = 3 };
inline constexpr float kFineSteps = 254.0f;
inline constexpr int kBlock = 32;
struct Int8Block {
  float scale, scaled_sum;  // scaled_sum = scale * sum
  int32_t sum, first_half;  // of all 32 codes and of the first 16
};
constexpr int64_t int8_row_bytes(int64_t width) { return width + width / kBlock * static_cast<int64_t>(sizeof(Int8Block)); }
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

// GGML's type numbers, and our own from 1000 on; quantization/formats.py says what each means.
enum class WeightType : int {
  F32 = 0,
  F16 = 1,
  Q4_0 = 2,
  Q4_1 = 3,
  Q5_0 = 6,
  Q5_1 = 7,
  Q8_0 = 8,
  Q2_K = 10,
  Q3_K = 11,
  Q4_K = 12,
  Q5_K = 13,
  Q6_K = 14,
  IQ4_NL = 20,
  IQ4_XS = 23,
  BF16 = 30,
  INT8 = 1000,
  FP8_E4M3 = 1001,
  FP8_E4M3_BLOCK = 1002,
  U4 = 1003,
  U8 = 1004
};

// A matrix [n, k] in panels of 16 rows; n is padded to whole panels with zeros. One panel, bytes:
//
//   F32, F16    [k][16]
//   BF16        [k/2][16][2] (k padded to 2)
//   FP8_E4M3, FP8_E4M3_BLOCK   [k/4][16][4], of four inputs 0 2 1 3 (k padded to 4), then for _BLOCK float d[k/128][16]
//   all others  codes[k/32] | record[k/unit]
//
// The codes of 32 inputs are unsigned numbers, cut into planes of bits. A plane is a few vectors of 64 bytes; lane r of
// 32 bits belongs to row r, its byte j to the inputs 4g + j of the groups g = 0..7:
//
//   8 bits      8 vectors, one a group
//   4, 5, 6     low 4 bits: 4 vectors; vector g has group g in the low and group g + 4 in the high half of each byte
//   2, 3, 6     2 bits (of 6 the upper): 2 vectors, group g in bits 2(g % 4) of vector g / 4
//   3, 5        the top bit: 1 vector, group g in bit g
//
// A record holds the scales that a unit of 32 or 256 inputs has, each for 16 rows:
//
//   Q4_0, Q5_0, Q8_0, IQ4_NL   float16 d
//   Q4_1, Q5_1                 float16 d | float16 minimum
//   U4, U8                     float16 d | uint8 zero
//   INT8                       nothing
//   Q2_K                       float16 d | float16 dmin | 16 times uint8 (scale, minimum << 4)
//   Q3_K, Q6_K                 float16 d | 16 times int8 scale
//   IQ4_XS                     float16 d | 8 times int8 scale
//   Q4_K, Q5_K                 float16 d | float16 dmin | 8 times (uint8 scale | uint8 minimum)
//
// Panels begin at multiples of 64 bytes and follow each other, so a matrix is read as one stream.
// A vector (norm weight, bias) has k = 0 and is float[n]. Experts' matrices [experts, n, k] follow each other.
struct BlockLayout {  // of the types with records
  int bits, unit, record_bytes;
  int64_t code_bytes() const { return 64 * bits; }  // of 32 inputs
};
constexpr BlockLayout block_layout(WeightType type) {
  using enum WeightType;
  switch (type) {
    case Q4_0: return {4, 32, 32};
    case Q4_1: return {4, 32, 64};
    case Q5_0: return {5, 32, 32};
    case Q5_1: return {5, 32, 64};
    case Q8_0: return {8, 32, 32};
    case Q2_K: return {2, 256, 64 + 16 * 16};
    case Q3_K: return {3, 256, 32 + 16 * 16};
    case Q4_K: return {4, 256, 64 + 16 * 16};
    case Q5_K: return {5, 256, 64 + 16 * 16};
    case Q6_K: return {6, 256, 32 + 16 * 16};
    case IQ4_NL: return {4, 32, 32};
    case IQ4_XS: return {4, 256, 32 + 8 * 16};
    case INT8: return {8, 32, 0};
    case U4: return {4, 32, 48};
    case U8: return {8, 32, 48};
    default: return {0, 0, 0};
  }
}

inline constexpr int kPanel = 16;
struct PackedWeight {
  WeightType type;
  int n, k;
  const std::byte *data;
  int64_t panel_stride;     // panel_bytes(type, k)
  const float *row_scales;  // [experts * n] factors of the rows, or null
  int experts = 1;
  PackedWeight expert(int e) const {
    return {type, n, k, panel(e * panels()), panel_stride, row_scales ? row_scales + static_cast<int64_t>(e) * n : nullptr};
  }
  int panels() const { return (n + kPanel - 1) / kPanel; }
  const std::byte *panel(int i) const { return data + i * panel_stride; }
  const float *vector() const { return reinterpret_cast<const float *>(data); }
  static int64_t panel_bytes(WeightType type, int64_t k);
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
