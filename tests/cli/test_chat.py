from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

import pytest

from octavo.cli.chat import COMMANDS, Chat, converse
from octavo.cli.line_reader import make_line_reader
from octavo.cli.remote import RemoteModel
from octavo.cli.terminal import show
from octavo.cli.text_models import Message, Piece
from octavo.core.errors import ConfigError, EngineDeadError, InvalidRequestError
from octavo.core.records import SamplingParams
from tests.server.harness import ENVIRONMENT, ServerProcess, fake_server


class Echo:
    """Answers with what was said last, and writes down what it was asked."""

    name = "echo"

    def __init__(self) -> None:
        self.asked: list[tuple[list[Message], SamplingParams]] = []

    def stream(self, prompt: str, sampling_params: SamplingParams) -> Generator[Piece]:
        raise AssertionError

    def stream_chat(self, messages: Sequence[Message], sampling_params: SamplingParams) -> Generator[Piece]:
        self.asked.append((list(messages), sampling_params))
        if messages[-1]["content"] == "interrupt early":
            raise KeyboardInterrupt
        return self._answer(messages)

    def _answer(self, messages: Sequence[Message]) -> Generator[Piece]:
        match messages[-1]["content"]:
            case "too long":
                raise InvalidRequestError("messages has 9 tokens")
            case "die":
                yield Piece("half")
                raise EngineDeadError("the engine is dead")
            case "think":
                yield Piece("hm", is_reasoning=True)
            case "interrupt":
                yield Piece("half")
                raise KeyboardInterrupt
        yield Piece(f"<{messages[-1]['content']}>")

    def close(self) -> None:
        pass


@pytest.fixture
def chat() -> Chat:
    return Chat(Echo(), SamplingParams(temperature=0))


def said(chat: Chat) -> list[str]:
    return [str(message["content"]) for message in chat.messages]


def asked(chat: Chat) -> list[tuple[list[Message], SamplingParams]]:
    assert isinstance(chat.model, Echo)
    return chat.model.asked


def test_a_conversation_is_remembered_until_it_is_forgotten(chat: Chat) -> None:
    chat.take("a")
    chat.take("b")
    assert said(chat) == ["a", "<a>", "b", "<b>"]
    chat.take("/new")
    chat.take("c")
    assert said(chat) == ["c", "<c>"]


def test_undo_takes_back_a_question_and_its_answer_and_retry_asks_again(chat: Chat) -> None:
    chat.take("a")
    chat.take("b")
    chat.take("/undo")
    assert said(chat) == ["a", "<a>"]
    chat.take("/retry")
    assert said(chat) == ["a", "<a>"]
    assert [messages[-1]["content"] for messages, _ in asked(chat)] == ["a", "b", "a"]
    chat.take("/undo")
    for command in ("/undo", "/retry"):
        with pytest.raises(InvalidRequestError, match="nothing has been said"):
            chat.take(command)


def test_the_system_message_is_said_first_and_kept_by_new(chat: Chat, capsys: pytest.CaptureFixture[str]) -> None:
    chat.take("/system be brief")
    chat.take("/new")
    chat.take("a")
    assert asked(chat)[0][0] == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "a"}]
    chat.take("/system")
    chat.take("/system none")
    chat.take("b")
    assert asked(chat)[1][0][0]["role"] == "user"
    assert "be brief\n" in capsys.readouterr().out


def test_settings_are_checked_and_used(chat: Chat, capsys: pytest.CaptureFixture[str]) -> None:
    for line in ("/set temperature 0.5", "/set stop END", '/set stop ["X", "Y"]', "/set seed 7", "/set seed none"):
        chat.take(line)
    chat.take("a")
    params = asked(chat)[0][1]
    assert (params.temperature, params.stop, params.seed) == (0.5, ("X", "Y"), None)
    with pytest.raises(InvalidRequestError, match="between 0 and 2"):
        chat.take("/set temperature 3")
    with pytest.raises(InvalidRequestError, match="max_tokens is 'banana'; it must be a whole number or none"):
        chat.take("/set max_tokens banana")
    with pytest.raises(InvalidRequestError, match="did you mean temperature"):
        chat.take("/set temprature 1")
    with pytest.raises(InvalidRequestError, match="a number"):
        chat.take("/set temperature [[[")
    assert chat.params == params
    chat.take("/set")
    assert "temperature 0.5" in capsys.readouterr().out


def test_what_fails_leaves_the_conversation_as_it_was(chat: Chat) -> None:
    chat.take("a")
    with pytest.raises(InvalidRequestError, match="/new forgets"):
        chat.take("too long")
    with pytest.raises(EngineDeadError):
        chat.take("die")
    with pytest.raises(InvalidRequestError, match="did you mean /retry"):
        chat.take("/rety")
    assert said(chat) == ["a", "<a>"]


