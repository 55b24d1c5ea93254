// The only file that sees Python: numpy arrays in, plain pointers on. Long calls release the interpreter lock.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "executor.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace octavo;

namespace {

template <class T>
using Vector = nb::ndarray<const T, nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Table = nb::ndarray<const T, nb::numpy, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <class T>
using Output = nb::ndarray<T, nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using OutputTable = nb::ndarray<T, nb::numpy, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Floats2D = nb::ndarray<float, nb::numpy, nb::ndim<2>>;

template <class T>
std::span<const T> span(const Vector<T> &v) {
  return {v.data(), v.size()};
}

std::vector<TensorInfo> tensor_table(const Table<int64_t> &rows) {
  if (rows.shape(1) != 5) throw std::invalid_argument("tensors are rows of (offset, width, rows, copies, storage)");
  std::vector<TensorInfo> tensors;
  for (size_t i = 0; i < rows.shape(0); i++) {
    const int64_t *r = rows.data() + i * 5;
    auto storage = static_cast<Storage>(r[4]);
    tensors.push_back({r[0], row_bytes(storage, r[1]), static_cast<int>(r[1]), static_cast<Rows>(r[2]), static_cast<int>(r[3]), storage});
  }
  return tensors;
}

Floats2D read_tensor(const Program &program, TensorId id) {
  size_t width = program.tensor(id).width, rows = program.rows(id);
  auto *data = new float[rows * width];
  nb::capsule owner(data, [](void *p) noexcept { delete[] static_cast<float *>(p); });
  program.read(id, data);
  return Floats2D(data, {rows, width}, owner);
}

void run_program(Program &program, Vector<int32_t> token_ids, Vector<int32_t> first_row, Vector<int32_t> first_position,
                 const std::vector<Table<int32_t>> &block_tables, Vector<int32_t> selected_rows) {
  Batch batch{};
  batch.num_tokens = static_cast<int>(token_ids.size());
  batch.num_sequences = static_cast<int>(first_position.size());
  batch.num_selected = static_cast<int>(selected_rows.size());
  if (first_row.size() != first_position.size() + 1 || block_tables.size() != program.num_kv_groups())
    throw std::invalid_argument("the batch's arrays do not fit each other");
  std::vector<BlockTables> tables;
  for (const auto &t : block_tables) {
    if (t.shape(0) < first_position.size()) throw std::invalid_argument("the batch's arrays do not fit each other");
    tables.push_back({t.data(), static_cast<int64_t>(t.shape(1))});
  }
  batch.token_ids = token_ids.data();
  batch.first_row = first_row.data();
  batch.first_position = first_position.data();
  batch.block_tables = tables.data();
  batch.selected_rows = selected_rows.data();
  nb::gil_scoped_release release;
  program.run(batch);
}

void check_lengths(int rows, std::initializer_list<size_t> lengths) {
  if (rows < 0 || std::min(lengths) < static_cast<size_t>(rows))
    throw std::invalid_argument("an array has fewer entries than there are rows");
}

// What sampling and scoring have in common.
SampleArgs row_results(int rows, Vector<int32_t> num_logprobs, Output<int32_t> token, Output<float> logprob, Output<int32_t> rank,
                       OutputTable<int32_t> top_ids, OutputTable<float> top_logprobs) {
  check_lengths(rows, {num_logprobs.size(), token.size(), logprob.size(), rank.size(), top_ids.shape(0), top_logprobs.shape(0)});
  if (top_ids.shape(1) != top_logprobs.shape(1)) throw std::invalid_argument("top_ids and top_logprobs differ in width");
  SampleArgs a{};
  a.rows = rows;
  a.max_logprobs = static_cast<int>(top_ids.shape(1));
  a.num_logprobs = num_logprobs.data();
  a.token = token.data();
  a.logprob = logprob.data();
  a.rank = rank.data();
  a.top_ids = top_ids.data();
  a.top_logprobs = top_logprobs.data();
  return a;
}

void sample_program(Program &program, TensorId logits, int rows, Vector<float> temperature, Vector<int32_t> top_k, Vector<float> top_p,
                    Vector<float> min_p, Vector<float> repetition_penalty, Vector<float> presence_penalty, Vector<float> frequency_penalty,
                    Vector<uint64_t> seed, Vector<uint32_t> position, Vector<uint32_t> sample_index, Vector<int32_t> num_logprobs,
                    Vector<int32_t> bitmask_row, Table<uint32_t> bitmasks, Vector<int32_t> mask_offsets, Vector<int32_t> mask_ids,
                    Vector<int32_t> bias_offsets, Vector<int32_t> bias_ids, Vector<float> bias_values, Vector<int32_t> penalty_offsets,
                    Vector<int32_t> penalty_ids, Vector<int32_t> output_counts, Output<int32_t> token, Output<float> logprob,
                    Output<int32_t> rank, OutputTable<int32_t> top_ids, OutputTable<float> top_logprobs) {
  SampleArgs a = row_results(rows, num_logprobs, token, logprob, rank, top_ids, top_logprobs);
  check_lengths(rows, {temperature.size(), top_k.size(), top_p.size(), min_p.size(), repetition_penalty.size(), presence_penalty.size(),
                       frequency_penalty.size(), seed.size(), position.size(), sample_index.size(), bitmask_row.size(),
                       penalty_offsets.size() - 1, mask_offsets.size() - 1, bias_offsets.size() - 1});
  for (int i = 0; i < rows; i++)
    if (bitmask_row.data()[i] >= static_cast<int64_t>(bitmasks.shape(0))) throw std::invalid_argument("there is no such bitmask");
  a.bitmask_words = static_cast<int>(bitmasks.shape(1));
  a.temperature = temperature.data();
  a.top_k = top_k.data();
  a.top_p = top_p.data();
  a.min_p = min_p.data();
  a.repetition_penalty = repetition_penalty.data();
  a.presence_penalty = presence_penalty.data();
  a.frequency_penalty = frequency_penalty.data();
  a.seed = seed.data();
  a.position = position.data();
  a.sample_index = sample_index.data();
  a.bitmask_row = bitmask_row.data();
  a.bitmasks = bitmasks.data();
  a.mask_offsets = mask_offsets.data();
  a.mask_ids = mask_ids.data();
  a.bias_offsets = bias_offsets.data();
  a.bias_ids = bias_ids.data();
  a.bias_values = bias_values.data();
  a.penalty_offsets = penalty_offsets.data();
  a.penalty_ids = penalty_ids.data();
  a.output_counts = output_counts.data();
  nb::gil_scoped_release release;
  program.sample(logits, a);
}

void score_program(Program &program, TensorId logits, int rows, Vector<int32_t> num_logprobs, Output<int32_t> token, Output<float> logprob,
                   Output<int32_t> rank, OutputTable<int32_t> top_ids, OutputTable<float> top_logprobs) {
  SampleArgs a = row_results(rows, num_logprobs, token, logprob, rank, top_ids, top_logprobs);
  nb::gil_scoped_release release;
  program.score(logits, a);
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "octavo's native executor: packed weights, paged KV cache, programs of operations.";
  m.attr("SCHEMA_DIGEST") = kSchemaDigest;
  m.attr("PARTITION") = kPartition;
  m.def(
      "instruction_sets",
      [] {
        std::vector<std::string> names;
        for (auto *k : available_kernels()) names.emplace_back(k->name);
        return names;
      },
      "Names of the instruction sets that this machine can run, best first.");
  m.def(
      "row_bytes", [](int64_t storage, int64_t width) { return row_bytes(static_cast<Storage>(storage), width); }, "storage"_a, "width"_a,
      "Bytes that one row of a tensor takes in the arena.");
  m.def(
      "matrix_bytes", [](int type, int64_t n, int64_t k) { return WeightStore::matrix_bytes(static_cast<WeightType>(type), n, k); },
      "type"_a, "n"_a, "k"_a, "Bytes of a packed matrix [n, k].");
  m.def("vector_bytes", &WeightStore::vector_bytes, "n"_a, "Bytes of a packed vector [n].");

  m.def("extra_bytes", &Program::extra_bytes, "threads"_a, "vocab_size"_a, "num_heads"_a, "head_dim"_a,
        "What a program takes beyond arena, weights and cache: scratch memory of the threads, partial results of attention.");

  nb::class_<Executor>(m, "Executor", "A thread pool and the kernels of one instruction set.")
      .def(
          "__init__",
          [](Executor *self, const std::string &isa, int threads, std::optional<Output<uint64_t>> pulse) {
            static_assert(sizeof(std::atomic<uint64_t>) == 8 && std::atomic<uint64_t>::is_always_lock_free);
            if (pulse && pulse->size() != 1) throw std::invalid_argument("a pulse is one counter");
            new (self) Executor(isa, threads, pulse ? reinterpret_cast<std::atomic<uint64_t> *>(pulse->data()) : nullptr);
          },
          "isa"_a, "threads"_a, "pulse"_a.none() = nb::none(), nb::keep_alive<1, 4>(),
          "isa: one of instruction_sets(), or empty for the best. pulse: uint64 [1], moves on while phases run.")
      .def_prop_ro("isa", [](const Executor &e) { return std::string(e.kernels().name); })
      .def_prop_ro("threads", [](Executor &e) { return e.pool().size(); });

  nb::class_<WeightStore>(m, "WeightStore", "Weights in the kernels' panel layout.")
      .def(nb::init<std::shared_ptr<Executor>, size_t>(), "executor"_a, "num_bytes"_a)
      .def(
          "add_matrix",
          [](WeightStore &s, int type, int experts, int n, int k, Vector<uint8_t> rows, Vector<float> row_scales) {
            return s.add_matrix(static_cast<WeightType>(type), experts, n, k, std::as_bytes(span(rows)), span(row_scales));
          },
          "type"_a, "experts"_a, "n"_a, "k"_a, "rows"_a, "row_scales"_a, nb::call_guard<nb::gil_scoped_release>(),
          "Packs one matrix, or one for each expert, given as the file has them; row_scales: [experts * n] or empty. Returns its id.")
      .def(
          "add_vector", [](WeightStore &s, Vector<float> v) { return s.add_vector(span(v)); }, "values"_a)
      .def_prop_ro("num_bytes", &WeightStore::num_bytes);

  nb::class_<KVShape>(m, "KVShape")
      .def(
          "__init__",
          [](KVShape *s, int type, int num_layers, int num_blocks, int block_size, int num_kv_heads, int head_dim) {
            new (s) KVShape{static_cast<KVType>(type), num_layers, num_blocks, block_size, num_kv_heads, head_dim};
          },
          "type"_a, "num_layers"_a, "num_blocks"_a, "block_size"_a, "num_kv_heads"_a, "head_dim"_a,
          "type: 0 float32, 1 float16, 2 bfloat16. num_layers: of the largest KV group.")
      .def_prop_ro("block_bytes", &KVShape::block_bytes, "Bytes of one block over all layers.");

  nb::class_<KVPool>(m, "KVPool", "The paged cache's memory, which all KV groups share.")
      .def(nb::init<const KVShape &, int>(), "shape"_a, "num_groups"_a)
      .def(
          "copy_blocks",
          [](KVPool &p, Vector<int32_t> from, Vector<int32_t> to) {
            if (from.size() != to.size()) throw std::invalid_argument("as many sources as destinations");
            p.copy_blocks(span(from), span(to));
          },
          "source"_a, "destination"_a, "Copies whole blocks in all layers, in order.")
      .def("fill", &KVPool::fill, "byte"_a, "Overwrites the pool (0xff: NaN everywhere); for tests of recycled memory.");

  nb::class_<Program>(m, "Program", "A graph lowered for the executor.")
      .def(
          "__init__",
          [](Program *self, std::shared_ptr<Executor> executor, std::shared_ptr<WeightStore> weights, std::shared_ptr<KVPool> pool,
             Vector<int64_t> records, Table<int64_t> tensors, size_t arena_bytes, int max_tokens, int max_sequences) {
            new (self) Program(std::move(executor), std::move(weights), std::move(pool), span(records), tensor_table(tensors),
                               ProgramShape{arena_bytes, max_tokens, max_sequences});
          },
          "executor"_a, "weights"_a, "pool"_a, "records"_a, "tensors"_a, "arena_bytes"_a, "max_tokens"_a, "max_sequences"_a)
      .def("run", &run_program, "token_ids"_a, "first_row"_a, "first_position"_a, "block_tables"_a, "selected_rows"_a,
           "One step over a ragged batch; sequence s owns rows first_row[s]..first_row[s+1] at positions from first_position[s]. One table "
           "of blocks "
           "[sequences, blocks] for each KV group.")
      .def(
          "select",
          [](Program &p, Vector<int32_t> rows) {
            nb::gil_scoped_release release;
            p.select(span(rows));
          },
          "rows"_a, "The outputs for other rows of the step that ran last, instead of those selected before.")
      .def("score", &score_program, "logits"_a, "rows"_a, "num_logprobs"_a, "token"_a, "logprob"_a, "rank"_a, "top_ids"_a, "top_logprobs"_a,
           "Log-probabilities of given tokens, and the best, for each of the first `rows` rows of a float32 tensor.")
      .def("read", &read_tensor, "tensor"_a, "A tensor's rows after the step, as float32 [rows, width].")
      .def("fill_workspace", &Program::fill_workspace, "byte"_a,
           "Overwrites all intermediates (0xff: NaN everywhere); for tests of recycled memory.")
      .def("sample", &sample_program, "logits"_a, "rows"_a, "temperature"_a, "top_k"_a, "top_p"_a, "min_p"_a, "repetition_penalty"_a,
           "presence_penalty"_a, "frequency_penalty"_a, "seed"_a, "position"_a, "sample_index"_a, "num_logprobs"_a, "bitmask_row"_a,
           "bitmasks"_a, "mask_offsets"_a, "mask_ids"_a, "bias_offsets"_a, "bias_ids"_a, "bias_values"_a, "penalty_offsets"_a,
           "penalty_ids"_a, "output_counts"_a, "token"_a, "logprob"_a, "rank"_a, "top_ids"_a, "top_logprobs"_a,
           "Samples a token for each of the first `rows` rows of a float32 tensor.");
}
