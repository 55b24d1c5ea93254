// Matrix products of activations with packed weights.
//
// A tile is M activation rows by two panels (32 outputs). For one row and one output the sum runs over the inputs in
// one fixed order that depends on the weight's type and the activation's storage only, so M never changes a bit.
namespace octavo::OCTAVO_ISA {

inline constexpr int kTilePanels = 2;
inline constexpr int kTileColumns = kTilePanels * kPanel;
inline constexpr int kRowBlock = 128;  // rows a chunk takes at most: their activations stay in the second-level cache

// Integer path: x is INT8_BLOCKS or, with two planes of codes, INT8_TWICE. Weight codes are unsigned; their zero point
// enters as the start of the integer sum, exactly.
template <WeightType T, int Planes, int M, int P>
static void tile_int8(const PackedWeight &w, int panel, const std::byte *x, int64_t stride, float *out) {
  constexpr int64_t code_bytes = PackedWeight::code_bytes(T);
  constexpr int zero_point = PackedWeight::zero_point(T);
  const int blocks = w.k / kBlock;
  const std::byte *codes[P], *scales[P];
  for (int p = 0; p < P; p++) {
    codes[p] = w.panel(panel + p);
    scales[p] = codes[p] + blocks * code_bytes;
  }
  auto word = [&](int m, int64_t offset) {
    int32_t v;
    std::memcpy(&v, x + m * stride + offset, 4);
    return v;
  };
  const int64_t numbers = static_cast<int64_t>(Planes) * w.k;  // where the scales, sums and code sums of a row begin
  F32 f[M][P];
  for (int m = 0; m < M; m++)
    for (int p = 0; p < P; p++) f[m][p] = zero();
  for (int b = 0; b < blocks; b++) {
    F32 d[P], minimum[P];
    for (int p = 0; p < P; p++) {
      d[p] = load_f16(reinterpret_cast<const uint16_t *>(scales[p]) + b * kPanel);
      if constexpr (T == WeightType::Q4_1) minimum[p] = load_f16(reinterpret_cast<const uint16_t *>(scales[p]) + (blocks + b) * kPanel);
    }
#pragma GCC unroll 2
    for (int plane = 0; plane < Planes; plane++) {
      I32 acc[M][P];
#pragma GCC unroll 8
      for (int m = 0; m < M; m++)
        for (int p = 0; p < P; p++) acc[m][p] = set1(zero_point ? -zero_point * word(m, numbers + ((2 + plane) * blocks + b) * 4) : 0);
      const int64_t first = static_cast<int64_t>(plane) * w.k + b * kBlock;
#pragma GCC unroll 8
      for (int g = 0; g < (T == WeightType::Q8_0 ? 8 : 4); g++) {
        I32 lo[P], hi[P];
        for (int p = 0; p < P; p++) {
          lo[p] = load_words(codes[p] + b * code_bytes + g * 64);
          if constexpr (T != WeightType::Q8_0) {
            hi[p] = high_nibbles(lo[p]);
            lo[p] = low_nibbles(lo[p]);
          }
        }
#pragma GCC unroll 8
        for (int m = 0; m < M; m++)
#pragma GCC unroll 2
          for (int p = 0; p < P; p++) {
            if constexpr (T == WeightType::Q8_0) {
              acc[m][p] = dot_u8i8(acc[m][p], lo[p], word(m, first + g * 4));
            } else {
              acc[m][p] = dot_u4i8(acc[m][p], lo[p], word(m, first + g * 4));
              acc[m][p] = dot_u4i8(acc[m][p], hi[p], word(m, first + 16 + g * 4));
            }
          }
      }
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) {
        F32 scale = set1(std::bit_cast<float>(word(m, numbers + b * 4)));
        if (plane == 1) scale = scale * set1(1.0f / kFineSteps);
#pragma GCC unroll 2
        for (int p = 0; p < P; p++) f[m][p] = fma(to_f32(acc[m][p]), d[p] * scale, f[m][p]);
      }
    }
    if constexpr (T == WeightType::Q4_1) {
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) {
        F32 sum = set1(std::bit_cast<float>(word(m, numbers + (blocks + b) * 4)));
#pragma GCC unroll 2
        for (int p = 0; p < P; p++) f[m][p] = fma(minimum[p], sum, f[m][p]);
      }
    }
  }
  for (int m = 0; m < M; m++)
    for (int p = 0; p < P; p++) store(out + m * kTileColumns + p * kPanel, f[m][p]);
}

