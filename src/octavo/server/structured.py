"""The fields of a request that hold the output to a form: OpenAI's response_format, vLLM's structured_outputs, and the
guided_* fields that came before it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.core.errors import InvalidRequestError, short_repr, shorten
from octavo.core.records import StructuredOutputs

_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_whitespace_pattern": "whitespace_pattern",
}


class StructuredFields(msgspec.Struct, kw_only=True):
    """Part of a body. At most one field may ask for a form."""

    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: str | None = None

    @property
    def form_field(self) -> str:
        """The field that asks for a form."""
        names = ("response_format", "structured_outputs", *_GUIDED)
        return next((name for name in names if getattr(self, name) is not None), "structured_outputs")

    def wanted_form(self) -> StructuredOutputs | None:
        """None if the output is free. Raises InvalidRequestError naming the field."""
        if self.guided_decoding_backend not in (None, "auto", "guidance"):
            raise InvalidRequestError(
                f"guided_decoding_backend is {short_repr(self.guided_decoding_backend)}; octavo has 'guidance': "
                "leave it out",
                "guided_decoding_backend",
            )
        forms = {
            "response_format": _of_response_format(self.response_format),
            "structured_outputs": _of_structured_outputs(self.structured_outputs),
            self._guided_field: self._guided(),
        }
        given = [name for name, form in forms.items() if form is not None]
        if len(given) > 1:
            raise InvalidRequestError(
                f"{' and '.join(given)} both say what the output must look like: send one", given[1]
            )
        if not given:
            return None
        form = forms[given[0]]
        try:
            msgspec.msgpack.encode(form)
        except OverflowError:
            raise InvalidRequestError(
                f"{given[0]} has a whole number beyond 64 bits: use a smaller one, or 1e20", given[0]
            ) from None
        return form

    def _guided(self) -> StructuredOutputs | None:
        fields = {new: getattr(self, old) for old, new in _GUIDED.items() if getattr(self, old) is not None}
        return _read(fields, self._guided_field) if fields else None

    @property
    def _guided_field(self) -> str:
        return next((name for name in _GUIDED if getattr(self, name) is not None), "guided_json")


def _of_response_format(value: dict[str, Any] | None) -> StructuredOutputs | None:
    if value is None:
        return None
    match value.get("type"):
        case "text":
            return None
        case "json_object":
            return StructuredOutputs(json_object=True)
        case "structural_tag":
            return StructuredOutputs(structural_tag=value)
        case "json_schema":
            holder = value.get("json_schema")
            schema = holder.get("schema") if isinstance(holder, dict) else None
            if not isinstance(schema, dict | bool):
                raise InvalidRequestError(
                    'response_format of type json_schema must have json_schema: {"name": ..., "schema": {...}}',
                    "response_format",
                )
            return StructuredOutputs(json=schema)
    raise InvalidRequestError(
        f"response_format.type is {short_repr(value.get('type'))}; it must be 'text', 'json_object', 'json_schema' "
        "or 'structural_tag'",
        "response_format.type",
    )


def _of_structured_outputs(value: dict[str, Any] | None) -> StructuredOutputs | None:
    fields = {
        name: v for name, v in (value or {}).items() if v is not None and not (name == "disable_fallback" and not v)
    }
    if not fields:
        return None
    known = StructuredOutputs.__struct_fields__
    unknown = next((name for name in fields if name not in known), None)
    if unknown is not None:
        raise InvalidRequestError(
            f"structured_outputs has no field {shorten(unknown)!r}; it has {', '.join(known)}",
            "structured_outputs",
            "unknown_parameter",
        )
    return _read(fields, "structured_outputs")


def _read(fields: dict[str, Any], param: str) -> StructuredOutputs:
    try:
        return StructuredOutputs(**fields)
    except InvalidRequestError as error:
        text = str(error)
        if param != "structured_outputs":
            text = text.replace("structured_outputs.", "guided_").replace("structured_outputs", "guided_*")
        raise InvalidRequestError(text, param) from None