def test_a_stopped_answer_stays_in_the_conversation(chat: Chat, capsys: pytest.CaptureFixture[str]) -> None:
    chat.take("interrupt")
    assert said(chat) == ["interrupt", "half"]
    assert capsys.readouterr().out == "half\n"


def test_ctrl_c_before_an_answer_begins_ends_neither_program_nor_conversation(
    chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines(monkeypatch, "a\ninterrupt early\nb\n")
    converse(chat)
    assert said(chat) == ["a", "<a>", "b", "<b>"]


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("variables", "styled"), [({"TERM": "xterm"}, True), ({"TERM": "dumb"}, False), ({"NO_COLOR": "1"}, False)]
)
def test_a_terminal_gets_styles_if_it_wants_them_and_no_control_characters_of_the_model(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], styled: bool
) -> None:
    for name in ("TERM", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", Screen())
    pieces = [Piece("hm", is_reasoning=True), Piece("a\x1b[2J\x9b\x07\n\tö")]
    assert show(piece for piece in pieces) == "a\x1b[2J\x9b\x07\n\tö"
    out = sys.stdout.getvalue()
    assert out.endswith("a\ufffd[2J\ufffd\ufffd\n\tö\n")
    assert out.removesuffix("a\ufffd[2J\ufffd\ufffd\n\tö\n") == ("\x1b[2mhm\x1b[0m\n\n" if styled else "hm\n\n")


def test_reasoning_is_shown_and_not_remembered(chat: Chat, capsys: pytest.CaptureFixture[str]) -> None:
    chat.take("think")
    assert said(chat) == ["think", "<think>"]
    assert capsys.readouterr().out == "hm\n\n<think>\n"


def test_a_message_may_begin_with_a_slash(chat: Chat) -> None:
    chat.take("//new")
    assert said(chat) == ["/new", "</new>"]


def test_a_saved_conversation_can_be_loaded(chat: Chat, tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    chat.take("/system be")
    chat.take("wörld\n2")
    chat.take(f"/save {path}")
    other = Chat(Echo(), SamplingParams())
    other.take(f"/load {path}")
    assert (other.system, other.messages) == ("be", chat.messages)
    with pytest.raises(ConfigError, match="File exists"):
        chat.take(f"/save {path}")
    for content in ("{", "[1]", '[{"role": 1}]', '{"role": "user"}', "[" * 5000):
        path.write_text(content)
        with pytest.raises(ConfigError, match="is no conversation"):
            other.take(f"/load {path}")
    with pytest.raises(ConfigError, match="cannot be read"):
        other.take("/load /nowhere/x")
    assert other.messages == chat.messages


def test_help_names_every_command(chat: Chat, capsys: pytest.CaptureFixture[str]) -> None:
    chat.take("/help")
    out = capsys.readouterr().out
    assert all(f"/{name} " in out for name in COMMANDS)


def lines(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


@pytest.mark.parametrize(
    ("typed", "messages"),
    [
        ("one\ntwo\n", ["one", "two"]),
        ("one\\\ntwo\n", ["one\ntwo"]),
        ("a path\\\\\n", ["a path\\\\"]),
        ('"""one\n\n  two\n"""\nthree\n', ["one\n\n  two", "three"]),
        ('"""one"""\n', ["one"]),
        ('"""one\ntwo', ["one\ntwo"]),
        ("one\\", ["one"]),
    ],
)
def test_a_message_may_have_many_lines(monkeypatch: pytest.MonkeyPatch, typed: str, messages: list[str]) -> None:
    lines(monkeypatch, typed)
    reader = make_line_reader([])
    assert [reader.read() for _ in messages] == messages
    with pytest.raises(EOFError):
        reader.read()


def test_exit_ends_and_a_failure_does_not(
    chat: Chat, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines(monkeypatch, "too long\n/nonsense\n\na\n/exit\nb\n")
    converse(chat)
    captured = capsys.readouterr()
    assert captured.err.count("octavo: ") == 2
    assert said(chat) == ["a", "<a>"]


@pytest.fixture(scope="module")
def slow_server() -> Iterator[ServerProcess]:
    yield from fake_server(0.02)


READY = "\x1b[?2004h"  # pasted text is marked from here on: the prompt is there


class Terminal:
    """`octavo chat` on a terminal of its own."""

    def __init__(self, url: str, state: Path) -> None:
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        environment = {**ENVIRONMENT, "XDG_STATE_HOME": str(state), "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
        command = [sys.executable, "-m", "octavo", "chat", "--url", url, "--max-tokens", "200"]
        self.popen = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
        )
        os.close(theirs)
        self._fd = ours
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def wait_for(self, text: str, seconds: float = 20) -> None:
        end = time.monotonic() + seconds
        while text not in self.seen:
            assert time.monotonic() < end, f"no {text!r} in {self.seen!r}"
            ready, _, _ = select.select([self._fd], [], [], 0.2)
            if not ready:
                continue
            try:
                self.seen += os.read(self._fd, 4096).decode("utf-8", "replace")
            except OSError:  # as Linux reports the end of a terminal
                break
        assert text in self.seen
        self.seen = self.seen.partition(text)[2]


def test_on_a_terminal_ctrl_c_stops_the_answer_and_not_the_program(slow_server: ServerProcess, tmp_path: Path) -> None:
    terminal = Terminal(slow_server.url, tmp_path)
    terminal.wait_for("ctrl-D ends")
    terminal.wait_for(READY)
    terminal.type("first\x1b\rsecond\r")  # Alt-Enter between
    terminal.wait_for("user:first")
    terminal.popen.send_signal(signal.SIGINT)
    terminal.wait_for(READY)
    terminal.type("/history\r")
    terminal.wait_for("user: first")
    terminal.wait_for("second")
    terminal.wait_for(READY)
    terminal.type("\x04")
    assert terminal.popen.wait(10) == 0
    history = (tmp_path / "octavo" / "chat_history").read_text()
    assert "first\n+second" in history
    assert (tmp_path / "octavo" / "chat_history").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("history", ["folder", "damaged"])
def test_a_history_that_cannot_be_kept_ends_no_conversation(
    slow_server: ServerProcess, tmp_path: Path, history: str
) -> None:
    path = tmp_path / "octavo" / "chat_history"
    path.parent.mkdir()
    match history:
        case "folder":
            path.mkdir()
        case "damaged":
            path.write_bytes(b"\xff\x00+\n# \n+\xfe\n\n+")
    terminal = Terminal(slow_server.url, tmp_path)
    terminal.wait_for(READY)
    terminal.type("\x1b[200~one\ntwo\x1b[201~\r")  # pasted
    terminal.wait_for("user:one")
    terminal.wait_for(READY)
    terminal.type("/exit\r")
    assert terminal.popen.wait(10) == 0


def test_quick_answers_one_message(slow_server: ServerProcess) -> None:
    command = [sys.executable, "-m", "octavo", "chat", "--url", slow_server.url, "--quick", "hi", "--max-tokens", "7"]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
    assert (done.returncode, done.stdout) == (0, "user:hi\n")


def test_settings_reach_a_server_and_reasoning_comes_apart() -> None:
    flags = ["--reasoning-parser", "qwen3"]
    for process in fake_server(0.0, 0, flags):
        text = "!say <think>hm</think>well!end"
        command = [sys.executable, "-m", "octavo", "chat", "--url", process.url, "--quick", text]
        done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
        assert done.stdout.split() == ["hm", "well"]


def remote_answer(body: bytes) -> list[Piece]:
    """What comes of a server whose reply has this body and ends with the connection."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with listener, listener.accept()[0] as connection:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n" + body)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65536):  # closed with something unread, it would be reset
                pass

    threading.Thread(target=serve, daemon=True).start()
    model = RemoteModel(f"http://127.0.0.1:{listener.getsockname()[1]}", "key", "name")
    return list(model.stream_chat([{"role": "user", "content": "hi"}], SamplingParams()))


CHUNK = b'data: {"error": null, "choices": [{"delta": {"content": "a"}}]}\r\n\r\n'


def test_streams_of_other_servers_are_understood() -> None:
    assert remote_answer(b": ping\n\nevent: message\n" + CHUNK + b"data:[DONE]\n\n") == [Piece("a")]
    empty = b'data: {"choices": null}\n\ndata: {"choices": [{"delta": null}]}\n\n'
    last = b'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\n'
    assert remote_answer(empty + CHUNK + last) == [Piece("a")]
    with pytest.raises(EngineDeadError, match="broke the answer off"):
        remote_answer(CHUNK)
    with pytest.raises(EngineDeadError, match="overloaded"):
        remote_answer(CHUNK + b'data: {"error": {"message": "overloaded"}}\n\n')
    with pytest.raises(ConfigError, match="not as an OpenAI-compatible server does"):
        remote_answer(b"data: [1]\n\n")
    with pytest.raises(ConfigError, match="look for a line break"):
        RemoteModel("http://127.0.0.1", "key\n")


def test_the_messages_are_json_a_client_could_send(chat: Chat, tmp_path: Path) -> None:
    chat.take("a")
    chat.take(f"/save {tmp_path / 'x'}")
    assert json.loads((tmp_path / "x").read_text()) == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<a>"},
    ]
