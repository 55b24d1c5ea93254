// Mixtures of experts: rows are gathered by expert, multiplied as ordinary tile rows of its matrix, and summed again.
//
// How many rows an expert gets is known only when its scores are; chunk counts are not changed by it. A step plans chunks
// for as many experts as can have rows, and those beyond the experts that do return at once.
namespace octavo::OCTAVO_ISA {

// A row of routes: ids, weights, rows of Dispatch.
struct Routes {
  int top_k;
  float *ids, *weights, *rows;
  Routes(const TensorView &routes, int token)
      : top_k(routes.width / 3), ids(routes.row_f32(token)), weights(ids + top_k), rows(weights + top_k) {}
};

static void route_row(const Route &op, const Step &step, int token, float *scores) {
  TensorView from = step.view(op.scores);
  Routes to(step.view(op.outputs[0]), token);
  for (int i = 0; i < from.width; i++) {
    float s = from.row_f32(token)[i];
    scores[i] = s == s ? s : -INFINITY;
  }
  int previous = -1;
  for (int j = 0; j < to.top_k; j++) {  // the best of those that come after the previous one
    int best = -1;
    for (int i = 0; i < from.width; i++) {
      bool after = previous < 0 || scores[i] < scores[previous] || (scores[i] == scores[previous] && i > previous);
      if (after && (best < 0 || scores[i] > scores[best])) best = i;
    }
    to.ids[j] = static_cast<float>(best);
    previous = best;
  }
  float top = scores[static_cast<int>(to.ids[0])];
  double all = 0, chosen = 0;
  if (op.routing == Routing::SOFTMAX_THEN_TOP_K)
    for (int i = 0; i < from.width; i++) all += std::exp(scores[i] - top);
  for (int j = 0; j < to.top_k; j++) {
    to.weights[j] = std::exp(scores[static_cast<int>(to.ids[j])] - top);
    chosen += to.weights[j];
  }
  double sum = op.renormalize || op.routing == Routing::TOP_K_THEN_SOFTMAX ? chosen : all;
  for (int j = 0; j < to.top_k; j++) to.weights[j] = static_cast<float>(to.weights[j] / sum * op.scale);
}

// A counting sort of all (token, route) pairs by expert.
static void order_routes(const void *o, const void *s, int, void *) {
  const auto &op = *static_cast<const Route *>(o);
  const auto &step = *static_cast<const Step *>(s);
  TensorView routes = step.view(op.outputs[0]);
  RoutedRows &rows = *step.routed;
  int experts = step.view(op.scores).width;
  for (int e = 0; e <= experts; e++) rows.first[e] = 0;
  for (int token = 0; token < step.batch.num_tokens; token++) {
    Routes r(routes, token);
    for (int j = 0; j < r.top_k; j++) rows.first[static_cast<int>(r.ids[j]) + 1]++;
  }
  rows.num_active = 0;
  for (int e = 0; e < experts; e++) {
    if (rows.first[e + 1] > 0) rows.active[rows.num_active++] = e;
    rows.first[e + 1] += rows.first[e];
  }
  for (int token = 0; token < step.batch.num_tokens; token++) {
    Routes r(routes, token);
    for (int j = 0; j < r.top_k; j++) {  // first[e] moves to the end of expert e, where expert e + 1 begins
      int row = rows.first[static_cast<int>(r.ids[j])]++;
      rows.token[row] = token;
      r.rows[j] = static_cast<float>(row);
    }
  }
  for (int e = experts; e > 0; e--) rows.first[e] = rows.first[e - 1];
  rows.first[0] = 0;
}
static void plan(const Route &op, const Step &step, PhaseSink add) {
  plan_rows<Route, route_row>(op, step, add);
  add({order_routes, &op, 1});
}

static void dispatch_row(const Dispatch &op, const Step &step, int row, float *) {
  store_row(step.view(op.outputs[0]), row, step.view(op.x).row_f32(step.routed->token[row]));
}
static void plan(const Dispatch &op, const Step &step, PhaseSink add) { plan_rows<Dispatch, dispatch_row>(op, step, add); }

// Chunk = (active expert, group of panels).
struct ExpertCut {
  int experts;
  Cut cut;
  int groups;
  ExpertCut(const PackedWeight &w, int rows, int threads)
      : experts(w.experts < rows ? w.experts : rows), cut(experts * w.panels(), rows, threads), groups(cut.groups(w.panels())) {}
  int chunks() const { return experts * groups; }
  // Calls run(expert, piece) for the blocks of rows of a chunk.
  template <class Run>
  void for_pieces(const RoutedRows &rows, int chunk, int panels, Run run) const {
    if (chunk / groups >= rows.num_active) return;
    int e = rows.active[chunk / groups], begin = chunk % groups * cut.group;
    int end = begin + cut.group < panels ? begin + cut.group : panels, last = rows.first[e + 1];
    for (int row = rows.first[e]; row < last; row += kRowBlock)
      run(e, Piece{begin, end, row, last - row < kRowBlock ? last : row + kRowBlock});
  }
};

static void expert_linear_chunk(const void *o, const void *s, int chunk, void *) {
  const auto &op = *static_cast<const ExpertLinear *>(o);
  const auto &step = *static_cast<const Step *>(s);
  const PackedWeight &w = step.weights[op.weight];
  ExpertCut(w, step.rows(op.x), step.threads).for_pieces(*step.routed, chunk, w.panels(), [&](int e, Piece piece) {
    multiply(w.expert(e), nullptr, step.view(op.x), step.view(op.outputs[0]), piece);
  });
}
static void plan(const ExpertLinear &op, const Step &step, PhaseSink add) {
  add({expert_linear_chunk, &op, ExpertCut(step.weights[op.weight], step.rows(op.x), step.threads).chunks()});
}

static void expert_gated_linear_chunk(const void *o, const void *s, int chunk, void *) {
  const auto &op = *static_cast<const ExpertGatedLinear *>(o);
  const auto &step = *static_cast<const Step *>(s);
  const PackedWeight &gate = step.weights[op.gate], &up = step.weights[op.up];
  ExpertCut(gate, step.rows(op.x), step.threads).for_pieces(*step.routed, chunk, gate.panels(), [&](int e, Piece piece) {
    multiply_gated(gate.expert(e), up.expert(e), op.activation, step.view(op.x), step.view(op.outputs[0]), piece);
  });
}
static void plan(const ExpertGatedLinear &op, const Step &step, PhaseSink add) {
  add({expert_gated_linear_chunk, &op, ExpertCut(step.weights[op.gate], step.rows(op.x), step.threads).chunks()});
}

static void combine_experts_row(const CombineExperts &op, const Step &step, int token, float *) {
  TensorView x = step.view(op.x);
  Routes r(step.view(op.routes), token);
  make_row(step.view(op.outputs[0]), token, [&](int c, int lanes) {
    F32 sum = zero();
    for (int j = 0; j < r.top_k; j++) sum = fma(load_n(x.row_f32(static_cast<int>(r.rows[j])) + c, lanes), set1(r.weights[j]), sum);
    return sum;
  });
}
static void plan(const CombineExperts &op, const Step &step, PhaseSink add) {
  plan_rows<CombineExperts, combine_experts_row>(op, step, add);
}

}  // namespace octavo::OCTAVO_ISA
