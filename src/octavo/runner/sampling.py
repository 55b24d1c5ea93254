"""What sampling means: the specification that every backend's `sample` is tested against, in numpy.

It turns rows of logits and per-row parameters into token ids and log-probabilities, and knows no sequences, no requests
and no backend. It is written to be read; the native kernel (csrc/kernels/sample.inl) is written to be fast.

For one row, in this order:

1. NaN counts as -inf and +inf as the largest float32. What a row's result depends on is that row alone.
2. Log-probabilities are those of these raw logits: log-softmax, and rank 1 + the number of larger logits.
3. Ids without a bit in the row's bitmask become -inf, then ids that are masked one by one. A bias is added, in float32.
4. Penalties, in float32, for ids that occurred: repetition (a positive logit is divided, another multiplied), then
   minus count * frequency, then minus presence where the count in the output is at least 1.
5. Greedy, a temperature below 1e-5: the largest logit. All rankings go by logit, descending, ties by lower id.
6. min-p keeps logits of at least max + temperature * ln(min_p), a bound rounded to float32: a probability of at least
   min_p times the best one's.
7. top-k keeps exactly the k first in rank. top-p keeps the shortest run of first in rank whose share of the mass that
   survived so far reaches p; at least one.
8. The draw is by inverse CDF: the first survivor, by ascending id, at which the running sum of weights
   e^((logit - max) / temperature) exceeds u times their total. The survivors' weights are first summed in chunks of
   DRAW_CHUNK, so that a kernel can skip through chunks; u is in [0, 1), the first 53 bits of Philox4x32-10, keyed by
   the request's seed and counted by (output position, sample index, DRAW_STREAM, 0).

A row without any logit above -inf yields the lowest id that has a bit in its bitmask and is not masked; if there is
none, the lowest that has a bit; if there is none, 0. So a bitmask is left only if it is empty.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.core.records import GREEDY_TEMPERATURE

Array = npt.NDArray[Any]

DRAW_CHUNK = 512
DRAW_STREAM = 0  # which use of a request's random numbers; others (speculation) will count elsewhere
_LARGEST = np.finfo(np.float32).max


class SampleArrays(NamedTuple):
    """The rows of one step, as C-contiguous arrays in the order of csrc/sampling.h. [rows] each unless noted.

    CSR: row i owns the entries from offsets[i] up to offsets[i + 1]. Ids outside of the vocabulary are skipped.
    """

    temperature: Array  # float32; below 1e-5 is greedy
    top_k: Array  # int32; 0 or less is off
    top_p: Array  # float32; 1 is off
    min_p: Array  # float32; 0 is off
    repetition_penalty: Array  # float32
    presence_penalty: Array  # float32
    frequency_penalty: Array  # float32
    seed: Array  # uint64
    position: Array  # uint32, of the token to be sampled, in the output
    sample_index: Array  # uint32
    num_logprobs: Array  # int32; -1: none, 0: of the chosen token only
    bitmask_row: Array  # int32, a row of bitmasks; -1: none
    bitmasks: Array  # uint32 [masks, words]: bit i % 32 of word i // 32 is set where id i may be sampled
    mask_offsets: Array  # int32 [rows + 1]
    mask_ids: Array  # int32
    bias_offsets: Array  # int32 [rows + 1]
    bias_ids: Array  # int32, unique in a row
    bias_values: Array  # float32
    penalty_offsets: Array  # int32 [rows + 1]
    penalty_ids: Array  # int32, unique in a row
    output_counts: Array  # int32; 0: the id occurred in the prompt only
    token: Array  # out: int32
    logprob: Array  # out: float32, of the chosen token; this and the following only where num_logprobs >= 0
    rank: Array  # out: int32
    top_ids: Array  # out: int32 [rows, max_logprobs]; -1 past the end of a small vocabulary
    top_logprobs: Array  # out: float32 [rows, max_logprobs]


class ScoreArrays(NamedTuple):
    """The rows of given tokens to be scored, in the order in which a backend's `score` takes them. [rows] each unless
    noted.
    """

    num_logprobs: Array  # int32; 0: of the token only
    token: Array  # int32
    logprob: Array  # out: float32
    rank: Array  # out: int32
    top_ids: Array  # out: int32 [rows, max_logprobs]; -1 past the end of a small vocabulary
    top_logprobs: Array  # out: float32 [rows, max_logprobs]


class Survivors(NamedTuple):
    ids: Array  # int64, ascending
    weights: Array  # float64, proportional to the probabilities


def philox4x32(counter: Array, key: Array) -> Array:
    """Philox4x32-10 (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC'11).

    counter: uint32 [..., 4], key: uint32 [..., 2]. Returns uint32 [..., 4].
    """
    c = [counter[..., i].astype(np.uint64) for i in range(4)]
    k0, k1 = key[..., 0].astype(np.uint64), key[..., 1].astype(np.uint64)
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    for _ in range(10):
        a, b = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [(b >> half) ^ c[1] ^ k0, b & low, (a >> half) ^ c[3] ^ k1, a & low]
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low, (k1 + np.uint64(0xBB67AE85)) & low
    return np.stack(c, axis=-1).astype(np.uint32)


def uniform(seed: int, position: int, sample_index: int) -> float:
    """The number in [0, 1) that draws the token at an output position; seed is an unsigned 64-bit integer."""
    counter = np.array([position, sample_index, DRAW_STREAM, 0], np.uint32)
    words = philox4x32(counter, np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32))
    return ((int(words[0]) << 32 | int(words[1])) >> 11) * 2.0**-53


def clean(logits: Array) -> Array:
    """float32, without NaN and +inf."""
    finite: Array = np.minimum(np.where(np.isnan(logits), np.float32(-np.inf), logits), _LARGEST)
    return finite


def log_softmax(logits: Array) -> Array:
    """float64 [vocab] from clean logits [vocab]; all -inf if these are."""
    x = logits.astype(np.float64)
    best = x.max()
    if best == -np.inf:
        return x
    x -= best  # apart from the sum, which a huge logit would swallow
    logprobs: Array = x - np.log(np.exp(x).sum())
    return logprobs


def ranking(logits: Array) -> Array:
    """Ids by logit, descending; ties by lower id."""
    return np.argsort(-logits, kind="stable")


def allowed_ids(a: SampleArrays, row: int, vocab: int) -> Array:
    """Ids that have a bit in the row's bitmask, ascending; all if it has none."""
    if a.bitmask_row[row] < 0:
        return np.arange(vocab)
    words = a.bitmasks[a.bitmask_row[row]].astype("<u4")
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[:vocab])


