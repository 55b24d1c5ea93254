"""What a benchmark asks: prompts with the length of their answers, and when each is sent.

All of it follows from a seed. Knows no server and no tokenizer: the prompts of servers are words.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from octavo.core.errors import ConfigError, shorten

Distribution = Literal["uniform", "lognormal"]
DISTRIBUTIONS: tuple[Distribution, ...] = ("uniform", "lognormal")
MAX_DATASET_BYTES = 2 << 30
CHARACTERS_A_TOKEN = 4  # of English text, roughly
# Common enough to be one token, with the space before it, in nearly every vocabulary.
WORDS = (  # noqa: SIM905 - as a list it would fill a page
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea kid body back "
    "parent face others level office door health person art war history party result change morning reason research "
    "girl guy moment air teacher force education"
).split()


@dataclass(frozen=True, slots=True)
class Sample:
    prompt: str
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Lengths:
    """How lengths are drawn around `mean`.

    uniform: between mean * (1 - spread) and mean * (1 + spread), as vLLM's --random-range-ratio. lognormal: the
    logarithm's standard deviation is `spread`, and the mean is `mean`. At least 1.
    """

    mean: int
    spread: float = 0.0
    distribution: Distribution = "uniform"

    def draw(self, generator: random.Random) -> int:
        if self.distribution == "lognormal":
            return max(1, round(self.mean * generator.lognormvariate(-self.spread * self.spread / 2, self.spread)))
        low, high = round(self.mean * (1 - self.spread)), round(self.mean * (1 + self.spread))
        return max(1, generator.randint(low, high))


def random_samples(
    count: int, inputs: Lengths, outputs: Lengths, generator: random.Random, *, prefix: int = 0, num_prefixes: int = 1
) -> list[Sample]:
    """Prompts of random words; each begins with one of `num_prefixes` prefixes of `prefix` words, in turn."""
    prefixes = [_words(prefix, generator) for _ in range(num_prefixes)]
    return [
        Sample(
            " ".join([*prefixes[i % num_prefixes], *_words(inputs.draw(generator), generator)]), outputs.draw(generator)
        )
        for i in range(count)
    ]


def dataset_samples(path: str, count: int, output_tokens: int | None, generator: random.Random) -> list[Sample]:
    """`count` samples of a file, shuffled, again from the start if it has fewer. Raises ConfigError.

    Either ShareGPT's JSON, a list of {"conversations": [{"value"}, {"value"}, ...]}, or a JSON object a line with
    "prompt" and perhaps "output_tokens". `output_tokens` wins over what the file says; ShareGPT's answers are counted
    by characters.
    """
    samples = list(_read_dataset(path, output_tokens))
    if not samples:
        raise ConfigError(f"{path} has no prompts: see 'octavo bench serve --help' for what it may be")
    generator.shuffle(samples)
    return [samples[i % len(samples)] for i in range(count)]


def ramp(count: int, start: float, end: float, strategy: str) -> list[float]:
    """A rate for each of `count` requests, from `start` to `end` by equal steps ("linear") or by equal factors."""
    parts = [i / max(1, count - 1) for i in range(count)]
    if strategy == "linear":
        return [start + (end - start) * part for part in parts]
    return [start * (end / start) ** part for part in parts]


def arrival_times(
    count: int, rate: float | Sequence[float], burstiness: float, generator: random.Random
) -> list[float]:
    """Seconds from the start at which each request is sent.

    rate: requests a second, perhaps infinite; or what it is after each request. The gaps are gamma distributed with
    shape `burstiness`: 1 is a Poisson process, less comes in bursts, more is more regular, and infinity is even.
    """
    rates = [rate] * count if isinstance(rate, float | int) else rate
    times, now = [], 0.0
    for current in rates:
        times.append(now)
        if math.isinf(burstiness):
            now += 1 / current
        elif not math.isinf(current):
            now += generator.gammavariate(burstiness, 1 / (current * burstiness))
    return times


def _words(count: int, generator: random.Random) -> list[str]:
    return generator.choices(WORDS, k=count)


def _read_dataset(path: str, output_tokens: int | None) -> Iterator[Sample]:
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(MAX_DATASET_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the dataset {path} cannot be read: {error}") from None
    if text.lstrip().startswith("["):
        entries = _parsed(text, path)
        yield from (sample for entry in entries if (sample := _conversation(entry, output_tokens)) is not None)
        return
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            yield _prompt_line(_parsed(line, f"{path}, line {number}"), output_tokens, f"{path}, line {number}")


def _conversation(entry: Any, output_tokens: int | None) -> Sample | None:
    """The first question and the length of its answer; None for a conversation without one."""
    try:
        question, answer = (str(turn["value"]) for turn in entry["conversations"][:2])
    except (KeyError, TypeError, ValueError):
        return None
    if not question or not answer:
        return None
    return Sample(question, output_tokens or max(1, len(answer) // CHARACTERS_A_TOKEN))


def _prompt_line(entry: Any, output_tokens: int | None, where: str) -> Sample:
    match entry:
        case {"prompt": str(prompt)} if prompt:
            count = output_tokens or entry.get("output_tokens", 128)
            if type(count) is int and count > 0:
                return Sample(prompt, count)
    raise ConfigError(f'{where} is {shorten(str(entry))!r}; it must be {{"prompt": text, "output_tokens": N}}')


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON: {error}") from None
