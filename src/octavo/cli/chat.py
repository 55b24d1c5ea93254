"""`octavo chat`: a conversation in a terminal, and the commands that change it.

Knows neither how lines are edited (`line_reader`) nor where the model runs (`text_models`).
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from octavo.cli.line_reader import make_line_reader
from octavo.cli.options import add_engine_flags
from octavo.cli.terminal import displayed, show
from octavo.cli.text_models import Message, TextModel, add_sampling_flags, text_model
from octavo.core.errors import ConfigError, InvalidRequestError, OctavoError, shorten
from octavo.core.records import SamplingParams

GREETING = "{name}: ctrl-C stops an answer, /help lists commands, ctrl-D ends."
MAX_FILE_BYTES = 32 << 20
SETTABLE = (
    *("temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "seed", "stop"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_sampling_flags(parser, max_tokens=None)
    parser.add_argument("--system", "--system-prompt", metavar="TEXT", help="a system message")
    parser.add_argument("--quick", metavar="TEXT", help="answer this one message and end")
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Converse until the end of input, or answer one message."""
    model, params = text_model(args)
    with closing(model):
        chat = Chat(model, params, args.system)
        if args.quick is not None:
            chat.ask(args.quick)
            return 0
        converse(chat)
        return 0


def converse(chat: Chat) -> None:
    """Read and obey until the end of input."""
    reader = make_line_reader([f"/{name}" for name in COMMANDS])
    greeting, is_typed = GREETING.format(name=chat.model.name), sys.stdin.isatty()
    if is_typed:
        print(greeting)
    while not chat.ended:
        try:
            text = reader.read()
        except EOFError:
            if is_typed:
                print()
            return
        except KeyboardInterrupt:
            print()
            continue
        try:
            chat.take(text)
        except OctavoError as error:
            print(f"octavo: {error}", file=sys.stderr)
        except KeyboardInterrupt:  # before the answer has begun, or when it has just ended
            print()


@dataclass(slots=True)
class Chat:
    """A conversation: what was said, and how the next answer is sampled.

    Its methods raise OctavoError for what cannot be done, and KeyboardInterrupt at a ctrl-C that stops no answer; the
    conversation is then as it was before.
    """

    model: TextModel
    params: SamplingParams
    system: str | None = None
    messages: list[Message] = field(default_factory=list)  # without the system message
    ended: bool = False

    def take(self, text: str) -> None:
        """A message, or a command, which begins with a slash (two: a message that begins with one)."""
        if text.startswith("//"):
            self.ask(text[1:])
        elif text.startswith("/"):
            name, _, argument = text[1:].partition(" ")
            if name not in COMMANDS:
                raise InvalidRequestError(f"there is no command /{shorten(name)}: {_suggestion(name, COMMANDS, '/')}")
            COMMANDS[name].act(self, argument.strip())
        elif text:
            self.ask(text)

    def ask(self, text: str) -> None:
        """Say `text`, and show and remember the answer; one that ctrl-C stopped, too."""
        before = list(self.messages)
        self.messages.append({"role": "user", "content": text})
        opening = [{"role": "system", "content": self.system}] if self.system else []
        try:
            answer = show(self.model.stream_chat([*opening, *self.messages], self.params))
        except InvalidRequestError as error:  # most often for its length
            self.messages = before
            raise InvalidRequestError(f"{error} (/new forgets the conversation)") from error
        except (OctavoError, KeyboardInterrupt):
            self.messages = before
            raise
        self.messages.append({"role": "assistant", "content": answer})

    def show_help(self, _: str) -> None:
        width = max(map(len, COMMANDS)) + 2
        for name, command in COMMANDS.items():
            print(f"  {'/' + name:<{width}} {command.help}")
        print('A line that ends with \\ goes on in the next one; """ opens and closes a message of many lines, and')
        print("Alt-Enter begins a new line. ctrl-C stops an answer. // begins a message that begins with a slash.")

    def forget(self, _: str) -> None:
        self.messages = []

    def set_system(self, text: str) -> None:
        if text:
            self.system = None if text == "none" else text
        else:
            print(self.system or "no system message")

    def set_parameter(self, text: str) -> None:
        if not text:
            for name in SETTABLE:
                print(f"  {name} {json.dumps(getattr(self.params, name))}")
            return
        name, _, value = text.partition(" ")
        if name not in SETTABLE:
            raise InvalidRequestError(f"there is no setting {shorten(name)!r}: {_suggestion(name, SETTABLE)}")
        try:
            self.params = _replaced(self.params, name, value.strip())
        except InvalidRequestError as error:
            raise InvalidRequestError(str(error).replace("or None", "or none")) from error

    def retry(self, _: str) -> None:
        last = self._last_question()
        before, self.messages = self.messages, self.messages[:last]
        try:
            self.ask(str(before[last]["content"]))
        except (OctavoError, KeyboardInterrupt):
            self.messages = before
            raise

    def undo(self, _: str) -> None:
        self.messages = self.messages[: self._last_question()]

    def show_history(self, _: str) -> None:
        for message in self.messages:
            print(displayed(f"{message['role']}: {message['content']}"))

    def save(self, path: str) -> None:
        if not path:
            raise ConfigError("/save needs the name of a file")
        opening = [{"role": "system", "content": self.system}] if self.system else []
        try:
            with open(path, "x", encoding="utf-8", errors="replace") as file:
                json.dump([*opening, *self.messages], file, ensure_ascii=False, indent=1)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
        print(f"{len(self.messages)} messages are in {path}")

    def load(self, path: str) -> None:
        messages = _read_messages(path)
        first = messages[0] if messages else {}
        self.system = str(first["content"]) if first.get("role") == "system" else None
        self.messages = messages[1:] if self.system is not None else messages
        print(f"{len(self.messages)} messages")

    def end(self, _: str) -> None:
        self.ended = True

    def _last_question(self) -> int:
        for i in reversed(range(len(self.messages))):
            if self.messages[i]["role"] == "user":
                return i
        raise InvalidRequestError("nothing has been said yet")


