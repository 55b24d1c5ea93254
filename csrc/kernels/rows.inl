// Operations that work on each row alone: embedding, norms, sums, activation, rotation, selection.
namespace octavo::OCTAVO_ISA {

inline constexpr int kRowsPerChunk = 8;

// A phase over the rows of an operation: Body(op, step, row, scratch as floats) for each.
template <class Op, void (*Body)(const Op &, const Step &, int, float *)>
OCTAVO_INLINE void plan_rows(const Op &op, int rows, PhaseSink add) {
  auto run = [](const void *o, const void *s, int chunk, void *scratch) {
    const auto &typed = *static_cast<const Op *>(o);
    const auto &step = *static_cast<const Step *>(s);
    int total = step.rows(typed.outputs[0]), end = (chunk + 1) * kRowsPerChunk;
    for (int row = chunk * kRowsPerChunk; row < (end < total ? end : total); row++) Body(typed, step, row, static_cast<float *>(scratch));
  };
  add({run, &op, (rows + kRowsPerChunk - 1) / kRowsPerChunk});
}

// Row `row` of a packed matrix as floats.
static void decode_row(const PackedWeight &w, int row, float *out) {
  const std::byte *panel = w.panel(row / kPanel);
  int r = row % kPanel, blocks = w.k / kBlock;
  auto half = [](const std::byte *p, int64_t i) {
    uint16_t h;
    std::memcpy(&h, p + 2 * i, 2);
    return h;
  };
  auto half_to_float = [](uint16_t h) {
    uint16_t lanes[16] = {h};
    float f[16];
    store(f, load_f16(lanes));
    return f[0];
  };
  switch (w.type) {
    case WeightType::F32:
      for (int k = 0; k < w.k; k++) std::memcpy(out + k, panel + 4 * (static_cast<int64_t>(k) * kPanel + r), 4);
      return;
    case WeightType::F16:
      for (int k = 0; k < w.k; k++) out[k] = half_to_float(half(panel, static_cast<int64_t>(k) * kPanel + r));
      return;
    case WeightType::BF16:
      for (int k = 0; k < w.k; k++) {
        uint32_t bits = half(panel, (static_cast<int64_t>(k / 2) * kPanel + r) * 2 + k % 2);
        out[k] = std::bit_cast<float>(bits << 16);
      }
      return;
    case WeightType::Q8_0:
    case WeightType::Q4_0:
    case WeightType::Q4_1: break;
  }
  int64_t code_bytes = PackedWeight::code_bytes(w.type);
  const std::byte *scales = panel + blocks * code_bytes, *minima = scales + blocks * kPanel * 2;
  for (int b = 0; b < blocks; b++) {
    auto *codes = reinterpret_cast<const uint8_t *>(panel + b * code_bytes);
    float scale = half_to_float(half(scales, b * kPanel + r));
    float minimum = w.type == WeightType::Q4_1 ? half_to_float(half(minima, b * kPanel + r)) : 0.0f;
    for (int i = 0; i < kBlock; i++) {
      int code;
      if (w.type == WeightType::Q8_0) {
        code = codes[(i / 4) * 64 + r * 4 + i % 4];
      } else {
        int byte = codes[(i % 16 / 4) * 64 + r * 4 + i % 4];
        code = i < 16 ? byte & 15 : byte >> 4;
      }
      out[b * kBlock + i] = scale * static_cast<float>(code - PackedWeight::zero_point(w.type)) + minimum;
    }
  }
}

static void embed_row(const Embed &op, const Step &step, int row, float *scratch) {
  decode_row(step.weights[op.weight], step.batch.token_ids[row], scratch);
  store_row(step.view(op.outputs[0]), row, scratch);
}
static void plan(const Embed &op, const Step &step, PhaseSink add) { plan_rows<Embed, embed_row>(op, step.batch.num_tokens, add); }

// scratch[0..n) -> normed in place.
OCTAVO_INLINE void rms_norm(float *x, const float *weight, int n, float eps) {
  F32 squares = zero();
  for (int i = 0; i < n; i += 16) {
    F32 v = load_n(x + i, n - i < 16 ? n - i : 16);
    squares = fma(v, v, squares);
  }
  F32 inverse = set1(1.0f / std::sqrt(reduce_add(squares) / static_cast<float>(n) + eps));
  for (int i = 0; i < n; i += 16) {
    int lanes = n - i < 16 ? n - i : 16;
    store_n(x + i, load_n(x + i, lanes) * inverse * load_n(weight + i, lanes), lanes);
  }
}

static void rms_norm_row(const RmsNorm &op, const Step &step, int row, float *scratch) {
  TensorView x = step.view(op.x);
  std::memcpy(scratch, x.row(row), x.width * sizeof(float));
  rms_norm(scratch, step.weights[op.weight].vector(), x.width, static_cast<float>(op.eps));
  store_row(step.view(op.outputs[0]), row, scratch);
}
static void plan(const RmsNorm &op, const Step &step, PhaseSink add) { plan_rows<RmsNorm, rms_norm_row>(op, step.rows(op.x), add); }

// to[i] = Value(a[i], b[i]); `to` may be `a`.
template <class Value>
OCTAVO_INLINE void combine(float *to, const float *a, const float *b, int n, Value value) {
  for (int i = 0; i < n; i += 16) {
    int lanes = n - i < 16 ? n - i : 16;
    store_n(to + i, value(load_n(a + i, lanes), load_n(b + i, lanes)), lanes);
  }
}

static void add_rms_norm_row(const AddRmsNorm &op, const Step &step, int row, float *scratch) {
  TensorView x = step.view(op.x), sum = step.view(op.outputs[0]);
  combine(scratch, x.row_f32(row), step.view(op.y).row_f32(row), x.width, [](F32 a, F32 b) { return a + b; });
  std::memcpy(sum.row(row), scratch, x.width * sizeof(float));
  rms_norm(scratch, step.weights[op.weight].vector(), x.width, static_cast<float>(op.eps));
  store_row(step.view(op.outputs[1]), row, scratch);
}
static void plan(const AddRmsNorm &op, const Step &step, PhaseSink add) {
  plan_rows<AddRmsNorm, add_rms_norm_row>(op, step.rows(op.x), add);
}

static void add_row(const Add &op, const Step &step, int row, float *scratch) {
  TensorView x = step.view(op.x);
  combine(scratch, x.row_f32(row), step.view(op.y).row_f32(row), x.width, [](F32 a, F32 b) { return a + b; });
  store_row(step.view(op.outputs[0]), row, scratch);
}
static void plan(const Add &op, const Step &step, PhaseSink add) { plan_rows<Add, add_row>(op, step.rows(op.x), add); }

OCTAVO_INLINE F32 activate(Activation activation, F32 x) {
  switch (activation) {
    case Activation::SILU: return silu(x);
  }
  return x;
}

static void gated_activation_row(const GatedActivation &op, const Step &step, int row, float *scratch) {
  TensorView gate = step.view(op.gate);
  combine(scratch, gate.row_f32(row), step.view(op.up).row_f32(row), gate.width,
          [&](F32 g, F32 u) { return activate(op.activation, g) * u; });
  store_row(step.view(op.outputs[0]), row, scratch);
}
static void plan(const GatedActivation &op, const Step &step, PhaseSink add) {
  plan_rows<GatedActivation, gated_activation_row>(op, step.rows(op.gate), add);
}

static void rope_table_row(const RopeTable &op, const Step &step, int row, float *scratch) {
  int pairs = static_cast<int>(op.frequencies.size());
  for (int i = 0; i < pairs; i++) {
    double angle = step.positions[row] * op.frequencies[i];
    scratch[i] = static_cast<float>(std::cos(angle));
    scratch[pairs + i] = static_cast<float>(std::sin(angle));
  }
  store_row(step.view(op.outputs[0]), row, scratch);
}
static void plan(const RopeTable &op, const Step &step, PhaseSink add) {
  plan_rows<RopeTable, rope_table_row>(op, step.batch.num_tokens, add);
}

// Rotates one head in place; table: cos[pairs], sin[pairs].
OCTAVO_INLINE void rotate(float *x, const float *table, int pairs, bool interleaved) {
  int step = interleaved ? 2 : 1, partner = interleaved ? 1 : pairs;
  for (int i = 0; i < pairs; i++) {
    float c = table[i], s = table[pairs + i], a = x[i * step], b = x[i * step + partner];
    x[i * step] = a * c - b * s;
    x[i * step + partner] = a * s + b * c;
  }
}

static void rope_row(const Rope &op, const Step &step, int row, float *scratch) {
  TensorView x = step.view(op.x), table = step.view(op.table);
  std::memcpy(scratch, x.row(row), x.width * sizeof(float));
  for (int h = 0; h < x.width; h += static_cast<int>(op.head_dim)) rotate(scratch + h, table.row_f32(row), table.width / 2, op.interleaved);
  store_row(step.view(op.outputs[0]), row, scratch);
}
static void plan(const Rope &op, const Step &step, PhaseSink add) { plan_rows<Rope, rope_row>(op, step.batch.num_tokens, add); }

static void select_row(const SelectRows &op, const Step &step, int row, float *) {
  store_row(step.view(op.outputs[0]), row, step.view(op.x).row_f32(step.batch.selected_rows[row]));
}
static void plan(const SelectRows &op, const Step &step, PhaseSink add) {
  plan_rows<SelectRows, select_row>(op, step.batch.num_selected, add);
}

static void cast_row(const Cast &op, const Step &step, int row, float *) {
  store_row(step.view(op.outputs[0]), row, step.view(op.x).row_f32(row));
}
static void plan(const Cast &op, const Step &step, PhaseSink add) { plan_rows<Cast, cast_row>(op, step.rows(op.x), add); }

}  // namespace octavo::OCTAVO_ISA
