// One step's sampling job, as plain pointers; scoring, for which the tokens are given, has but num_logprobs and the
// results. src/octavo/runner/sampling.py is the specification of what it means; its
// SampleArrays has the same arrays in the same order.
#pragma once
#include <cstddef>
#include <cstdint>

namespace octavo {

// A row's weights are summed in chunks of this many survivors (float), the chunks one after another (double).
inline constexpr int kSampleChunk = 512;

struct SampleArgs {
  float *logits;   // [rows, stride]; a row is modified where ids are masked or penalised
  int64_t stride;  // floats from a row to the next
  int vocab;
  int rows;
  int max_logprobs;
  int bitmask_words;  // of a row of `bitmasks`: at least vocab / 32, rounded up

  // Parameters, [rows] each.
  const float *temperature;  // below 1e-5: greedy
  const int32_t *top_k;      // 0 or less: off
  const float *top_p;        // 1: off
  const float *min_p;        // 0: off
  const float *repetition_penalty;
  const float *presence_penalty;
  const float *frequency_penalty;
  const uint64_t *seed;
  const uint32_t *position;      // of the token to be sampled, in the output
  const uint32_t *sample_index;  // which of a request's n samples
  const int32_t *num_logprobs;   // -1: none; 0: of the chosen token only

  // What a row is held to: bit id % 32 of word id / 32 is set where an id may be sampled.
  const int32_t *bitmask_row;  // [rows]: a row of `bitmasks`, or -1: all ids may be
  const uint32_t *bitmasks;    // [masks, bitmask_words]
  // Ids that must not be sampled, and what is added to the logits of others, whose ids are unique in a row. In all lists
  // ids outside of the vocabulary are skipped.
  const int32_t *mask_offsets;  // [rows + 1]
  const int32_t *mask_ids;
  const int32_t *bias_offsets;  // [rows + 1]
  const int32_t *bias_ids;
  const float *bias_values;
  // Ids that occurred in the prompt or output of a row; a count of 0 means in the prompt only. Unique in a row.
  const int32_t *penalty_offsets;  // [rows + 1]
  const int32_t *penalty_ids;
  const int32_t *output_counts;

  int32_t *token;       // [rows]; read, if they are to be scored
  float *logprob;       // [rows]; this and the following are untouched where num_logprobs is -1
  int32_t *rank;        // [rows]
  int32_t *top_ids;     // [rows, max_logprobs]; -1 past the end of a vocabulary smaller than num_logprobs
  float *top_logprobs;  // [rows, max_logprobs]
};

// A thread's private memory: 64-byte aligned, of sample_scratch_bytes(vocab); only the kernel knows its content.
struct SampleScratch;

static inline int sample_chunks(int vocab) { return (vocab + kSampleChunk - 1) / kSampleChunk; }

// Per chunk: raw logits and weights (4 bytes an id each), candidates (12 bytes an id), 16 lane maxima, one sum. And one
// spare cache line, because candidates are appended without a branch.
static inline size_t sample_scratch_bytes(int vocab) {
  return static_cast<size_t>(sample_chunks(vocab)) * (kSampleChunk * (4 + 4 + 12) + 16 * 4 + 8) + 64;
}

}  // namespace octavo