def edited(logits: Array, a: SampleArrays, row: int) -> Array:
    """Steps 3 and 4: clean float32 [vocab] from clean logits."""
    x = np.full_like(logits, -np.inf)
    allowed = allowed_ids(a, row, x.size)
    x[allowed] = logits[allowed]
    masked = a.mask_ids[a.mask_offsets[row] : a.mask_offsets[row + 1]]
    x[masked[(masked >= 0) & (masked < x.size)]] = -np.inf
    biased = slice(a.bias_offsets[row], a.bias_offsets[row + 1])
    ids, values = a.bias_ids[biased], a.bias_values[biased]
    inside = (ids >= 0) & (ids < x.size)
    x[ids[inside]] += values[inside]
    occurred = slice(a.penalty_offsets[row], a.penalty_offsets[row + 1])
    ids, counts = a.penalty_ids[occurred], a.output_counts[occurred].astype(np.float32)
    inside = (ids >= 0) & (ids < x.size)
    ids, counts = ids[inside], counts[inside]
    repetition = a.repetition_penalty[row]
    with np.errstate(all="ignore"):
        y = np.where(x[ids] > 0, x[ids] / repetition, x[ids] * repetition)
        y -= counts * a.frequency_penalty[row]
        y -= np.where(counts > 0, a.presence_penalty[row], np.float32(0))
    x[ids] = y
    return clean(x)


