"""What a person types, message by message: a message may have many lines. Knows no model and no commands' meaning.

On a terminal prompt_toolkit edits the lines, remembers them in a file and completes commands; from a pipe or a file
they are read as they come.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from prompt_toolkit.history import History

PROMPT, CONTINUATION = "> ", "… "
BLOCK = '"""'  # opens and closes a message of many lines


class LineReader(Protocol):
    def read(self) -> str:
        """The next message, stripped. Raises EOFError at the end of input and KeyboardInterrupt at ctrl-C."""
        ...


def make_line_reader(commands: Sequence[str]) -> LineReader:
    """The best reader that standard input and output allow; it completes `commands` on a terminal."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        return _Terminal(commands)
    return _Plain()


class _Joined:
    """Lines joined to messages: a backslash at the end goes on in the next line, and so does what BLOCK opens."""

    def read(self) -> str:
        line = self._line(PROMPT)
        if line.lstrip().startswith(BLOCK):
            return self._block(line.lstrip().removeprefix(BLOCK))
        lines = [line]
        while lines[-1].endswith("\\") and not lines[-1].endswith("\\\\"):
            lines[-1] = lines[-1][:-1]
            try:
                lines.append(self._line(CONTINUATION))
            except EOFError:
                break
        return "\n".join(lines).strip()

    def _block(self, line: str) -> str:
        lines = []
        while not line.rstrip().endswith(BLOCK):
            lines.append(line)
            try:
                line = self._line(CONTINUATION)
            except EOFError:
                line = BLOCK
        return "\n".join([*lines, line.rstrip().removesuffix(BLOCK)]).strip()

    def _line(self, prompt: str) -> str:
        raise NotImplementedError


class _Plain(_Joined):
    def _line(self, prompt: str) -> str:
        if sys.stdin.isatty():  # standard output is for the answers then
            print(prompt, end="", file=sys.stderr, flush=True)
        return input()


class _Terminal(_Joined):
    def __init__(self, commands: Sequence[str]) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

        keys = KeyBindings()

        @keys.add("enter")
        def send(event: KeyPressEvent) -> None:
            event.current_buffer.validate_and_handle()

        @keys.add("escape", "enter")  # what terminals send for Alt-Enter
        def new_line(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        self._session: PromptSession[str] = PromptSession(
            history=_history(history_path()),
            completer=WordCompleter(list(commands), sentence=True),
            complete_while_typing=False,
            multiline=True,
            prompt_continuation=CONTINUATION,
            key_bindings=keys,
        )

    def _line(self, prompt: str) -> str:
        return self._session.prompt(prompt)


def _history(path: Path | None) -> History:
    """What was typed before; a file that cannot be read or written is no reason to end a conversation."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    class Forgiving(FileHistory):
        def load_history_strings(self) -> Iterator[str]:
            with suppress(OSError):
                yield from super().load_history_strings()

        def store_string(self, string: str) -> None:
            with suppress(OSError):
                super().store_string(string)

    return InMemoryHistory() if path is None else Forgiving(path)


def history_path() -> Path | None:
    """The file of what was typed before, for this user alone; None if there is no place for it."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    path = Path(state, "octavo", "chat_history")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
    except OSError:
        return None
    return path
