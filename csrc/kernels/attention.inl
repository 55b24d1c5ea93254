// Paged attention: write this step's keys and values, then attend through the block tables.
//
// The context of a row is cut into partitions of kPartition tokens by absolute position. Each partition is softmaxed
// alone (maximum, sum, weighted values) and merged into the row's running state in order of position (online softmax,
// Milakov and Gimelshein 2018). Prefill, chunked prefill and decode run the same two functions, so they give the same bits.
//
// With a window a row begins at its first visible position: partitions and vectors before it are left out, which changes
// no bit, for what is masked weighs exactly 0. Micro-tiles that no row of a query tile sees are never read: their blocks
// may have been given away.
namespace octavo::OCTAVO_ISA {

// ---- phase 1: rotate, write ----

// One head's vector in the cache's element type, padded with zeros to padded_dim. What is not finite there becomes the
// type's largest value: a position that a row may not see meets weight 0, and 0 * infinity would reach that row.
static void convert_head(const KVCache &c, const float *x, float *padded, uint16_t *half) {
  int n = c.padded_dim();
  float largest = c.type == KVType::FLOAT16 ? 65504.0f : c.type == KVType::BFLOAT16 ? 0x1.fep127f : 0x1.fffffep127f;
  for (int d = 0; d < n; d += 16) {
    int lanes = c.head_dim - d < 16 ? c.head_dim - d : 16;
    F32 v = vmin(vmax(load_n(x + d, lanes), set1(-largest)), set1(largest));
    store(padded + d, v);
    if (c.type == KVType::FLOAT16) store_f16(half + d, v);
    if (c.type == KVType::BFLOAT16) store_bf16(half + d, v);
  }
}

// `closes`: no later token of the sequence is written in this step. The partner of a lone even token in a pair is then
// set to zero: it meets weight 0 in the pairwise products, and recycled memory may hold NaN.
static void write_token(const KVCache &c, int layer, int64_t block, int offset, int head, const float *k, const float *v, bool closes) {
  float padded[256];
  uint16_t half[256];
  int n = c.padded_dim(), slot = offset % kTile;
  std::byte *kt = c.keys(layer, block, head) + offset / kTile * c.tile_bytes();
  std::byte *vt = c.values(layer, block, head) + offset / kTile * c.tile_bytes();
  convert_head(c, k, padded, half);
  if (c.type == KVType::FLOAT32) {
    for (int d = 0; d < n; d++) reinterpret_cast<float *>(kt)[d * kTile + slot] = padded[d];
  } else if (c.type == KVType::FLOAT16) {
    for (int d = 0; d < n; d++) reinterpret_cast<uint16_t *>(kt)[d * kTile + slot] = half[d];
  } else {
    for (int d = 0; d < n; d += 2) std::memcpy(kt + (d / 2 * kTile + slot) * 4, half + d, 4);
  }
  convert_head(c, v, padded, half);
  if (c.type == KVType::FLOAT32) {
    std::memcpy(vt + slot * n * 4, padded, n * 4);
  } else if (c.type == KVType::FLOAT16) {
    std::memcpy(vt + slot * n * 2, half, n * 2);
  } else {
    auto *pair = reinterpret_cast<uint16_t *>(vt) + slot / 2 * n * 2;
    for (int d = 0; d < n; d++) pair[d * 2 + slot % 2] = half[d];
    if (closes && slot % 2 == 0)
      for (int d = 0; d < n; d++) pair[d * 2 + 1] = 0;
  }
}

inline constexpr int kTokensAWrite = 8;

static void write_chunk(const void *o, const void *s, int chunk, void *scratch) {
  const auto &op = *static_cast<const Attention *>(o);
  const auto &step = *static_cast<const Step *>(s);
  const KVCache &c = step.cache;
  auto *rotated = static_cast<float *>(scratch);
  TensorView q = step.view(op.q), k = step.view(op.k), v = step.view(op.v);
  int end = (chunk + 1) * kTokensAWrite;
  for (int row = chunk * kTokensAWrite; row < (end < step.batch.num_tokens ? end : step.batch.num_tokens); row++) {
    std::memcpy(rotated, k.row(row), k.width * sizeof(float));
    if (op.rope != kNone) {
      TensorView table = step.view(op.rope);
      for (int h = 0; h < q.width; h += c.head_dim) rotate(q.row_f32(row) + h, table.row_f32(row), table.width / 2, op.rope_interleaved);
      for (int h = 0; h < k.width; h += c.head_dim) rotate(rotated + h, table.row_f32(row), table.width / 2, op.rope_interleaved);
    }
    int sequence = step.sequences[row], position = step.positions[row];
    bool closes = row + 1 == step.batch.first_row[sequence + 1];
    int64_t block = step.batch.block_tables[op.group].of(sequence)[position / c.block_size];
    for (int h = 0; h < c.num_kv_heads; h++)
      write_token(c, static_cast<int>(op.layer), block, position % c.block_size, h, rotated + h * c.head_dim,
                  v.row_f32(row) + h * c.head_dim, closes);
  }
}

// ---- phase 2: attend ----

// A few query rows of one KV head with their running softmax.
struct QueryTile {
  int rows;
  int first[kQueryTile], position[kQueryTile];   // a row sees positions first .. position
  alignas(64) float q[kQueryTile][256];          // padded with zeros
  alignas(64) uint16_t q_bf16[kQueryTile][256];  // the same, for BFLOAT16 caches
  float top[kQueryTile], sum[kQueryTile];
  alignas(64) float values[kQueryTile][256];
};

struct PartitionScratch {
  alignas(64) float scores[kQueryTile][kPartition];
  alignas(64) uint16_t weights_bf16[kQueryTile][kPartition];
  const std::byte *k[kPartition / kTile], *v[kPartition / kTile];
  float top[kQueryTile], sum[kQueryTile];
  alignas(64) float values[kQueryTile][256];
};

// scores[r][i] = q[r] . k[i] for i in [begin * 16, end * 16).
template <KVType T, int R>
static void score(const QueryTile &t, PartitionScratch &s, int begin, int end, int dim) {
  for (int c = begin; c < end; c++) {
    const std::byte *a = s.k[2 * c], *b = s.k[2 * c + 1];
    F32 acc[R];
    for (int r = 0; r < R; r++) acc[r] = zero();
    if constexpr (T == KVType::BFLOAT16) {
      for (int d = 0; d < dim / 2; d++) {
        I32 k = load_pairs_2x8(reinterpret_cast<const uint16_t *>(a) + d * 16, reinterpret_cast<const uint16_t *>(b) + d * 16);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
          uint32_t pair;
          std::memcpy(&pair, t.q_bf16[r] + 2 * d, 4);
          acc[r] = dot_bf16(acc[r], k, pair);
        }
      }
    } else {
      for (int d = 0; d < dim; d++) {
        F32 k;
        if constexpr (T == KVType::FLOAT32)
          k = load_2x8(reinterpret_cast<const float *>(a) + d * 8, reinterpret_cast<const float *>(b) + d * 8);
        else
          k = load_f16_2x8(reinterpret_cast<const uint16_t *>(a) + d * 8, reinterpret_cast<const uint16_t *>(b) + d * 8);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) acc[r] = fma(k, set1(t.q[r][d]), acc[r]);
      }
    }
    for (int r = 0; r < R; r++) store(s.scores[r] + c * 16, acc[r]);
  }
}

