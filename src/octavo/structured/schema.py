"""What is looked at in a JSON schema before llguidance compiles it.

llguidance refuses keywords that it does not know. What is refused here is what it would accept and not quite keep.
"""

from __future__ import annotations

from typing import Any

from octavo.core.errors import InvalidRequestError, shorten

MAX_DEPTH = 100  # objects and lists within each other; llguidance's own limit is 127 with what is around the schema
# Keywords whose values are no schemas, so that what is in them is nobody's business.
_DATA = ("const", "enum", "default", "examples")


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
    level: list[tuple[dict[str, Any] | list[Any], bool]] = [(schema, True)]
    for _ in range(MAX_DEPTH):
        below: list[tuple[dict[str, Any] | list[Any], bool]] = []
        for value, is_schema in level:
            if is_schema and isinstance(value, dict):
                _check_min_properties(value)
            children = value.items() if isinstance(value, dict) else enumerate(value)
            below += [
                # The values of `properties` are schemas whatever their names.
                (child, not (is_schema and key in _DATA))
                for key, child in children
                if isinstance(child, dict | list)
            ]
        if not below:
            return _closed(schema) if closed else schema
        level = below
    raise _refusal(f"the schema is nested more than {MAX_DEPTH} levels deep: make it flatter, with $defs and $ref")


def _check_min_properties(schema: dict[str, Any]) -> None:
    """llguidance counts a key that is written twice twice."""
    wanted = schema.get("minProperties")
    required = schema.get("required")
    if isinstance(wanted, int) and wanted > max(1, len(required) if isinstance(required, list) else 0):
        raise _refusal(f"minProperties is {wanted}; more than 1 can only be kept by naming the properties in required")


def _closed(schema: Any) -> Any:
    """With additionalProperties false wherever properties are named and nothing is said of others."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: value if key in _DATA else _closed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and not {"additionalProperties", "patternProperties"} & schema.keys():
        made["additionalProperties"] = False
    return made


def _refusal(text: str) -> InvalidRequestError:
    return InvalidRequestError(text, param="structured_outputs")