// bfloat16 pairs on both sides.
template <int M, int P>
static void tile_bf16(const PackedWeight &w, int panel, const std::byte *x, int64_t stride, float *out) {
  F32 f[M][P];
  for (int m = 0; m < M; m++)
    for (int p = 0; p < P; p++) f[m][p] = zero();
  for (int pair = 0; pair < (w.k + 1) / 2; pair++) {
    I32 v[P];
    for (int p = 0; p < P; p++) v[p] = load_words(w.panel(panel + p) + pair * 64);
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
      uint32_t a;
      std::memcpy(&a, x + m * stride + pair * 4, 4);
#pragma GCC unroll 2
      for (int p = 0; p < P; p++) f[m][p] = dot_bf16(f[m][p], v[p], a);
    }
  }
  for (int m = 0; m < M; m++)
    for (int p = 0; p < P; p++) store(out + m * kTileColumns + p * kPanel, f[m][p]);
}

// Calls visit(k, values of 16 outputs at input k) for all k in order; quantized weights are expanded as their format
// defines (scale * code + minimum, rounded twice).
template <WeightType T, class Visit>
OCTAVO_INLINE void expand_panel(const PackedWeight &w, int panel, Visit visit) {
  const std::byte *data = w.panel(panel);
  if constexpr (T == WeightType::F32) {
    for (int k = 0; k < w.k; k++) visit(k, load(reinterpret_cast<const float *>(data) + k * kPanel));
  } else if constexpr (T == WeightType::F16) {
    for (int k = 0; k < w.k; k++) visit(k, load_f16(reinterpret_cast<const uint16_t *>(data) + k * kPanel));
  } else if constexpr (T == WeightType::BF16) {
    for (int k = 0; k < w.k; k++) {
      I32 pair = load_words(data + k / 2 * 64);
      visit(k, k % 2 ? bf16_high(pair) : bf16_low(pair));
    }
  } else {
    constexpr int64_t code_bytes = PackedWeight::code_bytes(T);
    const int blocks = w.k / kBlock;
    auto *scales = reinterpret_cast<const uint16_t *>(data + blocks * code_bytes);
    for (int b = 0; b < blocks; b++) {
      F32 d = load_f16(scales + b * kPanel), minimum = zero(), offset = set1(static_cast<float>(PackedWeight::zero_point(T)));
      if constexpr (T == WeightType::Q4_1) minimum = load_f16(scales + (blocks + b) * kPanel);
      for (int g = 0; g < 8; g++) {
        I32 v = load_words(data + b * code_bytes + (T == WeightType::Q8_0 ? g : g % 4) * 64);
        if constexpr (T != WeightType::Q8_0) v = g < 4 ? low_nibbles(v) : high_nibbles(v);
        int k = b * kBlock + g * 4;
        visit(k, d * (byte_to_f32<0>(v) - offset) + minimum);
        visit(k + 1, d * (byte_to_f32<1>(v) - offset) + minimum);
        visit(k + 2, d * (byte_to_f32<2>(v) - offset) + minimum);
        visit(k + 3, d * (byte_to_f32<3>(v) - offset) + minimum);
      }
    }
  }
}

// Float activations with any weight.
template <WeightType T, int M, int P>
static void tile_float(const PackedWeight &w, int panel, const std::byte *x, int64_t stride, float *out) {
  for (int p = 0; p < P; p++) {
    F32 f[M];
    for (int m = 0; m < M; m++) f[m] = zero();
    expand_panel<T>(w, panel + p, [&](int k, F32 v) __attribute__((always_inline)) {
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) f[m] = fma(v, set1(reinterpret_cast<const float *>(x + m * stride)[k]), f[m]);
    });
    for (int m = 0; m < M; m++) store(out + m * kTileColumns + p * kPanel, f[m]);
  }
}

using TileFunction = void (*)(const PackedWeight &, int panel, const std::byte *x, int64_t stride, float *out);

