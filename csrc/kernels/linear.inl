// Matrix products of activations with packed weights.
//
// A tile is M activation rows by two panels (32 outputs). For one row and one output the sum runs over the inputs in
// one fixed order that depends on the weight's type and the activation's storage only, so M never changes a bit.
namespace octavo::OCTAVO_ISA {

inline constexpr int kTilePanels = 2;
inline constexpr int kTileColumns = kTilePanels * kPanel;
inline constexpr int kRowBlock = 128;  // rows a chunk takes at most: their activations stay in the second-level cache

// One tile's operands: two panels (the last of an odd number twice) and kRowTile rows (what is missing repeats the last).
struct Tile {
  const std::byte *panels[kTilePanels];
  const std::byte *rows[kRowTile];
  int k;
  Expand expand;
  float *out;  // [rows][kTileColumns]
};

template <class T>
OCTAVO_INLINE T word(const std::byte *p) {
  T v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

// Codes of weights times codes of activations. The zero point enters with the start of the integer sum, exactly.
template <WeightType T, int M>
static void tile_int8(const Tile &t) {
  using F = Format<T>;
  using B = Blocks<T>;
  constexpr int P = kTilePanels;
  constexpr bool large = B::kLayout.bits == 8 || F::kTable, narrow = kNarrowSums && !large;
  constexpr int zero_code = large ? F::kZero - kLargeZero : F::kZero;
  // How many groups of codes are summed until their 16-bit sums might not fit.
  constexpr int quads = 32767 / (2 * 127 * ((1 << B::kLayout.bits) - 1)), groups = narrow ? quads / (F::kParts == 2 ? 1 : 2) : 4;
  static_assert(groups > 0);
  const std::byte *records[P];
  for (int p = 0; p < P; p++) records[p] = B::records(t.panels[p], t.k);
  F32 f[M][P];
  for (int m = 0; m < M; m++)
    for (int p = 0; p < P; p++) f[m][p] = zero();
  for (int b = 0; b < t.k / kBlock; b++) {
    const int64_t codes_at = b * kBlock, block_at = t.k + b * static_cast<int64_t>(sizeof(Int8Block));
    OCTAVO_UNROLL(2)
    for (int part = 0; part < F::kParts; part++) {
      auto sum_of = [&](int m) __attribute__((always_inline)) {  // of the activations' codes
        int32_t first = F::kParts == 2 ? word<int32_t>(t.rows[m] + block_at + offsetof(Int8Block, first_half)) : 0;
        return part == 0 && F::kParts == 2 ? first : word<int32_t>(t.rows[m] + block_at + offsetof(Int8Block, sum)) - first;
      };
      I32 acc[M][P], sums[M][P];
      OCTAVO_UNROLL(8)
      for (int m = 0; m < M; m++)
        for (int p = 0; p < P; p++) {
          acc[m][p] = set1(zero_code ? -zero_code * sum_of(m) : 0);
          sums[m][p] = set1(0);
        }
      OCTAVO_UNROLL(4)
      for (int g = 0; g < 4; g++) {
        I32 lo[P], hi[P];
        for (int p = 0; p < P; p++) B::codes(t.panels[p], b, g, lo[p], hi[p]);
        auto multiply = [&](const I32 *codes, int64_t at) __attribute__((always_inline)) {
          OCTAVO_UNROLL(8)
          for (int m = 0; m < M; m++) {
            auto quad = word<int32_t>(t.rows[m] + at);
            OCTAVO_UNROLL(2)
            for (int p = 0; p < P; p++) {
              if constexpr (large) {
                acc[m][p] = dot_large(acc[m][p], codes[p], quad);
              } else {
                I32 &sum = narrow ? sums[m][p] : acc[m][p];
                sum = dot_small(sum, codes[p], quad);
              }
            }
          }
        };
        if (part == 0) multiply(lo, codes_at + g * 4);
        if (part == F::kParts - 1) multiply(hi, codes_at + 16 + g * 4);
        if (narrow && (g == 3 || (g + 1) % groups == 0)) OCTAVO_UNROLL(8)
        for (int m = 0; m < M; m++)
          for (int p = 0; p < P; p++) {
            acc[m][p] = acc[m][p] + widen(sums[m][p]);
            sums[m][p] = set1(0);
          }
      }
      F32 d[P], minimum[P];
      for (int p = 0; p < P; p++) {
        d[p] = B::scale(records[p], b, part);
        if constexpr (F::kMinimum) minimum[p] = B::minimum(records[p], b, part);
      }
      OCTAVO_UNROLL(8)
      for (int m = 0; m < M; m++) {
        auto scale = word<float>(t.rows[m] + block_at);
        OCTAVO_UNROLL(2)
        for (int p = 0; p < P; p++) f[m][p] = fma(to_f32(acc[m][p]), d[p] * set1(scale), f[m][p]);
        if constexpr (F::kMinimum) {
          F32 sum = set1(F::kParts == 2 ? scale * static_cast<float>(sum_of(m))
                                        : word<float>(t.rows[m] + block_at + offsetof(Int8Block, scaled_sum)));
          OCTAVO_UNROLL(2)
          for (int p = 0; p < P; p++) f[m][p] = fma(minimum[p], sum, f[m][p]);
        }
      }
    }
  }
  for (int m = 0; m < M; m++)
    for (int p = 0; p < P; p++) store(t.out + m * kTileColumns + p * kPanel, f[m][p]);
}

// bfloat16 pairs on both sides; e4m3 numbers become such pairs on the way.
template <WeightType T, int M>
static void tile_bf16(const Tile &t) {
  constexpr int P = kTilePanels;
  constexpr bool fp8 = T != WeightType::BF16, scaled = T == WeightType::FP8_E4M3_BLOCK;
  const int pairs = (t.k + 1) / 2, span = scaled ? kFp8Block / 2 : pairs;  // pairs that share a scale
  F32 f[M][P];
  for (int m = 0; m < M; m++)
    for (int p = 0; p < P; p++) f[m][p] = zero();
  for (int begin = 0; begin < pairs; begin += span) {
    F32 sum[M][P];
    for (int m = 0; m < M; m++)
      for (int p = 0; p < P; p++) sum[m][p] = zero();
    auto multiply = [&](const I32 *v, int pair) __attribute__((always_inline)) {
      OCTAVO_UNROLL(8)
      for (int m = 0; m < M; m++) {
        auto a = word<uint32_t>(t.rows[m] + pair * 4);
        OCTAVO_UNROLL(2)
        for (int p = 0; p < P; p++) sum[m][p] = dot_bf16(sum[m][p], v[p], a);
      }
    };
    for (int pair = begin; pair < begin + span; pair += fp8 ? 2 : 1) {
      I32 v[P], next[P];
      for (int p = 0; p < P; p++) {
        if constexpr (fp8) {
          fp8_pairs(t.panels[p] + pair / 2 * 64, v[p], next[p]);
        } else {
          v[p] = load_words(t.panels[p] + pair * 64);
        }
      }
      multiply(v, pair);
      if (fp8 && pair + 1 < pairs) multiply(next, pair + 1);
    }
    for (int p = 0; p < P; p++) {
      F32 scale = scaled ? fp8_scale(t.panels[p], t.k, begin / span) : set1(1.0f);
      for (int m = 0; m < M; m++) f[m][p] = scaled ? fma(scale, sum[m][p], f[m][p]) : sum[m][p];
    }
  }
  for (int m = 0; m < M; m++)
    for (int p = 0; p < P; p++) store(t.out + m * kTileColumns + p * kPanel, f[m][p]);
}

// Float activations with any weight, expanded 32 inputs at a time.
template <int M>
static void tile_float(const Tile &t) {
  alignas(64) float buffer[kBlock * kPanel];
  F32 f[kTilePanels][M];
  for (int p = 0; p < kTilePanels; p++)
    for (int m = 0; m < M; m++) f[p][m] = zero();
  for (int first = 0; first < t.k; first += kBlock) {
    int count = t.k - first < kBlock ? t.k - first : kBlock;
    for (int p = 0; p < kTilePanels; p++) {
      const float *values = t.expand(t.panels[p], t.k, first / kBlock, buffer);
      F32 sum[M];
      for (int m = 0; m < M; m++) sum[m] = f[p][m];
      for (int i = 0; i < count; i++) {
        F32 v = load(values + i * kPanel);
        OCTAVO_UNROLL(8)
        for (int m = 0; m < M; m++) sum[m] = fma(v, set1(reinterpret_cast<const float *>(t.rows[m])[first + i]), sum[m]);
      }
      for (int m = 0; m < M; m++) f[p][m] = sum[m];
    }
  }
  for (int m = 0; m < M; m++)
    for (int p = 0; p < kTilePanels; p++) store(t.out + m * kTileColumns + p * kPanel, f[p][m]);
}

using TileFunction = void (*)(const Tile &);

template <WeightType T, int M>
static constexpr TileFunction tile_function(Storage storage) {
  constexpr bool fp8 = T == WeightType::FP8_E4M3 || T == WeightType::FP8_E4M3_BLOCK;
  if (storage == Storage::FLOAT32) return tile_float<M>;
  if (storage == Storage::BFLOAT16) {
    if constexpr (T == WeightType::BF16 || fp8) return tile_bf16<T, M>;
  } else if constexpr (block_layout(T).bits) {
    return tile_int8<T, M>;
  }
  return nullptr;
}

// The tile functions of one weight and one activation storage; there is one for 1, 2, 4 and kRowTile rows. The tables
// are constants: one made at load would run this instruction set's code on processors that lack it.
struct Tiles {
  TileFunction one, two, four, full;
  Expand expand;
  TileFunction of(int rows) const { return rows == 1 ? one : rows == 2 ? two : rows <= 4 ? four : full; }
};

template <WeightType T>
static const Tiles &tiles_of(Storage storage) {
#define OCTAVO_TILES(S)                                                                                              \
  {                                                                                                                  \
    tile_function<T, 1>(S), tile_function<T, 2>(S), tile_function<T, 4>(S), tile_function<T, kRowTile>(S), expand<T> \
  }
  static constexpr Tiles tiles[] = {OCTAVO_TILES(Storage::FLOAT32), OCTAVO_TILES(Storage::BFLOAT16), OCTAVO_TILES(Storage::INT8_BLOCKS)};
#undef OCTAVO_TILES
  return tiles[storage == Storage::INT8_TWICE ? static_cast<int>(Storage::INT8_BLOCKS) : static_cast<int>(storage)];
}

static const Tiles &tiles_for(WeightType type, Storage storage) {
  switch (type) {
#define OCTAVO_CASE(T) \
  case WeightType::T: return tiles_of<WeightType::T>(storage);
    OCTAVO_WEIGHT_TYPES(OCTAVO_CASE)
#undef OCTAVO_CASE
  }
  return tiles_of<WeightType::F32>(storage);
}

// How many rows `multiply_tile` takes: an INT8_TWICE row is two rows of a tile.
OCTAVO_INLINE int rows_a_tile(Storage storage) { return storage == Storage::INT8_TWICE ? kRowTile / 2 : kRowTile; }

// out[count][kTileColumns] = rows, `count` of them anywhere, times panels `panel` and `panel + 1` of a weight.
static void multiply_tile(const PackedWeight &w, Storage storage, int panel, const std::byte *const *rows, int count, float *out) {
  bool twice = storage == Storage::INT8_TWICE;
  int used = twice ? 2 * count : count, next = panel + 1 < w.panels() ? panel + 1 : panel;
  const Tiles &tiles = tiles_for(w.type, storage);
  Tile t{{w.panel(panel), w.panel(next)}, {}, w.k, tiles.expand, out};
  for (int i = 0; i < kRowTile; i++) {
    int m = i < used ? i : used - 1;
    t.rows[i] = twice ? rows[m / 2] + m % 2 * int8_row_bytes(w.k) : rows[m];
  }
  tiles.of(used)(t);
  for (int i = 0; twice && i < count; i++) {
    float *codes = out + 2 * i * kTileColumns;
    combine(out + i * kTileColumns, codes, codes + kTileColumns, kTileColumns, [](F32 a, F32 b) { return a + b; });
  }
  if (!w.row_scales) return;
  int column = panel * kPanel, n = w.n - column < kTileColumns ? w.n - column : kTileColumns;
  for (int i = 0; i < count; i++) {
    float *v = out + i * kTileColumns;
    combine(v, v, w.row_scales + column, n, [](F32 a, F32 b) { return a * b; });
  }
}

// What one chunk computes: panels [begin, end) of a weight for rows [first, last).
struct Piece {
  int begin, end, first, last;
};

// How a linear operation is cut: chunk = (group of panels, block of rows), rows fastest, so that the rows of a group
// find its weights in a cache.
struct Cut {
  int group;  // panels
  int rows, row_blocks;
  Cut(int panels, int num_rows, int threads) : rows(num_rows), row_blocks((num_rows + kRowBlock - 1) / kRowBlock) {
    int fair = panels / (threads * 16) / kTilePanels * kTilePanels;
    group = fair < kTilePanels ? kTilePanels : fair > 16 ? 16 : fair;
  }
  int groups(int panels) const { return (panels + group - 1) / group; }
  // The piece of a weight of `panels` panels that is its group `index`, in the row block of `chunk`.
  Piece piece(int chunk, int index, int panels) const {
    int begin = index * group, first = chunk % row_blocks * kRowBlock;
    return {begin, begin + group < panels ? begin + group : panels, first, first + kRowBlock < rows ? first + kRowBlock : rows};
  }
};

// Calls run(rows, first row, number of rows, panel, columns) for each tile of a piece of a weight with n outputs.
template <class Run>
OCTAVO_INLINE void for_tiles(Piece piece, const TensorView &x, int n, Run run) {
  int most = rows_a_tile(x.storage);
  for (int panel = piece.begin; panel < piece.end; panel += kTilePanels)
    for (int row = piece.first; row < piece.last; row += most) {
      int count = piece.last - row < most ? piece.last - row : most, columns = n - panel * kPanel;
      const std::byte *rows[kRowTile];
      for (int i = 0; i < count; i++) rows[i] = x.row(row + i);
      run(rows, row, count, panel, columns < kTileColumns ? columns : kTileColumns);
    }
}

// One piece of x @ w.T + bias; bias may be null.
static void multiply(const PackedWeight &w, const float *bias, const TensorView &x, const TensorView &to, Piece piece) {
  for_tiles(piece, x, w.n, [&](const std::byte *const *rows, int row, int count, int panel, int n) {
    alignas(64) float out[kRowTile * kTileColumns];
    multiply_tile(w, x.storage, panel, rows, count, out);
    int column = panel * kPanel;
    for (int i = 0; i < count; i++) {
      float *v = out + i * kTileColumns;
      if (bias) combine(v, v, bias + column, n, [](F32 a, F32 b) { return a + b; });
      store_columns(to, row + i, column, v, n);
    }
  });
}

// One piece of activation(x @ gate.T) * (x @ up.T).
static void multiply_gated(const PackedWeight &gate, const PackedWeight &up, Activation activation, const TensorView &x,
                           const TensorView &to, Piece piece) {
  for_tiles(piece, x, gate.n, [&](const std::byte *const *rows, int row, int count, int panel, int n) {
    alignas(64) float g[kRowTile * kTileColumns], u[kRowTile * kTileColumns];
    multiply_tile(gate, x.storage, panel, rows, count, g);
    multiply_tile(up, x.storage, panel, rows, count, u);
    int column = panel * kPanel;
    for (int i = 0; i < count; i++) {
      float *v = g + i * kTileColumns;
      combine(v, v, u + i * kTileColumns, n, [&](F32 a, F32 b) { return activate(activation, a) * b; });
      store_columns(to, row + i, column, v, n);
    }
  });
}

static void linear_chunk(const void *o, const void *s, int chunk, void *) {
  const auto &op = *static_cast<const Linear *>(o);
  const auto &step = *static_cast<const Step *>(s);
  int total = 0;
  for (WeightId id : op.weights) total += step.weights[id].panels();
  Cut cut(total, step.rows(op.x), step.threads);
  int group = chunk / cut.row_blocks;
  size_t part = 0;
  while (group >= cut.groups(step.weights[op.weights[part]].panels())) group -= cut.groups(step.weights[op.weights[part++]].panels());

  const PackedWeight &w = step.weights[op.weights[part]];
  const float *bias = op.biases[part] == kNone ? nullptr : step.weights[op.biases[part]].vector();
  multiply(w, bias, step.view(op.x), step.view(op.outputs[part]), cut.piece(chunk, group, w.panels()));
}

static void plan(const Linear &op, const Step &step, PhaseSink add) {
  int rows = step.rows(op.x), total = 0, groups = 0;
  for (WeightId id : op.weights) total += step.weights[id].panels();
  Cut cut(total, rows, step.threads);
  for (WeightId id : op.weights) groups += cut.groups(step.weights[id].panels());
  add({linear_chunk, &op, groups * cut.row_blocks});
}

static void gated_linear_chunk(const void *o, const void *s, int chunk, void *) {
  const auto &op = *static_cast<const GatedLinear *>(o);
  const auto &step = *static_cast<const Step *>(s);
  const PackedWeight &gate = step.weights[op.gate], &up = step.weights[op.up];
  Cut cut(gate.panels(), step.rows(op.x), step.threads);
  Piece piece = cut.piece(chunk, chunk / cut.row_blocks, gate.panels());
  multiply_gated(gate, up, op.activation, step.view(op.x), step.view(op.outputs[0]), piece);
}

static void plan(const GatedLinear &op, const Step &step, PhaseSink add) {
  Cut cut(step.weights[op.gate].panels(), step.rows(op.x), step.threads);
  add({gated_linear_chunk, &op, cut.groups(step.weights[op.gate].panels()) * cut.row_blocks});
}

}  // namespace octavo::OCTAVO_ISA