// values[r] = sum over positions [begin, end) of weight * v, C vectors of dimensions at a time, positions in order.
template <KVType T, int R, int C>
static void weigh(PartitionScratch &s, int begin, int end, int dim, int first) {
  F32 acc[R][C];
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) acc[r][c] = zero();
  if constexpr (T == KVType::BFLOAT16) {
    for (int pair = begin / 2; pair < (end + 1) / 2; pair++) {
      auto *v = reinterpret_cast<const uint16_t *>(s.v[pair / 4]) + (pair % 4) * dim * 2 + first * 2;
      I32 x[C];
      for (int c = 0; c < C; c++) x[c] = load_words(v + c * 32);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        uint32_t p;
        std::memcpy(&p, s.weights_bf16[r] + 2 * pair, 4);
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) acc[r][c] = dot_bf16(acc[r][c], x[c], p);
      }
    }
  } else {
    for (int i = begin; i < end; i++) {
      F32 x[C];
      for (int c = 0; c < C; c++) {
        if constexpr (T == KVType::FLOAT32)
          x[c] = load(reinterpret_cast<const float *>(s.v[i / kTile]) + (i % kTile) * dim + first + c * 16);
        else
          x[c] = load_f16(reinterpret_cast<const uint16_t *>(s.v[i / kTile]) + (i % kTile) * dim + first + c * 16);
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) acc[r][c] = fma(x[c], set1(s.scores[r][i]), acc[r][c]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) store(s.values[r] + first + c * 16, acc[r][c]);
}

template <KVType T, int R>
static void weigh_all(PartitionScratch &s, int begin, int end, int dim) {
  int d = 0;
  for (; d + 64 <= dim; d += 64) weigh<T, R, 4>(s, begin, end, dim, d);
  for (; d < dim; d += 16) weigh<T, R, 1>(s, begin, end, dim, d);
}

// How scores become exponents: score * scale, after scores were capped to tanh(score * inner) if inner is not 0.
struct ScoreShape {
  float scale, inner;
};

// The positions of a partition that some row of a tile sees: [begin, end) from its base.
struct Visible {
  int begin, end;
  Visible(const QueryTile &t, int base) {  // rows are in order of position
    begin = t.first[0] - base > 0 ? t.first[0] - base : 0;
    end = t.position[t.rows - 1] + 1 - base < kPartition ? t.position[t.rows - 1] + 1 - base : kPartition;
  }
};

// Attention of a tile's rows over the positions of one partition, [base, base + kPartition), alone.
// Rows that see nothing of it get sum 0 and must not be merged.
template <KVType T, int R>
static void attend_partition(const QueryTile &t, PartitionScratch &s, int base, int dim, ScoreShape shape) {
  Visible seen(t, base);
  int begin = seen.begin / 16, chunks = (seen.end + 15) / 16;
  score<T, R>(t, s, begin, chunks, dim);
  for (int r = 0; r < R; r++) {
    int first = t.first[r] - base, end = t.position[r] + 1 - base;
    F32 hidden = set1(static_cast<float>(first)), limit = set1(static_cast<float>(end)), top = set1(-INFINITY);
    for (int c = begin; c < chunks; c++) {
      F32 x = load(s.scores[r] + c * 16);
      bool capped = shape.inner != 0, early = c * 16 < first, late = c * 16 + 16 > end;
      if (capped || early || late) {
        F32 at = lane_index() + set1(static_cast<float>(c * 16));
        if (capped) x = tanh(x * set1(shape.inner));
        if (early) x = where_less(at, hidden, set1(-INFINITY), x);
        if (late) x = where_less(at, limit, x, set1(-INFINITY));
        store(s.scores[r] + c * 16, x);
      }
      top = vmax(x, top);  // passes over NaN
    }
    float best = reduce_max(top);
    s.top[r] = best > -INFINITY ? best * shape.scale : 0.0f;
    F32 sum = zero(), shift = set1(-s.top[r]), factor = set1(shape.scale);
    for (int c = begin; c < chunks; c++) {
      F32 p = exp(fma(load(s.scores[r] + c * 16), factor, shift));
      if constexpr (T == KVType::BFLOAT16) {
        store_bf16(s.weights_bf16[r] + c * 16, p);
        p = load_bf16(s.weights_bf16[r] + c * 16);
      } else {
        store(s.scores[r] + c * 16, p);
      }
      sum = sum + p;
    }
    s.sum[r] = reduce_add(sum);
  }
  weigh_all<T, R>(s, seen.begin / kTile * kTile, seen.end, dim);  // only what is written: 0 * NaN would be felt
}

// Folds one partition's (top, sum, values) into a running state; the first partition replaces it.
OCTAVO_INLINE void merge(bool first, float &top, float &sum, float *values, float part_top, float part_sum, const float *part, int dim) {
  if (first) {
    top = part_top;
    sum = part_sum;
    std::memcpy(values, part, dim * sizeof(float));
    return;
  }
  float both = top > part_top ? top : part_top;
  float exponents[16] = {top - both, part_top - both}, factors[16];
  store(factors, exp(load(exponents)));
  F32 a = set1(factors[0]), b = set1(factors[1]);
  for (int d = 0; d < dim; d += 16) store(values + d, fma(load(part + d), b, load(values + d) * a));
  sum = sum * factors[0] + part_sum * factors[1];
  top = both;
}

OCTAVO_INLINE void finish_row(const TensorView &to, int row, int head, int head_dim, float sum, float *values) {
  F32 inverse = set1(1.0f / sum);
  for (int d = 0; d < head_dim; d += 16) store(values + d, load(values + d) * inverse);
  for (int d = 0; d < head_dim; d += 32) store_columns(to, row, head * head_dim + d, values + d, head_dim - d < 32 ? head_dim - d : 32);
}

template <KVType T, int R>
static void attend_rows(const QueryTile &t, PartitionScratch &s, int base, int dim, ScoreShape shape) {
  if constexpr (R > 1) {
    if (t.rows < R) return attend_rows<T, R - 1>(t, s, base, dim, shape);
  }
  attend_partition<T, R>(t, s, base, dim, shape);
}

static void attend_chunk(const void *o, const void *s, int chunk, void *scratch) {
  const auto &op = *static_cast<const Attention *>(o);
  const auto &step = *static_cast<const Step *>(s);
  const KVCache &c = step.cache;
  const AttentionUnit &unit = step.attention(op.window).units[chunk / c.num_kv_heads];
  int kv_head = chunk % c.num_kv_heads, group = static_cast<int>(op.num_heads / op.num_kv_heads);
  int dim = c.padded_dim(), first_row = step.batch.first_row[unit.sequence] + unit.first_token;
  const int32_t *table = step.batch.block_tables[op.group].of(unit.sequence);
  TensorView q = step.view(op.q), to = step.view(op.outputs[0]);
  auto &tile = *static_cast<QueryTile *>(scratch);
  auto &part = *reinterpret_cast<PartitionScratch *>(static_cast<std::byte *>(scratch) + sizeof(QueryTile));
  bool capped = op.softcap > 0;
  ScoreShape shape{static_cast<float>(capped ? op.softcap : op.scale), static_cast<float>(capped ? op.scale / op.softcap : 0)};

  int total = unit.num_tokens * group;
  for (int done = 0; done < total; done += tile.rows) {
    tile.rows = total - done < kQueryTile ? total - done : kQueryTile;
    int last = 0;
    for (int r = 0; r < tile.rows; r++) {
      int row = first_row + (done + r) / group, head = kv_head * group + (done + r) % group;
      tile.position[r] = last = step.positions[row];
      tile.first[r] = first_visible(last, op.window);
      const float *from = q.row_f32(row) + head * c.head_dim;
      for (int d = 0; d < dim; d += 16) {
        int lanes = c.head_dim - d < 16 ? c.head_dim - d : 16;
        F32 v = load_n(from + d, lanes);
        store(tile.q[r] + d, v);
        store_bf16(tile.q_bf16[r] + d, v);
      }
    }
    int begin = unit.partition == kAllPartitions ? tile.first[0] / kPartition : unit.partition,
        end = unit.partition == kAllPartitions ? last / kPartition + 1 : begin + 1;
    for (int p = begin; p < end; p++) {
      int base = p * kPartition;
      Visible seen(tile, base);
      for (int i = seen.begin / 16 * 2; i < (seen.end + 15) / 16 * 2; i++) {
        bool visible = (i + 1) * kTile > seen.begin && i * kTile < seen.end;
        int position = base + (visible ? i * kTile : seen.begin);  // what nobody sees repeats a tile: scored, then masked
        int64_t block = table[position / c.block_size];
        int64_t at = position % c.block_size / kTile * c.tile_bytes();
        part.k[i] = c.keys(static_cast<int>(op.layer), block, kv_head) + at;
        part.v[i] = c.values(static_cast<int>(op.layer), block, kv_head) + at;
      }
      switch (c.type) {
        case KVType::FLOAT32: attend_rows<KVType::FLOAT32, kQueryTile>(tile, part, base, dim, shape); break;
        case KVType::FLOAT16: attend_rows<KVType::FLOAT16, kQueryTile>(tile, part, base, dim, shape); break;
        case KVType::BFLOAT16: attend_rows<KVType::BFLOAT16, kQueryTile>(tile, part, base, dim, shape); break;
      }
      for (int r = 0; r < tile.rows; r++) {
        if (tile.position[r] < base || tile.first[r] >= base + kPartition) continue;
        if (unit.partition == kAllPartitions) {
          merge(p == tile.first[r] / kPartition, tile.top[r], tile.sum[r], tile.values[r], part.top[r], part.sum[r], part.values[r], dim);
        } else {
          int head = kv_head * group + done + r;
          float *slot = step.partials + unit.slot * step.partial_stride + static_cast<int64_t>(head) * (dim + 2);
          slot[0] = part.top[r];
          slot[1] = part.sum[r];
          std::memcpy(slot + 2, part.values[r], dim * sizeof(float));
        }
      }
    }
    if (unit.partition != kAllPartitions) continue;
    for (int r = 0; r < tile.rows; r++)
      finish_row(to, first_row + (done + r) / group, kv_head * group + (done + r) % group, c.head_dim, tile.sum[r], tile.values[r]);
  }
}

// ---- phase 3: merge the partitions of single-token sequences that were cut among threads ----

static void merge_chunk(const void *o, const void *s, int chunk, void *) {
  const auto &op = *static_cast<const Attention *>(o);
  const auto &step = *static_cast<const Step *>(s);
  const KVCache &c = step.cache;
  const AttentionMerge &m = step.attention(op.window).merges[chunk];
  int dim = c.padded_dim();
  for (int head = 0; head < op.num_heads; head++) {
    float top = 0, sum = 0;
    alignas(64) float values[256];
    for (int p = 0; p < m.partitions; p++) {
      const float *slot = step.partials + (m.slot + p) * step.partial_stride + static_cast<int64_t>(head) * (dim + 2);
      merge(p == 0, top, sum, values, slot[0], slot[1], slot + 2, dim);
    }
    finish_row(step.view(op.outputs[0]), step.batch.first_row[m.sequence], head, c.head_dim, sum, values);
  }
}

static void plan(const Attention &op, const Step &step, PhaseSink add) {
  static_assert(sizeof(QueryTile) + sizeof(PartitionScratch) <= kScratchBytes);
  const AttentionPlan &cut = step.attention(op.window);
  add({write_chunk, &op, (step.batch.num_tokens + kTokensAWrite - 1) / kTokensAWrite});
  add({attend_chunk, &op, static_cast<int>(cut.units.size()) * static_cast<int>(op.num_kv_heads)});
  add({merge_chunk, &op, static_cast<int>(cut.merges.size())});
}

}  // namespace octavo::OCTAVO_ISA
