"""What is looked at in a JSON schema before llguidance compiles it.

llguidance refuses keywords that it does not know. What is refused here is what it would accept and not quite keep.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from octavo.core.errors import InvalidRequestError, shorten

MAX_DEPTH = 100  # objects and lists within each other; llguidance's own limit is 127 with what is around the schema
# Keywords whose values are no schemas, and those whose values are schemas by names that are no keywords.
_DATA = ("const", "enum", "default", "examples")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def checked_schema(schema: Any, *, closed: bool = False) -> dict[str, Any]:
    """A schema as an object. closed: objects have no properties but those that the schema names.

    Raises InvalidRequestError.
    """
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise _refusal(f"a JSON schema must be an object, not {shorten(repr(schema))}")
    if "x-guidance" in schema:
        raise _refusal("the schema has x-guidance, which the server sets itself: remove it")
    level: list[Any] = [schema]
    for _ in range(MAX_DEPTH):
        level = [child for value in level for child in _children(value)]
        if not level:
            break
    else:
        raise _refusal(f"the schema is nested more than {MAX_DEPTH} levels deep: make it flatter, with $defs and $ref")
    return _checked(schema, closed)  # type: ignore[no-any-return]  # an object stays one


def _children(value: Any) -> Iterator[Any]:
    if isinstance(value, float) and not math.isfinite(value):
        raise _refusal(f"the schema has the number {value}, which JSON cannot write: use one below 1e308")
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list):
        yield from value


def _checked(schema: Any, closed: bool) -> Any:
    """The same, or with additionalProperties false wherever properties are named and nothing is said of others."""
    if isinstance(schema, list):
        return [_checked(item, closed) for item in schema]
    if not isinstance(schema, dict):
        return schema
    _check_min_properties(schema)
    made = {}
    for key, value in schema.items():
        if key in _DATA:
            made[key] = value
        elif key in _NAMED and isinstance(value, dict):
            made[key] = {name: _checked(item, closed) for name, item in value.items()}
        else:
            made[key] = _checked(value, closed)
    if closed and "properties" in schema and not {"additionalProperties", "patternProperties"} & schema.keys():
        made["additionalProperties"] = False
    return made


def _check_min_properties(schema: dict[str, Any]) -> None:
    """llguidance counts a key that is written twice twice."""
    wanted = schema.get("minProperties")
    required = schema.get("required")
    if isinstance(wanted, int) and wanted > max(1, len(required) if isinstance(required, list) else 0):
        raise _refusal(f"minProperties is {wanted}; more than 1 can only be kept by naming the properties in required")


def _refusal(text: str) -> InvalidRequestError:
    return InvalidRequestError(text, param="structured_outputs")
