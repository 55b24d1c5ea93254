"""Rotary position frequencies from a model's settings: the plain ones and the scalings that stretch a context.

Sources: RoPE (Su et al. 2021), position interpolation (Chen et al. 2023), YaRN (Peng et al. 2023), LongRoPE (Ding et
al. 2024), and Llama 3.1's scaling by wavelength. Knows settings and numbers, no graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from octavo.core.errors import ModelFileError
from octavo.models.settings import Settings


@dataclass(frozen=True, slots=True)
class RopeFrequencies:
    """frequencies: radians a position for each rotated pair. magnitude: of the rotated vectors.

    stretched: by how much the scaling multiplies the length that the model was trained for; 1 where the settings'
    length counts it already.
    """

    frequencies: tuple[float, ...]
    magnitude: float = 1.0
    stretched: float = 1.0


def plain_rope(rotary_dim: int, theta: float) -> RopeFrequencies:
    """No scaling."""
    return RopeFrequencies(tuple(theta ** (-2 * i / rotary_dim) for i in range(rotary_dim // 2)))


@dataclass(frozen=True, slots=True)
class RopeSettings:
    """What the scalings read, in one form for both kinds of file.

    factors: reads a table of divisors of the frequencies that the model brings, by the name of its kind, or None.
    max_position_embeddings: of the settings. wanted_length: what the user wants to run, None for all.
    """

    rotary_dim: int
    theta: float
    kind: str  # default, linear, llama3, yarn, longrope
    scaling: Settings
    factors: Callable[[str], Sequence[float] | None]
    max_position_embeddings: int
    wanted_length: int | None = None


def rope_frequencies(s: RopeSettings) -> RopeFrequencies:
    """Raises ModelFileError for a kind of scaling that is not known."""
    if s.rotary_dim % 2:
        raise ModelFileError(f"the number of rotated dimensions is {s.rotary_dim}; pairs are rotated, it must be even")
    if s.theta <= 1:
        raise ModelFileError(f"the base of the rotation's frequencies is {s.theta}; it must be greater than 1")
    plain = list(plain_rope(s.rotary_dim, s.theta).frequencies)
    divisors = s.factors("freqs")  # in a GGUF, Llama 3's scaling has become a tensor
    if divisors is not None:
        plain = [f / d for f, d in zip(plain, _of_length(divisors, plain), strict=True)]
    if s.kind not in SCALINGS:
        raise ModelFileError(f"rope scaling of the kind {s.kind!r} is not supported; supported: {', '.join(SCALINGS)}")
    return SCALINGS[s.kind](s, plain)


def _default(s: RopeSettings, plain: list[float]) -> RopeFrequencies:
    return RopeFrequencies(tuple(plain))


def _linear(s: RopeSettings, plain: list[float]) -> RopeFrequencies:
    factor = s.scaling.positive_float("factor")
    return RopeFrequencies(tuple(f / factor for f in plain), stretched=factor)


def _llama3(s: RopeSettings, plain: list[float]) -> RopeFrequencies:
    """Long wavelengths are divided by the factor, short ones stay, those between go over smoothly."""
    factor = s.scaling.positive_float("factor")
    low, high = s.scaling.positive_float("low_freq_factor"), s.scaling.positive_float("high_freq_factor")
    original = s.scaling.positive_int("original_max_position_embeddings")
    if low >= high:
        raise ModelFileError(f"rope scaling: low_freq_factor is {low}, high_freq_factor is {high}; it must be greater")

    def scaled(f: float) -> float:
        turns = original * f / (2 * math.pi)
        share = min(1.0, max(0.0, (turns - low) / (high - low)))
        return f * (share + (1 - share) / factor)

    return RopeFrequencies(tuple(map(scaled, plain)))


def _yarn(s: RopeSettings, plain: list[float]) -> RopeFrequencies:
    read = s.scaling
    for key, neutral in (("yarn_ext_factor", 1.0), ("yarn_attn_factor", 1.0), ("yarn_log_multiplier", 0.0)):
        read.refuse_unless(key, neutral)
    factor = read.positive_float("factor")
    original = read.positive_int(
        "original_max_position_embeddings", "original_context_length", default=s.max_position_embeddings
    )
    fast = read.positive_float("beta_fast", "yarn_beta_fast", default=32.0)
    slow = read.positive_float("beta_slow", "yarn_beta_slow", default=1.0)

    def dimension(turns: float) -> float:
        """Which pair turns so often within the original length."""
        return s.rotary_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(s.theta))

    low, high = dimension(fast), dimension(slow)
    if read.flag("truncate", default=True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, s.rotary_dim - 1)
    high = max(high, low + 0.001)

    def scaled(i: int, f: float) -> float:
        stretched = min(1.0, max(0.0, (i - low) / (high - low)))
        return f * (1 - stretched) + f / factor * stretched

    return RopeFrequencies(
        tuple(scaled(i, f) for i, f in enumerate(plain)), _yarn_magnitude(read, factor), factor * original
        / s.max_position_embeddings,
    )  # fmt: skip


def _yarn_magnitude(read: Settings, factor: float) -> float:
    def magnitude(multiplier: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * multiplier * math.log(factor) + 1.0

    if read.has("attention_factor"):
        return read.positive_float("attention_factor")
    if read.has("mscale") and read.has("mscale_all_dim"):
        return magnitude(read.positive_float("mscale")) / magnitude(read.positive_float("mscale_all_dim"))
    return magnitude(1.0) * read.positive_float("attn_factor", default=1.0)


def _longrope(s: RopeSettings, plain: list[float]) -> RopeFrequencies:
    """Divisors for short and for long contexts. A server has one length, so one table serves all its requests."""
    read = s.scaling
    original = read.whole("original_max_position_embeddings", "original_context_length", at_least=2)
    wanted = s.max_position_embeddings if s.wanted_length is None else s.wanted_length
    kind = "long" if wanted > original else "short"
    divisors = s.factors(kind)
    if divisors is None:
        raise ModelFileError(f"rope scaling longrope lacks its {kind} factors: convert or download the model again")
    factor = read.positive_float("factor", default=s.max_position_embeddings / original)
    default = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    magnitude = read.positive_float("attention_factor", "attn_factor", default=default)
    return RopeFrequencies(tuple(f / d for f, d in zip(plain, _of_length(divisors, plain), strict=True)), magnitude)


def _of_length(divisors: Sequence[float], plain: Sequence[float]) -> Sequence[float]:
    if len(divisors) != len(plain) or not all(0 < d < math.inf for d in divisors):
        raise ModelFileError(
            f"the table of rope factors has {len(divisors)} numbers; {len(plain)} positive ones are needed: convert or "
            "download the model again"
        )
    return divisors


SCALINGS: dict[str, Callable[[RopeSettings, list[float]], RopeFrequencies]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
