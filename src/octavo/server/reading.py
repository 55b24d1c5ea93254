"""The strict reading of a request's JSON into its body, and the fields of others that are refused by name.

A field that octavo does not support is refused unless its value asks for nothing; a field that nobody knows is refused
too, with the nearest known name. `null` means the same as leaving a field out.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Protocol, TypeVar

import msgspec

from octavo.core.errors import InvalidRequestError, short_repr, shorten

_Anything = object()  # as a harmless value: every value is harmless, for the field only concerns others we refuse

# Fields of OpenAI's and vLLM's APIs -> the values that ask for nothing. For bodies that do not have the field.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "cache_prompt": (True,),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_reasoning": (_Anything,),
    "grammar": ("",),
    "id_slot": (-1,),
    "json_schema": (),
    "kv_transfer_params": ({},),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "media_io_kwargs": ({},),
    "mirostat": (0,),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "n": (1,),
    "n_predict": (),
    "n_probs": (0,),
    "parallel_tool_calls": (_Anything,),
    "prediction": (),
    "priority": (0,),
    "prompt_cache_options": ({},),
    "prompt_cache_retention": ("in_memory", "in-memory"),
    "prompt_embeds": (),
    "reasoning_effort": (),
    "repeat_penalty": (1,),
    "samplers": (),
    "store": (False,),
    "suffix": ("",),
    "thinking_budget_tokens": (),
    "timings_per_token": (False,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "vllm_xargs": ({},),
    "web_search_options": (),
}
# What to do instead of sending a field, where it is not just to leave it out.
INSTEAD = {
    "best_of": "send several requests and keep the best",
    "function_call": "send tool_choice",
    "functions": "send tools",
    "grammar": "send structured_outputs",
    "json_schema": "send response_format",
    "logprobs": "send include and top_logprobs",
    "max_completion_tokens": "send max_output_tokens",
    "max_tokens": "send max_output_tokens",
    "messages": "send input",
    "mirostat": "send min_p or top_p",
    "n": "there is one answer to a request, so leave n out and send the request once for each",
    "n_predict": "send max_tokens",
    "n_probs": "send logprobs",
    "repeat_penalty": "send repetition_penalty",
    "response_format": "send text.format",
    "thinking_budget_tokens": "send thinking_token_budget",
    "typical_p": "send min_p or top_p",
}


class CheckedBody(Protocol):
    """A Struct that can tell whether its fields go together."""

    __struct_fields__: ClassVar[tuple[str, ...]]

    def check(self) -> None: ...


Body = TypeVar("Body", bound=CheckedBody)


def read_body(
    raw: bytes,
    body_class: type[Body],
    defaults: Mapping[str, Any] = MappingProxyType({}),
    unsupported: Mapping[str, tuple[Any, ...]] = UNSUPPORTED,
) -> Body:
    """A request body; `defaults` are of fields that it leaves out. Raises InvalidRequestError that names the field.

    unsupported: fields that are refused unless they ask for nothing, with the values that do.
    """
    try:
        fields = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise InvalidRequestError("the body must be a JSON object", code="invalid_json")
    known = body_class.__struct_fields__
    wanted = dict(defaults)
    for name, value in fields.items():
        if value is None:
            continue
        if name in known:
            wanted[name] = value
        elif name not in unsupported:
            raise _unknown(name, known)
        elif not _is_harmless(value, unsupported[name]):
            raise unsupported_field(name, value)
    try:
        body = msgspec.convert(wanted, body_class, str_keys=True)
    except msgspec.ValidationError as error:
        raise _wrong_type(str(error)) from None
    body.check()
    return body


def _is_harmless(value: Any, harmless: tuple[Any, ...]) -> bool:
    if _Anything in harmless:
        return True
    # Compared with the type, for in Python 1 == True.
    return any(value == h and isinstance(value, bool) == isinstance(h, bool) for h in harmless)


def unsupported_field(name: str, value: Any) -> InvalidRequestError:
    """The refusal of a field that is known, for this value."""
    remedy = INSTEAD.get(name, f"leave {name} out")
    return InvalidRequestError(f"{name}={short_repr(value)} is not supported: {remedy}", name, "unsupported_parameter")


def _unknown(name: str, known: tuple[str, ...]) -> InvalidRequestError:
    name = shorten(name)  # before it is compared: that takes time
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else "remove it"
    return InvalidRequestError(f"there is no field {name!r} in this request: {hint}", name, "unknown_parameter")


def _wrong_type(text: str) -> InvalidRequestError:
    """msgspec's complaint with its JSON path made the `param`."""
    if missing := re.fullmatch(r"Object missing required field `(\w+)`", text):
        return InvalidRequestError(f"{missing[1]} is missing: it is required", missing[1], "missing_required_parameter")
    complaint, _, path = text.replace("`key` in ", "").partition(" - at `$.")
    param = path.rstrip("`").removesuffix("[...]") or None  # of keys and values of an object, the object is named
    if unknown := re.fullmatch(r"Object contains unknown field `(.*)`", complaint):
        return InvalidRequestError(
            f"{param} has no field {shorten(unknown[1])!r}: remove it", param, "unknown_parameter"
        )
    return InvalidRequestError(f"{param}: {complaint[:1].lower()}{complaint[1:]}", param, "invalid_type")
