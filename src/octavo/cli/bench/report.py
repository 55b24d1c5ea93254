"""Figures of a benchmark as a table for people and as JSON for programs; names in JSON are vLLM's."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.core.errors import ConfigError

Statistics = dict[str, float]


def percentile(sorted_values: Sequence[float], p: float) -> float:
    """Of values in ascending order, with linear interpolation; NaN if there are none. p: 0 to 100."""
    if not sorted_values:
        return math.nan
    place = (len(sorted_values) - 1) * p / 100
    low = int(place)
    high = min(low + 1, len(sorted_values) - 1)
    return sorted_values[low] + (sorted_values[high] - sorted_values[low]) * (place - low)


def statistics(seconds: Sequence[float], percentiles: Sequence[float], name: str) -> Statistics:
    """Milliseconds: mean_NAME_ms, median_NAME_ms, std_NAME_ms, and pP_NAME_ms for each percentile."""
    values = sorted(1000 * s for s in seconds)
    mean = math.fsum(values) / len(values) if values else math.nan
    spread = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / len(values)) if values else math.nan
    result = {f"mean_{name}_ms": mean, f"median_{name}_ms": percentile(values, 50), f"std_{name}_ms": spread}
    return result | {f"p{p:g}_{name}_ms": percentile(values, p) for p in percentiles}


def parse_percentiles(text: str) -> list[float]:
    """`50,90,99`. Raises ValueError."""
    values = [float(part) for part in text.split(",")]
    if not all(0 <= value <= 100 for value in values):
        raise ValueError(f"{text}: percentiles are between 0 and 100")
    return values


def prepare_folder(path: str) -> None:
    """Makes it if it is not there, before a long run that writes there at its end. Raises ConfigError."""
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the folder {path} cannot be made: {error.strerror}") from None
    if not os.access(path, os.W_OK):
        raise ConfigError(f"the folder {path} cannot be written: choose another one")


def write_json(path: str, result: Mapping[str, Any]) -> None:
    """Raises ConfigError if the file cannot be written."""
    try:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(_without_nan(result), file, indent=1)
            file.write("\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None


def _without_nan(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    if isinstance(value, float) and not math.isfinite(value):
        return "inf" if value == math.inf else None
    if isinstance(value, Mapping):
        return {key: _without_nan(item) for key, item in value.items()}
    return [_without_nan(item) for item in value] if isinstance(value, list | tuple) else value
