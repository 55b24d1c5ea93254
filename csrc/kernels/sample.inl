// Sampling of one row: masks, bias, penalties, filters and the draw, as src/octavo/runner/sampling.py specifies.
//
// Nothing is sorted. One pass finds the maximum of each lane of each chunk; these maxima bound the k-th best logit
// from below, so that a second pass can gather a few candidates, among which a quickselect finds where top-k cuts.
// Where top-p cuts is bisected first, by passes that sum the mass above a logit. Which passes are taken depends on the
// row alone.
namespace octavo::OCTAVO_ISA {

struct Candidate {
  float logit;
  int32_t id;
  float weight;
};

struct SampleMemory {     // the parts of a thread's scratch, for `chunks` chunks
  double *sums;           // [chunks]
  float *maxima;          // [chunks * kLanes]
  float *raw;             // [chunks * kSampleChunk]
  float *weights;         // [chunks * kSampleChunk]
  Candidate *candidates;  // [chunks * kSampleChunk + 1]
};

static SampleMemory sample_memory(SampleScratch *scratch, int vocab) {
  size_t chunks = sample_chunks(vocab), ids = chunks * kSampleChunk;
  SampleMemory m;
  m.raw = reinterpret_cast<float *>(scratch);
  m.weights = m.raw + ids;
  m.maxima = m.weights + ids;
  m.sums = reinterpret_cast<double *>(m.maxima + chunks * kLanes);
  m.candidates = reinterpret_cast<Candidate *>(m.sums + chunks);
  return m;
}

static constexpr float kLargest = 3.402823466e38f;  // the largest float: what +infinity counts as
static constexpr float kInfinity = __builtin_inff();
static constexpr float kNothing = -kInfinity;

// NaN counts as -infinity, so every other comparison in this file is among numbers.
OCTAVO_INLINE float clean(float x) { return x > kLargest ? kLargest : (x == x ? x : kNothing); }
OCTAVO_INLINE F32 clean(F32 x) { return vmin(where_less(set1(kNothing), x, x, set1(kNothing)), set1(kLargest)); }

// Lanes i.. of n logits; -infinity past the end.
OCTAVO_INLINE F32 load_logits(const float *x, int i, int n) {
  if (i + kLanes <= n) return clean(load(x + i));
  int rest = n > i ? n - i : 0;
  return where_less(lane_index(), set1(static_cast<float>(rest)), clean(load_n(x + i, rest)), set1(kNothing));
}

// Philox4x32-10: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (SC'11). `counter` becomes the output.
static void philox4x32(uint32_t counter[4], uint32_t key0, uint32_t key1) {
  for (int round = 0; round < 10; round++) {
    uint64_t a = static_cast<uint64_t>(counter[0]) * 0xD2511F53u, b = static_cast<uint64_t>(counter[2]) * 0xCD9E8D57u;
    counter[0] = static_cast<uint32_t>(b >> 32) ^ counter[1] ^ key0;
    counter[2] = static_cast<uint32_t>(a >> 32) ^ counter[3] ^ key1;
    counter[1] = static_cast<uint32_t>(b);
    counter[3] = static_cast<uint32_t>(a);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
}

static double uniform(uint64_t seed, uint32_t position, uint32_t sample_index) {
  uint32_t c[4] = {position, sample_index, 0, 0};  // the third word is 0 for the stream of token draws
  philox4x32(c, static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
  return static_cast<double>((static_cast<uint64_t>(c[0]) << 32 | c[1]) >> 11) * 0x1p-53;
}

// The maximum of each lane of each chunk, and of the row.
static float lane_maxima(const float *x, int n, float *maxima) {
  F32 best = set1(kNothing);
  for (int start = 0; start < n; start += kSampleChunk) {
    F32 a = set1(kNothing), b = a;
    if (start + kSampleChunk <= n) {
      // vmax returns its second operand where the first is NaN; two chains hide its latency.
      for (int i = start; i < start + kSampleChunk; i += 2 * kLanes) {
        a = vmax(load(x + i), a);
        b = vmax(load(x + i + kLanes), b);
      }
    } else {
      for (int i = start; i < n; i += kLanes) a = vmax(load_logits(x, i, n), a);
    }
    a = vmin(vmax(a, b), set1(kLargest));
    store(maxima + start / kSampleChunk * kLanes, a);
    best = vmax(best, a);
  }
  return reduce_max(best);
}

// The lowest id whose logit is `best`, the row's maximum.
static int first_of(const float *x, int n, const float *maxima, float best) {
  int lane = 0;
  while (maxima[lane] != best) lane++;
  int i = lane / kLanes * kSampleChunk;
  while (i < n - 1 && clean(x[i]) != best) i++;
  return i;
}

// The order of all rankings: by logit, descending; ties by lower id.
OCTAVO_INLINE bool before(const Candidate &a, const Candidate &b) { return a.logit > b.logit || (a.logit == b.logit && a.id < b.id); }

// Candidates with a logit from `least` up to but excluding `below`, in ascending order of id.
static int gather(const float *x, int n, const float *maxima, float least, float below, Candidate *out) {
  int count = 0;
  for (int start = 0; start < n; start += kSampleChunk) {
    if (reduce_max(load(maxima + start / kSampleChunk * kLanes)) < least) continue;
    int end = start + kSampleChunk < n ? start + kSampleChunk : n;
    for (int i = start; i < end; i += kLanes) {
      F32 logits = load_logits(x, i, n);
      if (reduce_max(where_less(logits, set1(below), logits, set1(kNothing))) < least) continue;
      int stop = i + kLanes < end ? i + kLanes : end;
      for (int id = i; id < stop; id++) {
        float logit = clean(x[id]);
        out[count] = {logit, id, 1.0f};
        count += (logit >= least) & (logit < below);
      }
    }
  }
  return count;
}

OCTAVO_INLINE void swap_candidates(Candidate &a, Candidate &b) {
  Candidate t = a;
  a = b;
  b = t;
}

// Quickselect by mass: moves to the front the shortest run of best candidates whose weights reach `target` (> 0), in no
// order except that its last is its worst. Returns its length: all n if they do not reach the target.
static int take_best(Candidate *c, int n, double target) {
  double mass = 0;  // of [0, lo)
  int lo = 0, hi = n;
  while (hi - lo > 1) {
    int middle = lo + (hi - lo) / 2, last = hi - 1;
    if (before(c[middle], c[lo])) swap_candidates(c[middle], c[lo]);
    if (before(c[last], c[lo])) swap_candidates(c[last], c[lo]);
    if (before(c[middle], c[last])) swap_candidates(c[middle], c[last]);
    Candidate pivot = c[last];  // the median of the three
    int split = lo;
    double left = 0;
    for (int i = lo; i < last; i++) {
      if (!before(c[i], pivot)) continue;
      left += c[i].weight;
      swap_candidates(c[i], c[split++]);
    }
    swap_candidates(c[split], c[last]);
    if (mass + left >= target) {
      hi = split;
    } else if (mass + left + pivot.weight >= target) {
      return split + 1;
    } else {
      mass += left + pivot.weight;
      lo = split + 1;
    }
  }
  return hi;
}

// Heapsort, best first: k may be the whole vocabulary.
static void sort_candidates(Candidate *c, int n) {
  auto sink = [c](int parent, int end) {
    for (int child = 2 * parent + 1; child < end; parent = child, child = 2 * parent + 1) {
      if (child + 1 < end && before(c[child], c[child + 1])) child++;
      if (!before(c[parent], c[child])) return;
      swap_candidates(c[parent], c[child]);
    }
  };
  for (int parent = n / 2 - 1; parent >= 0; parent--) sink(parent, n);
  for (int end = n - 1; end > 0; end--) {
    swap_candidates(c[0], c[end]);
    sink(0, end);
  }
}

// A logit that at least k ids reach: the k-th best of the lane maxima (-infinity if there are fewer).
static float bound_of_best(const float *maxima, int lanes, int k, Candidate *work) {
  if (k > lanes) return kNothing;
  for (int i = 0; i < lanes; i++) work[i] = {maxima[i], i, 1.0f};
  return work[take_best(work, lanes, k) - 1].logit;
}

// weights[i] = e^((x[i] - best) / temperature), 0 where x[i] < cutoff; chunk sums in `sums`. Returns their total.
// x and weights may be the same memory.
static double weigh(const float *x, int n, float best, float temperature, float cutoff, float *weights, double *sums) {
  F32 top = set1(best), scale = set1(1.0f / temperature), least = set1(cutoff);
  double total = 0;
  for (int start = 0; start < n; start += kSampleChunk) {
    F32 sum = zero();
    for (int i = start; i < start + kSampleChunk && i < n; i += kLanes) {
      F32 logit = load_logits(x, i, n);
      F32 weight = where_less(logit, least, zero(), exp((logit - top) * scale));
      store(weights + i, weight);
      sum = sum + weight;
    }
    sums[start / kSampleChunk] = reduce_add(sum);
    total += sums[start / kSampleChunk];
  }
  return total;
}

// Inverse CDF: the first of n weights at which the running sum exceeds u * total.
static int draw(const float *weights, int n, const double *sums, double total, double u) {
  double target = u * total, running = 0;
  int chunk = 0;
  // A chunk without weight is never chosen, even where rounding lets the sums end at the target.
  for (int c = 0; c * kSampleChunk < n; c++) {
    if (!(sums[c] > 0)) continue;
    if (c > chunk) running += sums[chunk];
    chunk = c;
    if (running + sums[c] > target) break;
  }
  int chosen = 0, end = (chunk + 1) * kSampleChunk < n ? (chunk + 1) * kSampleChunk : n;
  for (int i = chunk * kSampleChunk; i < end; i++) {
    if (!(weights[i] > 0)) continue;
    chosen = i;
    running += weights[i];
    if (running > target) break;
  }
  return chosen;
}

static double weigh_candidates(const Candidate *c, int n, float best, float temperature, const SampleMemory &m) {
  for (int i = 0; i < n; i++) m.weights[i] = c[i].logit;
  return weigh(m.weights, n, best, temperature, kNothing, m.weights, m.sums);
}

// Puts the survivors of top-k, and of top-p among them, into m.candidates in ascending order of id. Returns how many.
static int keep_top_k(const float *x, int n, float best, float temperature, float cutoff, int top_k, float top_p, const SampleMemory &m) {
  Candidate *c = m.candidates;
  float bound = bound_of_best(m.maxima, sample_chunks(n) * kLanes, top_k, c);
  int count = gather(x, n, m.maxima, bound > cutoff ? bound : cutoff, kInfinity, c);
  count = take_best(c, count, top_k);
  if (top_p < 1) {
    double total = weigh_candidates(c, count, best, temperature, m);
    for (int i = 0; i < count; i++) c[i].weight = m.weights[i];
    count = take_best(c, count, static_cast<double>(top_p) * total);
  }
  Candidate worst = c[count - 1];
  int gathered = gather(x, n, m.maxima, worst.logit, kInfinity, c);
  count = 0;
  for (int i = 0; i < gathered; i++)
    if (!before(worst, c[i])) c[count++] = c[i];
  return count;
}

// The mass of the logits from `least` on. Cleaning them is for `weigh` alone: what is not a number weighs 0.
static double mass_from(const float *x, const float *weights, int n, float least) {
  double mass = 0;
  for (int start = 0; start < n; start += kSampleChunk) {
    F32 sum = zero();
    for (int i = start; i < start + kSampleChunk && i < n; i += kLanes) {
      F32 logit = i + kLanes <= n ? load(x + i) : load_n(x + i, n - i);
      sum = sum + where_less(logit, set1(least), zero(), load(weights + i));
    }
    mass += reduce_add(sum);
  }
  return mass;
}

// Top-p over the whole row: zeroes the weights outside of it, in m.weights and m.sums. Returns the new total.
static double keep_top_p(const float *x, int n, float best, float temperature, float top_p, double total, const SampleMemory &m) {
  double target = static_cast<double>(top_p) * total;
  // All ids with less than this weight have together at most half of what top-p may leave out.
  double negligible = 0.5 * (1.0 - static_cast<double>(top_p)) * total / n;
  float least = static_cast<float>(best + temperature * log(negligible)), below = best;
  if (least < -kLargest) least = -kLargest;

  // Narrow down where the cut is: in [least, below), where `above` is the mass from `below` on. Ten halvings
  // leave a few hundred candidates in a flat row of 50,000.
  double above = mass_from(x, m.weights, n, best);
  if (above >= target) {
    least = best;
    below = kInfinity;
    above = 0;
  }
  for (int i = 0; i < 10 && least < best; i++) {
    float middle = least + (below - least) / 2;
    if (!(middle > least && middle < below)) break;
    double mass = mass_from(x, m.weights, n, middle);
    if (mass >= target) {
      least = middle;
    } else {
      below = middle;
      above = mass;
    }
  }

  Candidate *c = m.candidates;
  int count = gather(x, n, m.maxima, least, below, c);
  if (count == 0) return total;  // p so near to 1 that nothing but rounding lies beyond
  for (int i = 0; i < count; i++) c[i].weight = m.weights[c[i].id];
  Candidate worst = c[take_best(c, count, target - above) - 1];

  F32 cut = set1(worst.logit), past = set1(static_cast<float>(worst.id + 1)), ids = lane_index();
  total = 0;
  for (int start = 0; start < n; start += kSampleChunk) {
    F32 sum = zero();
    for (int i = start; i < start + kSampleChunk && i < n; i += kLanes) {
      F32 logit = load_logits(x, i, n), weight = load(m.weights + i);
      F32 tied = where_less(ids, past, weight, zero());
      weight = where_less(cut, logit, weight, where_less(logit, cut, zero(), tied));
      store(m.weights + i, weight);
      sum = sum + weight;
      ids = ids + set1(static_cast<float>(kLanes));
    }
    m.sums[start / kSampleChunk] = reduce_add(sum);
    total += m.sums[start / kSampleChunk];
  }
  return total;
}

static const uint32_t *bitmask_of(const SampleArgs &args, int row) {
  int mask = args.bitmask_row[row];
  return mask < 0 ? nullptr : args.bitmasks + static_cast<int64_t>(mask) * args.bitmask_words;
}

OCTAVO_INLINE bool is_set(const uint32_t *bitmask, int id) { return bitmask[id / 32] >> (id % 32) & 1; }

static void apply_bitmask(const uint32_t *bitmask, float *x, int n) {
  alignas(64) static constexpr int32_t kLaneBits[kLanes] = {1,      1 << 1, 1 << 2,  1 << 3,  1 << 4,  1 << 5,  1 << 6,  1 << 7,
                                                            1 << 8, 1 << 9, 1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 14, 1 << 15};
  I32 lane_bits = load_words(kLaneBits);
  for (int i = 0; i < n; i += kLanes) {
    int32_t allowed = static_cast<int32_t>(bitmask[i / 32] >> (i % 32) & 0xffff);
    int lanes = n - i < kLanes ? n - i : kLanes;
    store_n(x + i, where_less(zero(), to_f32(set1(allowed) & lane_bits), load_n(x + i, lanes), set1(kNothing)), lanes);
  }
}

static void edit(const SampleArgs &args, int row, float *x) {
  uint32_t vocab = static_cast<uint32_t>(args.vocab);
  if (const uint32_t *bitmask = bitmask_of(args, row)) apply_bitmask(bitmask, x, args.vocab);
  for (int i = args.mask_offsets[row]; i < args.mask_offsets[row + 1]; i++)
    if (static_cast<uint32_t>(args.mask_ids[i]) < vocab) x[args.mask_ids[i]] = kNothing;
  for (int i = args.bias_offsets[row]; i < args.bias_offsets[row + 1]; i++)
    if (static_cast<uint32_t>(args.bias_ids[i]) < vocab) x[args.bias_ids[i]] = clean(x[args.bias_ids[i]]) + args.bias_values[i];
  float repetition = args.repetition_penalty[row];
  for (int i = args.penalty_offsets[row]; i < args.penalty_offsets[row + 1]; i++) {
    if (static_cast<uint32_t>(args.penalty_ids[i]) >= vocab) continue;
    float &logit = x[args.penalty_ids[i]];
    float y = clean(logit), count = static_cast<float>(args.output_counts[i]);
    y = y > 0 ? y / repetition : y * repetition;
    y -= count * args.frequency_penalty[row];
    if (count > 0) y -= args.presence_penalty[row];
    logit = y;
  }
}

static bool has_edits(const SampleArgs &args, int row) {
  auto any = [row](const int32_t *offsets) { return offsets[row] < offsets[row + 1]; };
  return args.bitmask_row[row] >= 0 || any(args.mask_offsets) || any(args.bias_offsets) || any(args.penalty_offsets);
}

// What a row without a usable logit yields. The bitmask is never left, if it has a bit; the list of masked ids may be.
static int lowest_allowed(const SampleArgs &args, int row) {
  const uint32_t *bitmask = bitmask_of(args, row);
  int first = -1;
  for (int id = 0; id < args.vocab; id++) {
    if (bitmask && !is_set(bitmask, id)) continue;
    if (first < 0) first = id;
    int i = args.mask_offsets[row];
    while (i < args.mask_offsets[row + 1] && args.mask_ids[i] != id) i++;
    if (i == args.mask_offsets[row + 1]) return id;
  }
  return first < 0 ? 0 : first;
}

static int choose(const SampleArgs &args, int row, const float *x, const SampleMemory &m) {
  int n = args.vocab;
  float best = lane_maxima(x, n, m.maxima), temperature = args.temperature[row];
  if (best == kNothing) return lowest_allowed(args, row);
  if (temperature < 1e-5f) return first_of(x, n, m.maxima, best);

  float cutoff = -kLargest, min_p = args.min_p[row], top_p = args.top_p[row];
  int top_k = args.top_k[row];
  if (min_p > 0) {
    float least = static_cast<float>(best + temperature * log(static_cast<double>(min_p)));
    if (least > cutoff) cutoff = least;
  }
  double u = uniform(args.seed[row], args.position[row], args.sample_index[row]);
  if (top_k > 0 && top_k < n) {
    int count = keep_top_k(x, n, best, temperature, cutoff, top_k, top_p, m);
    double total = weigh_candidates(m.candidates, count, best, temperature, m);
    return m.candidates[draw(m.weights, count, m.sums, total, u)].id;
  }
  double total = weigh(x, n, best, temperature, cutoff, m.weights, m.sums);
  if (top_p < 1) total = keep_top_p(x, n, best, temperature, top_p, total, m);
  return draw(m.weights, n, m.sums, total, u);
}

// A log-probability is (logit - best) - log_sum: kept apart, because a huge logit would swallow the sum.
struct LogSum {
  double best, log_sum;
  float logprob(float logit) const { return static_cast<float>(logit - best - log_sum); }
};

// The best ids of the raw logits.
static LogSum write_top_logprobs(const SampleArgs &args, int row, const float *x, const SampleMemory &m) {
  int n = args.vocab, wanted = args.num_logprobs[row], k = wanted < n ? wanted : n;
  float best = lane_maxima(x, n, m.maxima);
  LogSum all{0, 0};  // if nothing is above -infinity, every log-probability is -infinity
  if (best > kNothing) all = {best, log(weigh(x, n, best, 1.0f, kNothing, m.weights, m.sums))};
  int32_t *ids = args.top_ids + static_cast<int64_t>(row) * args.max_logprobs;
  float *logprobs = args.top_logprobs + static_cast<int64_t>(row) * args.max_logprobs;
  for (int i = k; i < wanted; i++) ids[i] = -1, logprobs[i] = kNothing;
  if (k == 0) return all;

  Candidate *c = m.candidates;
  float bound = bound_of_best(m.maxima, sample_chunks(n) * kLanes, k, c);
  int gathered = gather(x, n, m.maxima, bound, kInfinity, c);
  take_best(c, gathered, k);
  sort_candidates(c, k);
  for (int i = 0; i < k; i++) {
    ids[i] = c[i].id;
    logprobs[i] = all.logprob(c[i].logit);
  }
  return all;
}

// 1 + the number of larger logits. Counts are exact in float: fewer than 2^24 ids.
static int32_t rank_of(const float *x, int n, float logit) {
  F32 larger = zero();
  for (int i = 0; i < n; i += kLanes) larger = larger + where_less(set1(logit), load_logits(x, i, n), set1(1.0f), zero());
  return 1 + static_cast<int32_t>(reduce_add(larger));
}

static void write_chosen(const SampleArgs &args, int row, const float *x, const LogSum &all) {
  float logit = clean(x[args.token[row]]);
  args.logprob[row] = all.logprob(logit);
  args.rank[row] = rank_of(x, args.vocab, logit);
}

// For a token that is given.
static void score_row(const SampleArgs &args, int row, SampleScratch *scratch) {
  const float *x = args.logits + row * args.stride;
  write_chosen(args, row, x, write_top_logprobs(args, row, x, sample_memory(scratch, args.vocab)));
}

static void sample_row(const SampleArgs &args, int row, SampleScratch *scratch) {
  SampleMemory m = sample_memory(scratch, args.vocab);
  float *x = args.logits + row * args.stride, *raw = x;
  bool edits = has_edits(args, row);
  bool logprobs = args.num_logprobs[row] >= 0;
  LogSum all{0, 0};
  if (logprobs) {
    all = write_top_logprobs(args, row, x, m);
    if (edits) {
      std::memcpy(m.raw, x, args.vocab * sizeof(float));
      raw = m.raw;
    }
  }
  if (edits) edit(args, row, x);
  args.token[row] = choose(args, row, x, m);
  if (logprobs) write_chosen(args, row, raw, all);
}

}  // namespace octavo::OCTAVO_ISA
