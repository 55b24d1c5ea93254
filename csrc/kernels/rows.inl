// Operations that work on each row alone: embedding, norms, sums, activation, rotation, selection.
namespace octavo::OCTAVO_ISA {

// Few enough that threads share the logits' rows of one step, which are as wide as the vocabulary.
OCTAVO_INLINE int rows_a_chunk(int width) { return width > 1 << 14 ? 1 : 8; }

// A phase over the rows of an operation: Body(op, step, row, scratch as floats) for each.
template <class Op, void (*Body)(const Op &, const Step &, int, float *)>
OCTAVO_INLINE void plan_rows(const Op &op, const Step &step, PhaseSink add) {
  auto run = [](const void *o, const void *s, int chunk, void *scratch) {
    const auto &typed = *static_cast<const Op *>(o);
    const auto &step = *static_cast<const Step *>(s);
    int count = rows_a_chunk(step.view(typed.outputs[0]).width);
    int total = step.rows(typed.outputs[0]), end = (chunk + 1) * count;
    for (int row = chunk * count; row < (end < total ? end : total); row++) Body(typed, step, row, static_cast<float *>(scratch));
  };
  int count = rows_a_chunk(step.view(op.outputs[0]).width);
  add({run, &op, (step.rows(op.outputs[0]) + count - 1) / count});
}

// A row of values made 16 at a time: value(column, lanes) for each vector. Needs no scratch memory, so any width will do.
template <class Value>
OCTAVO_INLINE void make_row(const TensorView &to, int row, Value value) {
  for (int c = 0; c < to.width; c += 32) {
    float v[32] = {};
    int n = to.width - c < 32 ? to.width - c : 32;
    store(v, value(c, n < 16 ? n : 16));
    if (n > 16) store(v + 16, value(c + 16, n - 16));
    store_columns(to, row, c, v, n);
  }
}

static void embed_row(const Embed &op, const Step &step, int row, float *scratch) {
  decode_row(step.weights[op.weight], step.batch.token_ids[row], scratch);
  store_row(step.view(op.outputs[0]), row, scratch);
}
static void plan(const Embed &op, const Step &step, PhaseSink add) { plan_rows<Embed, embed_row>(op, step, add); }

static void position_embed_row(const PositionEmbed &op, const Step &step, int row, float *scratch) {
  decode_row(step.weights[op.weight], step.positions[row], scratch);
  store_row(step.view(op.outputs[0]), row, scratch);
}
static void plan(const PositionEmbed &op, const Step &step, PhaseSink add) { plan_rows<PositionEmbed, position_embed_row>(op, step, add); }

// x[0..n) -> normed in place.
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

// The same with the mean taken off first; bias may be null.
OCTAVO_INLINE void layer_norm(float *x, const float *weight, const float *bias, int n, float eps) {
  F32 sum = zero(), squares = zero();
  for (int i = 0; i < n; i += 16) sum = sum + load_n(x + i, n - i < 16 ? n - i : 16);
  F32 mean = set1(reduce_add(sum) / static_cast<float>(n));
  for (int i = 0; i < n; i += 16) {
    int lanes = n - i < 16 ? n - i : 16;
    store_n(x + i, load_n(x + i, lanes) - mean, lanes);
    F32 v = load_n(x + i, lanes);
    squares = fma(v, v, squares);
  }
  F32 inverse = set1(1.0f / std::sqrt(reduce_add(squares) / static_cast<float>(n) + eps));
  for (int i = 0; i < n; i += 16) {
    int lanes = n - i < 16 ? n - i : 16;
    F32 v = load_n(x + i, lanes) * inverse * load_n(weight + i, lanes);
    store_n(x + i, bias ? v + load_n(bias + i, lanes) : v, lanes);
  }
}

// Calls norm(first column, first weight, columns) for each group of a row.
template <class Norm>
OCTAVO_INLINE void for_groups(const PackedWeight &weight, int width, int64_t groups, Norm norm) {
  int n = width / static_cast<int>(groups);
  for (int at = 0; at < width; at += n) norm(at, weight.n == width ? at : 0, n);
}

static void rms_norm_row(const RmsNorm &op, const Step &step, int row, float *scratch) {
  TensorView x = step.view(op.x);
  const PackedWeight &weight = step.weights[op.weight];
  std::memcpy(scratch, x.row(row), x.width * sizeof(float));
  for_groups(weight, x.width, op.groups,
             [&](int at, int w, int n) { rms_norm(scratch + at, weight.vector() + w, n, static_cast<float>(op.eps)); });
  store_row(step.view(op.outputs[0]), row, scratch);
}
static void plan(const RmsNorm &op, const Step &step, PhaseSink add) { plan_rows<RmsNorm, rms_norm_row>(op, step, add); }

static void layer_norm_row(const LayerNorm &op, const Step &step, int row, float *scratch) {
  TensorView x = step.view(op.x);
  const PackedWeight &weight = step.weights[op.weight];
  const float *bias = op.bias == kNone ? nullptr : step.weights[op.bias].vector();
  std::memcpy(scratch, x.row(row), x.width * sizeof(float));
  for_groups(weight, x.width, op.groups, [&](int at, int w, int n) {
    layer_norm(scratch + at, weight.vector() + w, bias ? bias + w : nullptr, n, static_cast<float>(op.eps));
  });
  store_row(step.view(op.outputs[0]), row, scratch);
}
static void plan(const LayerNorm &op, const Step &step, PhaseSink add) { plan_rows<LayerNorm, layer_norm_row>(op, step, add); }

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
static void plan(const AddRmsNorm &op, const Step &step, PhaseSink add) { plan_rows<AddRmsNorm, add_rms_norm_row>(op, step, add); }

static void add_row(const Add &op, const Step &step, int row, float *) {
  const float *x = step.view(op.x).row_f32(row), *y = step.view(op.y).row_f32(row);
  make_row(step.view(op.outputs[0]), row, [&](int c, int lanes) { return load_n(x + c, lanes) + load_n(y + c, lanes); });
}
static void plan(const Add &op, const Step &step, PhaseSink add) { plan_rows<Add, add_row>(op, step, add); }

static void scale_row(const Scale &op, const Step &step, int row, float *) {
  const float *x = step.view(op.x).row_f32(row);
  F32 factor = set1(static_cast<float>(op.factor));
  make_row(step.view(op.outputs[0]), row, [&](int c, int lanes) { return load_n(x + c, lanes) * factor; });
}
static void plan(const Scale &op, const Step &step, PhaseSink add) { plan_rows<Scale, scale_row>(op, step, add); }

static void softcap_row(const Softcap &op, const Step &step, int row, float *) {
  const float *x = step.view(op.x).row_f32(row);
  F32 cap = set1(static_cast<float>(op.cap)), inverse = set1(static_cast<float>(1.0 / op.cap));
  make_row(step.view(op.outputs[0]), row, [&](int c, int lanes) { return cap * tanh(load_n(x + c, lanes) * inverse); });
}
static void plan(const Softcap &op, const Step &step, PhaseSink add) { plan_rows<Softcap, softcap_row>(op, step, add); }

OCTAVO_INLINE F32 activate(Activation activation, F32 x) {
  switch (activation) {
    case Activation::SILU: return silu(x);
    case Activation::GELU: return gelu(x);
    case Activation::GELU_TANH: return gelu_tanh(x);
    case Activation::RELU: return vmax(zero(), x);
  }
  return x;
}

static void activate_row(const Activate &op, const Step &step, int row, float *) {
  const float *x = step.view(op.x).row_f32(row);
  make_row(step.view(op.outputs[0]), row, [&](int c, int lanes) { return activate(op.activation, load_n(x + c, lanes)); });
}
static void plan(const Activate &op, const Step &step, PhaseSink add) { plan_rows<Activate, activate_row>(op, step, add); }

static void gated_activation_row(const GatedActivation &op, const Step &step, int row, float *) {
  const float *gate = step.view(op.gate).row_f32(row), *up = step.view(op.up).row_f32(row);
  make_row(step.view(op.outputs[0]), row,
           [&](int c, int lanes) { return activate(op.activation, load_n(gate + c, lanes)) * load_n(up + c, lanes); });
}
static void plan(const GatedActivation &op, const Step &step, PhaseSink add) {
  plan_rows<GatedActivation, gated_activation_row>(op, step, add);
}

static void gate_row(const GateRows &op, const Step &step, int row, float *) {
  const float *x = step.view(op.x).row_f32(row);
  F32 gate = sigmoid(set1(*step.view(op.gate).row_f32(row)));
  make_row(step.view(op.outputs[0]), row, [&](int c, int lanes) { return load_n(x + c, lanes) * gate; });
}
static void plan(const GateRows &op, const Step &step, PhaseSink add) { plan_rows<GateRows, gate_row>(op, step, add); }

static void rope_table_row(const RopeTable &op, const Step &step, int row, float *scratch) {
  int pairs = static_cast<int>(op.frequencies.size());
  for (int i = 0; i < pairs; i++) {
    double angle = step.positions[row] * op.frequencies[i];
    scratch[i] = static_cast<float>(std::cos(angle) * op.magnitude);
    scratch[pairs + i] = static_cast<float>(std::sin(angle) * op.magnitude);
  }
  store_row(step.view(op.outputs[0]), row, scratch);
}
static void plan(const RopeTable &op, const Step &step, PhaseSink add) { plan_rows<RopeTable, rope_table_row>(op, step, add); }

// Rotates one head in place; table: cos[pairs], sin[pairs].
OCTAVO_INLINE void rotate(float *x, const float *table, int pairs, bool interleaved) {
  if (interleaved) {
    for (int i = 0; i < pairs; i++) {
      float c = table[i], s = table[pairs + i], a = x[2 * i], b = x[2 * i + 1];
      x[2 * i] = a * c - b * s;
      x[2 * i + 1] = a * s + b * c;
    }
    return;
  }
  for (int i = 0; i < pairs; i += 16) {
    int lanes = pairs - i < 16 ? pairs - i : 16;
    F32 c = load_n(table + i, lanes), s = load_n(table + pairs + i, lanes), a = load_n(x + i, lanes), b = load_n(x + pairs + i, lanes);
    store_n(x + i, a * c - b * s, lanes);
    store_n(x + pairs + i, a * s + b * c, lanes);
  }
}

static void rope_row(const Rope &op, const Step &step, int row, float *scratch) {
  TensorView x = step.view(op.x), table = step.view(op.table);
  std::memcpy(scratch, x.row(row), x.width * sizeof(float));
  for (int h = 0; h < x.width; h += static_cast<int>(op.head_dim)) rotate(scratch + h, table.row_f32(row), table.width / 2, op.interleaved);
  store_row(step.view(op.outputs[0]), row, scratch);
}
static void plan(const Rope &op, const Step &step, PhaseSink add) { plan_rows<Rope, rope_row>(op, step, add); }

static void select_row(const SelectRows &op, const Step &step, int row, float *) {
  store_row(step.view(op.outputs[0]), row, step.view(op.x).row_f32(step.batch.selected_rows[row]));
}
static void plan(const SelectRows &op, const Step &step, PhaseSink add) { plan_rows<SelectRows, select_row>(op, step, add); }

static void cast_row(const Cast &op, const Step &step, int row, float *) {
  store_row(step.view(op.outputs[0]), row, step.view(op.x).row_f32(row));
}
static void plan(const Cast &op, const Step &step, PhaseSink add) { plan_rows<Cast, cast_row>(op, step, add); }

}  // namespace octavo::OCTAVO_ISA