def survivors(x: Array, a: SampleArrays, row: int) -> Survivors:
    """Steps 6 and 7, for a row that is not greedy. x: clean float32 [vocab] with at least one logit above -inf."""
    best, temperature = np.float64(x.max()), np.float64(a.temperature[row])
    weights = np.exp((x.astype(np.float64) - best) / temperature)
    keep = x > -np.inf
    if a.min_p[row] > 0:
        keep &= x >= np.float32(best + temperature * np.log(np.float64(a.min_p[row])))
    ranked = ranking(x)
    ranked = ranked[keep[ranked]]
    if a.top_k[row] > 0:
        ranked = ranked[: a.top_k[row]]
    if a.top_p[row] < 1:
        mass = np.cumsum(weights[ranked])
        ranked = ranked[: np.searchsorted(mass, np.float64(a.top_p[row]) * mass[-1]) + 1]
    ids = np.sort(ranked)
    return Survivors(ids, weights[ids])


def inverse_cdf(weights: Array, u: float) -> int:
    """Step 8: the index of the first of `weights` (float64, not all 0) at which their running sum exceeds u * total."""
    chunks = np.pad(weights, (0, -len(weights) % DRAW_CHUNK)).reshape(-1, DRAW_CHUNK)
    ends = np.cumsum(chunks.sum(axis=1))
    target = u * ends[-1]
    chunk = int(np.searchsorted(ends, target, side="right"))
    within = np.cumsum(chunks[chunk]) + (ends[chunk - 1] if chunk else 0.0)
    index = chunk * DRAW_CHUNK + int(np.searchsorted(within, target, side="right"))
    return min(index, int(np.flatnonzero(weights)[-1]))  # rounding may leave the last sum at the target


def choose(logits: Array, a: SampleArrays, row: int) -> int:
    """The token of one row of clean logits [vocab]."""
    x = edited(logits, a, row)
    if x.max() == -np.inf:
        masked = set(a.mask_ids[a.mask_offsets[row] : a.mask_offsets[row + 1]].tolist())
        allowed = allowed_ids(a, row, x.size).tolist()
        return next((i for i in allowed if i not in masked), allowed[0] if allowed else 0)
    if a.temperature[row] < np.float32(GREEDY_TEMPERATURE):
        return int(x.argmax())
    ids, weights = survivors(x, a, row)
    u = uniform(int(a.seed[row]), int(a.position[row]), int(a.sample_index[row]))
    return int(ids[inverse_cdf(weights, u)])


def sample(logits: Array, rows: int, *arrays: Array) -> None:
    """Samples a token for each of the first `rows` rows of logits, float32 [>= rows, vocab].

    `arrays` are the fields of SampleArrays, the last five of which are written.
    """
    a = SampleArrays(*arrays)
    for row in range(rows):
        x = clean(logits[row])
        a.token[row] = choose(x, a, row)
        if a.num_logprobs[row] >= 0:
            _write_logprobs(x, row, a)


def score(logits: Array, rows: int, *arrays: Array) -> None:
    """Log-probabilities of a given token for each of the first `rows` rows of logits, float32 [>= rows, vocab].

    `arrays` are the fields of ScoreArrays, the last four of which are written.
    """
    for row in range(rows):
        _write_logprobs(clean(logits[row]), row, ScoreArrays(*arrays))


def _write_logprobs(x: Array, row: int, a: SampleArrays | ScoreArrays) -> None:
    logprobs, token, wanted = log_softmax(x), a.token[row], a.num_logprobs[row]
    a.logprob[row] = logprobs[token]
    a.rank[row] = 1 + np.count_nonzero(x > x[token])
    best = ranking(x)[:wanted]
    a.top_ids[row, :wanted], a.top_logprobs[row, :wanted] = -1, -np.inf
    a.top_ids[row, : best.size], a.top_logprobs[row, : best.size] = best, logprobs[best]
