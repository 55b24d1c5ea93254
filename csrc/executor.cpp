#include "executor.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>

#include "packing.h"

namespace octavo {
namespace {

int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

const KernelTable &choose(const std::string &isa) {
  auto found = available_kernels();
  if (isa.empty()) return *found.front();
  for (auto *k : found)
    if (isa == k->name) return *k;
  throw std::invalid_argument("instruction set " + isa + " is not available");
}

// A single-token sequence's partitions are spread over threads while slots last; without a slot it is done by one
// thread, with the same bits.
constexpr int kPartialSlots = 512;
constexpr int kQueryRowsAUnit = 24;

}  // namespace

int64_t row_bytes(Storage storage, int64_t width) {
  switch (storage) {
    case Storage::FLOAT32: return round_up(width * 4, 64);
    case Storage::BFLOAT16: return round_up((width + width % 2) * 2, 64);
    case Storage::INT8_BLOCKS: return round_up(int8_row_bytes(width), 64);
    case Storage::INT8_TWICE: return round_up(2 * int8_row_bytes(width), 64);
  }
  throw std::invalid_argument("unknown storage");
}

Memory::Memory(size_t bytes) : size_(static_cast<size_t>(round_up(static_cast<int64_t>(std::max<size_t>(bytes, 1)), 4096))) {
  void *p = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  madvise(p, size_, MADV_HUGEPAGE);  // 5-20% of bandwidth; a refusal costs nothing
  data_ = static_cast<std::byte *>(p);
}

Memory::~Memory() { munmap(data_, size_); }

Executor::Executor(const std::string &isa, int threads, std::atomic<uint64_t> *pulse)
    : kernels_(choose(isa)), pool_(threads, kScratchBytes, pulse) {}

// ---- weights ----

int64_t WeightStore::matrix_bytes(WeightType type, int64_t n, int64_t k) {
  return round_up(n, kPanel) / kPanel * PackedWeight::panel_bytes(type, k);
}
int64_t WeightStore::vector_bytes(int64_t n) { return round_up(n * 4, 64); }

std::byte *WeightStore::take(int64_t bytes) {
  if (used_ + bytes > memory_.size()) throw std::invalid_argument("weight store is full");
  std::byte *p = memory_.data() + used_;
  used_ += bytes;
  return p;
}

const float *WeightStore::copy(std::span<const float> values) {
  std::byte *to = take(vector_bytes(static_cast<int64_t>(values.size())));
  std::memcpy(to, values.data(), values.size_bytes());
  return reinterpret_cast<const float *>(to);
}

WeightId WeightStore::add_matrix(WeightType type, int experts, int n, int k, std::span<const std::byte> rows,
                                 std::span<const float> row_scales) {
  int64_t bytes = n * file_row_bytes(type, k), all_rows = static_cast<int64_t>(experts) * n;
  if (static_cast<int64_t>(rows.size()) != experts * bytes || (!row_scales.empty() && static_cast<int64_t>(row_scales.size()) != all_rows))
    throw std::invalid_argument("a matrix has another number of bytes or row scales than its shape says");
  std::byte *to = take(experts * matrix_bytes(type, n, k));
  auto run = [](const void *j, const void *, int chunk, void *) {
    const auto &job = *static_cast<const PackJob *>(j);
    int panels = (job.n + kPanel - 1) / kPanel;
    for (int p = chunk * 16; p < std::min(panels, chunk * 16 + 16); p++) pack_panel(job, p);
  };
  for (int e = 0; e < experts; e++) {
    PackJob job{type, n, k, rows.data() + e * bytes, to + e * matrix_bytes(type, n, k)};
    Phase phase{run, &job, (n + 16 * kPanel - 1) / (16 * kPanel)};
    executor_->pool().run(&phase, 1, nullptr);
  }
  const float *scales = row_scales.empty() ? nullptr : copy(row_scales);
  weights_.push_back({type, n, k, to, PackedWeight::panel_bytes(type, k), scales, experts});
  return static_cast<WeightId>(weights_.size()) - 1;
}

WeightId WeightStore::add_vector(std::span<const float> values) {
  auto *to = reinterpret_cast<const std::byte *>(copy(values));
  weights_.push_back({WeightType::F32, static_cast<int>(values.size()), 0, to, 0, nullptr});
  return static_cast<WeightId>(weights_.size()) - 1;
}

// ---- cache ----

namespace {

KVCache layout(const KVShape &s) { return {s.type, s.num_layers, s.num_blocks, s.block_size, s.num_kv_heads, s.head_dim, nullptr}; }

}  // namespace

int64_t KVShape::block_bytes() const { return num_layers * layout(*this).block_bytes(); }

KVPool::KVPool(const KVShape &shape, int num_groups)
    : memory_(static_cast<size_t>(shape.num_blocks * shape.block_bytes())), cache_(layout(shape)), num_groups_(num_groups) {
  cache_.data = memory_.data();
}

void KVPool::copy_blocks(std::span<const int32_t> from, std::span<const int32_t> to) {
  const KVCache &c = cache_;
  for (size_t i = 0; i < from.size(); i++) {
    if (from[i] < 0 || from[i] >= c.num_blocks || to[i] < 0 || to[i] >= c.num_blocks)
      throw std::invalid_argument("block copy is out of the pool");
    for (int layer = 0; layer < c.num_layers; layer++) std::memcpy(c.keys(layer, to[i], 0), c.keys(layer, from[i], 0), c.block_bytes());
  }
}

void KVPool::fill(uint8_t byte) { std::memset(memory_.data(), byte, memory_.size()); }

// ---- programs ----

namespace {

struct AttentionShape {
  int vocab_size = 0, queries_a_head = 1, num_heads = 0, padded_dim = 0;
};

std::vector<Op> read_program(std::span<const int64_t> records) {
  Reader reader(records);
  std::vector<Op> ops;
  while (!reader.at_end()) ops.push_back(read_op(reader));
  return ops;
}

AttentionShape find_shape(const std::vector<Op> &ops, const std::vector<PackedWeight> &weights) {
  AttentionShape s;
  for (const Op &op : ops) {
    if (auto *a = std::get_if<Attention>(&op)) {
      s.queries_a_head = std::max(s.queries_a_head, static_cast<int>(a->num_heads / a->num_kv_heads));
      s.num_heads = std::max(s.num_heads, static_cast<int>(a->num_heads));
      s.padded_dim = std::max(s.padded_dim, static_cast<int>(round_up(a->head_dim, 16)));
    } else if (auto *e = std::get_if<Embed>(&op)) {
      s.vocab_size = weights.at(e->weight).n;
    }
  }
  return s;
}

size_t partials_bytes(const AttentionShape &s) {
  return static_cast<size_t>(kPartialSlots) * s.num_heads * (s.padded_dim + 2) * sizeof(float);
}

}  // namespace

Program::Program(std::shared_ptr<Executor> executor, std::shared_ptr<WeightStore> weights, std::shared_ptr<KVPool> pool,
                 std::span<const int64_t> records, std::vector<TensorInfo> tensors, const ProgramShape &shape)
    : executor_(std::move(executor)),
      weights_(std::move(weights)),
      pool_(std::move(pool)),
      ops_(read_program(records)),
      tensors_(std::move(tensors)),
      shape_(shape),
      arena_(shape.arena_bytes),
      partials_(partials_bytes(find_shape(ops_, weights_->weights()))) {
  AttentionShape found = find_shape(ops_, weights_->weights());
  vocab_size_ = found.vocab_size;
  queries_a_head_ = found.queries_a_head;
  num_heads_ = found.num_heads;
  padded_dim_ = found.padded_dim;
  for (const TensorInfo &t : tensors_)
    if (t.width * sizeof(float) > kScratchBytes && t.rows == Rows::TOKENS) throw std::invalid_argument("a row is too wide");
  positions_.resize(shape_.max_tokens);
  sequences_.resize(shape_.max_tokens);
  step_.tensors = tensors_.data();
  step_.weights = weights_->weights().data();
  step_.cache = pool_->cache();
  step_.arena = arena_.data();
  step_.threads = executor_->pool().size();
  step_.positions = positions_.data();
  step_.sequences = sequences_.data();
  prepare_attention();
  prepare_experts();
  step_.partials = reinterpret_cast<float *>(partials_.data());
  step_.partial_stride = static_cast<int64_t>(num_heads_) * (padded_dim_ + 2);
}

void Program::prepare_attention() {
  group_windows_.assign(num_kv_groups(), 1);
  for (const Op &op : ops_) {
    if (auto *a = std::get_if<Attention>(&op)) {
      const KVCache &c = pool_->cache();
      if (a->group < 0 || a->group >= pool_->num_groups() || a->layer < 0 || a->layer >= c.num_layers ||
          a->num_kv_heads != c.num_kv_heads || a->head_dim != c.head_dim)
        throw std::invalid_argument("an attention operation does not fit the KV pool");
      int64_t &widest = group_windows_[a->group];
      widest = widest == 0 || a->window == 0 ? 0 : std::max(widest, a->window);
      auto same = [&](const AttentionPlan &plan) { return plan.window == a->window; };
      if (std::none_of(attention_plans_.begin(), attention_plans_.end(), same)) attention_plans_.push_back({a->window, {}, {}});
    } else if (auto *e = std::get_if<PositionEmbed>(&op)) {
      max_positions_ = std::min<int64_t>(max_positions_, weights_->weights().at(e->weight).n);
    }
  }
  step_.attention_plans = attention_plans_.data();
}

// There is one place for the order of routed rows: each Route must be done with before the next.
void Program::prepare_experts() {
  TensorId routes = kNone;
  int experts = 0, most_experts = 0, most_routes = 0;
  auto follows = [&](TensorId read, WeightId weight) {
    if (read != routes || (weight != kNone && weights_->weights().at(weight).experts != experts))
      throw std::invalid_argument("an expert operation does not fit the Route before it");
  };
  for (const Op &op : ops_) {
    if (auto *r = std::get_if<Route>(&op)) {
      routes = r->outputs.at(0);
      experts = tensors_.at(r->scores).width;
      most_experts = std::max(most_experts, experts);
      most_routes = std::max(most_routes, static_cast<int>(r->top_k));
    } else if (auto *d = std::get_if<Dispatch>(&op)) {
      follows(d->routes, kNone);
    } else if (auto *l = std::get_if<ExpertLinear>(&op)) {
      follows(l->routes, l->weight);
    } else if (auto *g = std::get_if<ExpertGatedLinear>(&op)) {
      follows(g->routes, g->gate);
      follows(g->routes, g->up);
    } else if (auto *c = std::get_if<CombineExperts>(&op)) {
      follows(c->routes, kNone);
    }
  }
  expert_rows_.resize(most_experts + 1);
  active_experts_.resize(most_experts);
  row_tokens_.resize(static_cast<size_t>(shape_.max_tokens) * most_routes);
  routed_ = {expert_rows_.data(), active_experts_.data(), row_tokens_.data(), 0};
  step_.routed = &routed_;
}

size_t Program::extra_bytes(int threads, int vocab_size, int num_heads, int head_dim) {
  AttentionShape shape{vocab_size, 1, num_heads, static_cast<int>(round_up(head_dim, 16))};
  return threads * std::max(kScratchBytes, sample_scratch_bytes(vocab_size)) + partials_bytes(shape);
}

void Program::plan_attention(AttentionPlan &plan) const {
  plan.units.clear();
  plan.merges.clear();
  const Batch &b = step_.batch;
  int tokens_a_unit = std::max(1, kQueryRowsAUnit / queries_a_head_), slot = 0;
  for (int s = 0; s < b.num_sequences; s++) {
    int count = b.first_row[s + 1] - b.first_row[s], last = b.first_position[s] + count - 1;
    int first = first_visible(last, plan.window) / kPartition, partitions = last / kPartition + 1 - first;
    if (count == 1 && partitions > 1 && slot + partitions <= kPartialSlots) {
      for (int p = 0; p < partitions; p++) plan.units.push_back({s, 0, 1, first + p, slot + p});
      plan.merges.push_back({s, slot, partitions});
      slot += partitions;
    } else {  // last tokens first: the longest contexts begin early
      for (int t = (count - 1) / tokens_a_unit * tokens_a_unit; t >= 0; t -= tokens_a_unit)
        plan.units.push_back({s, t, std::min(tokens_a_unit, count - t), kAllPartitions, 0});
    }
  }
}

namespace {

void require(bool ok, const char *what) {
  if (!ok) throw std::invalid_argument(std::string("the batch does not fit the program: ") + what);
}

void check_selected(std::span<const int32_t> rows, int num_tokens, int most) {
  require(static_cast<int64_t>(rows.size()) <= most, "number of selected rows");
  for (int32_t row : rows) require(row >= 0 && row < num_tokens, "selected row");
}

}  // namespace

void Program::check(const Batch &b) const {
  require(b.num_tokens >= 1 && b.num_tokens <= shape_.max_tokens, "number of tokens");
  require(b.num_sequences <= shape_.max_sequences, "number of sequences");
  for (int i = 0; i < b.num_tokens; i++) require(b.token_ids[i] >= 0 && b.token_ids[i] < vocab_size_, "token id outside the vocabulary");
  check_selected({b.selected_rows, static_cast<size_t>(b.num_selected)}, b.num_tokens, shape_.max_sequences);
  require(b.first_row[0] == 0 && b.first_row[b.num_sequences] == b.num_tokens, "first rows");
  for (int s = 0; s < b.num_sequences; s++) {
    int64_t count = int64_t{b.first_row[s + 1]} - b.first_row[s];
    require(count >= 1 && count <= b.num_tokens, "first rows");
    require(b.first_position[s] >= 0 && b.first_position[s] <= INT32_MAX - count, "first position");
    require(b.first_position[s] + count <= max_positions_, "position beyond the learned embeddings");
    const KVCache &c = pool_->cache();
    for (size_t g = 0; g < num_kv_groups(); g++) {
      int64_t blocks = (b.first_position[s] + count - 1) / c.block_size + 1;
      require(blocks <= b.block_tables[g].stride, "block table too short");
      const int32_t *table = b.block_tables[g].of(s);
      int64_t seen = first_visible(b.first_position[s], group_windows_[g]) / c.block_size;
      for (int64_t i = seen; i < blocks; i++) require(table[i] >= 0 && table[i] < c.num_blocks, "block outside the pool");
    }
  }
}

void Program::run(const Batch &batch) {
  check(batch);
  for (int s = 0; s < batch.num_sequences; s++) {
    for (int row = batch.first_row[s]; row < batch.first_row[s + 1]; row++) {
      positions_[row] = batch.first_position[s] + row - batch.first_row[s];
      sequences_[row] = s;
    }
  }
  step_.batch = batch;
  for (AttentionPlan &plan : attention_plans_) plan_attention(plan);

  phases_.clear();
  for (const Op &op : ops_) add_phases(op);
  fault_.count_step(phases_);
  run_phases();
}

void Program::select(std::span<const int32_t> rows) {
  check_selected(rows, step_.batch.num_tokens, shape_.max_sequences);
  step_.batch.selected_rows = rows.data();
  step_.batch.num_selected = static_cast<int>(rows.size());
  phases_.clear();
  for (const Op &op : ops_) {
    TensorId output = std::visit([](const auto &typed) { return typed.outputs.at(0); }, op);
    if (tensors_[output].rows == Rows::SELECTED) add_phases(op);
  }
  run_phases();
}

void Program::add_phases(const Op &op) {
  PhaseSink sink{&phases_, [](PhaseList *list, Phase phase) { list->add(phase); }};
  const KernelTable &k = executor_->kernels();
#define OCTAVO_PLAN_CASE(Name) \
  if (auto *typed = std::get_if<Name>(&op)) k.plan_##Name(*typed, step_, sink);
  OCTAVO_OPERATIONS(OCTAVO_PLAN_CASE)
#undef OCTAVO_PLAN_CASE
}

void Program::run_phases() { executor_->pool().run(phases_.data(), phases_.size(), &step_); }

void Program::fill_workspace(uint8_t byte) {
  std::memset(arena_.data(), byte, arena_.size());
  std::memset(partials_.data(), byte, partials_.size());
}

void Program::read(TensorId id, float *out) const {
  TensorView view = step_.view(id);
  for (int row = 0; row < step_.rows(id); row++) executor_->kernels().read_row(view, row, out + static_cast<int64_t>(row) * view.width);
}

void Program::sample(TensorId logits, SampleArgs args) {
  for (int row = 0; row < args.rows; row++)
    if (args.bitmask_row[row] >= 0 && args.bitmask_words < (tensors_.at(logits).width + 31) / 32)
      throw std::invalid_argument("a bitmask is too short");
  run_rows(logits, args, executor_->kernels().sample_row);
}

void Program::score(TensorId logits, SampleArgs args) {
  for (int row = 0; row < args.rows; row++)
    if (args.token[row] < 0 || args.token[row] >= tensors_.at(logits).width) throw std::invalid_argument("there is no such token");
  run_rows(logits, args, executor_->kernels().score_row);
}

void Program::run_rows(TensorId logits, SampleArgs &args, RowKernel kernel) {
  const TensorInfo &t = tensors_.at(logits);
  if (t.storage != Storage::FLOAT32 || args.rows > step_.rows(logits)) throw std::invalid_argument("no such logits");
  args.logits = step_.view(logits).row_f32(0);
  args.stride = t.stride / static_cast<int64_t>(sizeof(float));
  args.vocab = t.width;
  executor_->pool().grow_scratch(sample_scratch_bytes(t.width));
  struct Job {
    RowKernel kernel;
    const SampleArgs *args;
  } job{kernel, &args};
  auto run = [](const void *j, const void *, int row, void *scratch) {
    const auto &job = *static_cast<const Job *>(j);
    job.kernel(*job.args, row, scratch);
  };
  Phase phase{run, &job, args.rows};
  executor_->pool().run(&phase, 1, nullptr);
}

}  // namespace octavo