template <int M, int P>
static constexpr TileFunction tile_function(WeightType type, Storage storage) {
  using enum WeightType;
  bool twice = storage == Storage::INT8_TWICE;
  if (twice || storage == Storage::INT8_BLOCKS) {
    switch (type) {
      case Q4_0: return twice ? tile_int8<Q4_0, 2, M, P> : tile_int8<Q4_0, 1, M, P>;
      case Q4_1: return twice ? tile_int8<Q4_1, 2, M, P> : tile_int8<Q4_1, 1, M, P>;
      case Q8_0: return twice ? tile_int8<Q8_0, 2, M, P> : tile_int8<Q8_0, 1, M, P>;
      default: return nullptr;
    }
  }
  if (storage == Storage::BFLOAT16) return type == BF16 ? tile_bf16<M, P> : nullptr;
  switch (type) {
    case F32: return tile_float<F32, M, P>;
    case F16: return tile_float<F16, M, P>;
    case BF16: return tile_float<BF16, M, P>;
    case Q4_0: return tile_float<Q4_0, M, P>;
    case Q4_1: return tile_float<Q4_1, M, P>;
    case Q8_0: return tile_float<Q8_0, M, P>;
  }
  return nullptr;
}

// The tile functions for 1 .. kRowTile rows of one weight and one activation storage. The tables are constants: one made
// at load would run this instruction set's code on processors that lack it.
struct Tiles {
  TileFunction of[kRowTile + 1][kTilePanels + 1] = {};
  constexpr Tiles(WeightType type, Storage storage) { fill<kRowTile>(type, storage); }

 private:
  template <int M>
  constexpr void fill(WeightType type, Storage storage) {
    of[M][1] = tile_function<M, 1>(type, storage);
    of[M][2] = tile_function<M, 2>(type, storage);
    if constexpr (M > 1) fill<M - 1>(type, storage);
  }
};

template <WeightType T>
static const Tiles &tiles_of(Storage storage) {
  static constexpr Tiles tiles[] = {{T, Storage::FLOAT32}, {T, Storage::BFLOAT16}, {T, Storage::INT8_BLOCKS}, {T, Storage::INT8_TWICE}};
  return tiles[static_cast<int>(storage)];
}

static const Tiles &tiles_for(WeightType type, Storage storage) {
  using enum WeightType;
  switch (type) {
    case F32: break;
    case F16: return tiles_of<F16>(storage);
    case BF16: return tiles_of<BF16>(storage);
    case Q4_0: return tiles_of<Q4_0>(storage);
    case Q4_1: return tiles_of<Q4_1>(storage);
    case Q8_0: return tiles_of<Q8_0>(storage);
  }
  return tiles_of<F32>(storage);
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

// Calls run(row, rows of the tile, panel, panels of the tile) for each tile of a piece.
template <class Run>
OCTAVO_INLINE void for_tiles(Piece piece, Run run) {
  for (int panel = piece.begin; panel < piece.end; panel += kTilePanels) {
    int p = piece.end - panel < kTilePanels ? piece.end - panel : kTilePanels;
    for (int row = piece.first; row < piece.last; row += kRowTile)
      run(row, piece.last - row < kRowTile ? piece.last - row : kRowTile, panel, p);
  }
}

// One piece of x @ w.T + bias; bias may be null.
static void multiply(const PackedWeight &w, const float *bias, const TensorView &x, const TensorView &to, Piece piece) {
  const Tiles &tiles = tiles_for(w.type, x.storage);
  for_tiles(piece, [&](int row, int m, int panel, int p) {
    alignas(64) float out[kRowTile * kTileColumns];
    tiles.of[m][p](w, panel, x.row(row), x.stride, out);
    int column = panel * kPanel, n = w.n - column < p * kPanel ? w.n - column : p * kPanel;
    for (int i = 0; i < m; i++) {
      float *v = out + i * kTileColumns;
      if (bias) combine(v, v, bias + column, n, [](F32 a, F32 b) { return a + b; });
      store_columns(to, row + i, column, v, n);
    }
  });
}

// One piece of activation(x @ gate.T) * (x @ up.T).
static void multiply_gated(const PackedWeight &gate, const PackedWeight &up, Activation activation, const TensorView &x,
                           const TensorView &to, Piece piece) {
  const Tiles &tiles = tiles_for(gate.type, x.storage);
  for_tiles(piece, [&](int row, int m, int panel, int p) {
    alignas(64) float g[kRowTile * kTileColumns], u[kRowTile * kTileColumns];
    tiles.of[m][p](gate, panel, x.row(row), x.stride, g);
    tiles.of[m][p](up, panel, x.row(row), x.stride, u);
    int column = panel * kPanel, n = gate.n - column < p * kPanel ? gate.n - column : p * kPanel;
    for (int i = 0; i < m; i++) {
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