class Command(NamedTuple):
    act: Callable[[Chat, str], None]
    help: str


COMMANDS: dict[str, Command] = {
    "help": Command(Chat.show_help, "show this list"),
    "new": Command(Chat.forget, "forget the conversation"),
    "retry": Command(Chat.retry, "answer the last message again"),
    "undo": Command(Chat.undo, "take the last message and its answer back"),
    "system": Command(Chat.set_system, "[TEXT]: set the system message, or show it; '/system none' removes it"),
    "set": Command(
        Chat.set_parameter,
        "[NAME VALUE]: how to sample, as /set temperature 0.5; '/set stop [\"END\"]'; alone: show what is set",
    ),
    "history": Command(Chat.show_history, "show the conversation"),
    "save": Command(Chat.save, "FILE: write the conversation as JSON"),
    "load": Command(Chat.load, "FILE: go on with a conversation that was saved"),
    "exit": Command(Chat.end, "end (so does ctrl-D)"),
}


def _suggestion(name: str, known: Any, prefix: str = "") -> str:
    near = difflib.get_close_matches(shorten(name), list(known), n=1)
    if near:
        return f"did you mean {prefix}{near[0]}?"
    return f"there are {', '.join(prefix + each for each in known)}"


def _replaced(params: SamplingParams, name: str, text: str) -> SamplingParams:
    try:
        value = None if text in ("", "none") else json.loads(text)
    except (ValueError, RecursionError):
        value = text  # a stop string needs no quotes
    if value is None:
        value = getattr(SamplingParams(max_tokens=None), name)
    return msgspec.structs.replace(params, **{name: value})


def _read_messages(path: str) -> list[Message]:
    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path or '/load'} cannot be read: {error.strerror}") from None
    if len(raw) > MAX_FILE_BYTES:
        raise ConfigError(f"{path} is larger than {MAX_FILE_BYTES:,} bytes: it is no conversation of ours")
    try:
        messages = msgspec.json.decode(raw, type=list[dict[str, Any]])
        if all(isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in messages):
            return list(messages)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    raise ConfigError(f'{path} is no conversation: it must be a JSON list of {{"role", "content"}}')
