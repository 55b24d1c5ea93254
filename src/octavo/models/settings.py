"""Typed reading of a model's settings, with errors that name the key, the value and what is wanted.

The same for GGUF metadata, whose keys begin with the architecture's name, and for config.json. Knows no architecture.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.core.errors import ModelFileError, shorten

MAX_INT = 2**31 - 1


class Settings:
    """Several keys name one setting in different files: the first that is there counts. null counts as absent.

    prefix: what every key in `values` begins with. path: where the settings stand, for messages.
    """

    def __init__(self, values: Mapping[str, Any], prefix: str = "", path: str = "") -> None:
        self._values = values
        self._prefix = prefix
        self.path = path or prefix

    def has(self, *keys: str) -> bool:
        return self._find(keys)[1] is not None

    def positive_int(self, *keys: str, default: int | None = None, at_most: int = MAX_INT) -> int:
        return self.whole(*keys, default=default, at_least=1, at_most=at_most)

    def whole(self, *keys: str, default: int | None = None, at_least: int = 0, at_most: int = MAX_INT) -> int:
        key, value = self._get(keys, default)
        if not isinstance(value, int) or isinstance(value, bool) or not at_least <= value <= at_most:
            raise self._error(key, value, f"a whole number from {at_least} to {at_most:,}")
        return value

    def positive_float(self, *keys: str, default: float | None = None) -> float:
        key, value = self._get(keys, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self._error(key, value, "a positive number")
        return float(value)

    def flag(self, *keys: str, default: bool | None = None) -> bool:
        key, value = self._get(keys, default)
        if not isinstance(value, bool):
            raise self._error(key, value, "true or false")
        return value

    def text(self, *keys: str, default: str | None = None) -> str:
        key, value = self._get(keys, default)
        if not isinstance(value, str):
            raise self._error(key, value, "a text")
        return value

    def one_of(self, *keys: str, choices: Sequence[str], default: str | None = None) -> str:
        value = self.text(*keys, default=default)
        if value not in choices:
            raise self._error(self._find(keys)[0], value, " or ".join(choices), "; other values are not supported yet")
        return value

    def items(self, *keys: str, length: int | None = None) -> list[Any]:
        """A list, of `length` items if that is given; [] if it is absent and no length is."""
        key, value = self._get(keys, [] if length is None else None)
        if not isinstance(value, list) or len(value) != (len(value) if length is None else length):
            raise self._error(key, value, "a list" if length is None else f"a list of {length} items")
        return value

    def numbers(self, key: str) -> list[float]:
        values = self.items(key)
        if not all(isinstance(v, int | float) and not isinstance(v, bool) and 0 < v < math.inf for v in values):
            raise self._error(key, values, "a list of positive numbers")
        return [float(v) for v in values]

    def section(self, *keys: str) -> Settings:
        """Settings within a setting; empty if absent."""
        key, value = self._get(keys, {})
        if not isinstance(value, Mapping):
            raise self._error(key, value, "an object")
        return Settings(value, path=f"{self.path}{key}.")

    def section_of_prefix(self, prefix: str) -> Settings:
        """The settings whose keys begin with `prefix`, as a section."""
        return Settings(self._values, self._prefix + prefix, self.path + prefix)

    def with_default(self, key: str, value: object) -> Settings:
        """The same, with a value for a key that may be absent."""
        return self if self.has(key) else Settings({**self._values, self._prefix + key: value}, self._prefix, self.path)

    def refuse_unless(self, key: str, *supported: object) -> None:
        """An optional entry that, if present, must have one of the values that are supported."""
        value = self._find([key])[1]
        if value is not None and value not in supported:
            wanted = " or ".join(map(repr, supported))
            raise ModelFileError(f"{self.path}{key} is {shorten(repr(value))}; only {wanted} is supported yet")

    def _find(self, keys: Sequence[str]) -> tuple[str, Any]:
        for key in keys:
            value = self._values.get(self._prefix + key)
            if value is not None:
                return key, value
        return keys[0], None

    def _get(self, keys: Sequence[str], default: Any) -> tuple[str, Any]:
        key, value = self._find(keys)
        if value is None:
            value = default
        if value is None:
            names = " or ".join(self.path + key for key in keys)
            raise ModelFileError(f"the model's settings lack {names}")
        return key, value

    def _error(self, key: str, value: object, wanted: str, more: str = "") -> ModelFileError:
        return ModelFileError(f"{self.path}{key} is {shorten(repr(value))}; it must be {wanted}{more}")
