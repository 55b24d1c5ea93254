from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.batch.asgi import post
from octavo.cli.batch.files import MAX_LINE_BYTES, Entry, Reply, ReplyFile, check_entries, read_entries
from octavo.cli.batch.run import MAX_ATTEMPTS, Counts, run_batch
from octavo.core.errors import ConfigError
from tests.server.harness import ENVIRONMENT, children_of

ROUTE = "/v1/completions"


def line(custom_id: str, **body: object) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": ROUTE, "body": {"prompt": custom_id, **body}})


def entries(*names: str) -> list[Entry]:
    return [Entry(name, ROUTE, {"prompt": name}) for name in names]


def replies(path: Path) -> dict[str, int]:
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    return {reply["custom_id"]: reply["response"]["status_code"] for reply in lines}


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def test_requests_are_read_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(f"{line('a', max_tokens=1)}\n\n  \n{line('b')}")
    assert check_entries(str(path)) == {"a", "b"}
    first, second = read_entries(str(path))
    assert first == Entry("a", ROUTE, {"prompt": "a", "max_tokens": 1})
    assert second.custom_id == "b"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 2: it is not JSON"),
        ("[" * 100_000, "line 2: it is"),
        ("[]", "line 2: it is no JSON object"),
        ("\ud800".encode("utf-8", "surrogatepass").decode("latin-1"), "line 2: it is not JSON"),
        (line("a"), "line 2: custom_id 'a' is that of line 1"),
        (line("x").replace('"x"', "5", 1), "custom_id is missing"),
        (line("x\ud800"), r"custom_id is 'x\ud800'; it must have printable"),
        (line("x").replace("POST", "GET"), "method is 'GET'; it must be POST"),
        (line("x").replace(ROUTE, "/v1/embeddings"), "url is '/v1/embeddings'; it must be one of /v1/chat"),
        (line("x", stream=True), "body.stream is set"),
        ('{"custom_id": "x", "method": "POST", "url": "/v1/completions", "body": 1}', "body is missing"),
    ],
)
def test_a_bad_line_is_named_before_anything_is_asked(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(f"{line('a')}\n{text}\n", encoding="latin-1")
    with pytest.raises(ConfigError) as caught:
        check_entries(str(path))
    assert message in str(caught.value)
    assert "has 1 bad lines" in str(caught.value)


def test_many_bad_lines_are_counted_and_some_shown(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("x\n" * 50)
    with pytest.raises(ConfigError, match=r"50 bad lines: line 1: .*line 5: .*; and 45 more$"):
        check_entries(str(path))
    with pytest.raises(ConfigError, match="cannot be read"):
        check_entries("/nowhere/x")
    path.write_text("\n \n")
    with pytest.raises(ConfigError, match="is empty: it must have a request a line"):
        check_entries(str(path))


def test_a_run_that_was_killed_goes_on_where_it_was(output: Path) -> None:
    names = {"a", "b", "c"}
    with ReplyFile(str(output), names) as file:
        file.append(*entries("a"), Reply(200, "r", {"text": "wörld"}))
        file.append(*entries("b"), Reply(503, "r", {}))
    with output.open("ab") as torn:
        torn.write(b'{"id": "x", "custom_id": "c", "respo')
    with ReplyFile(str(output), names) as file:
        assert file.done == {"a"}
        file.append(*entries("c"), Reply(400, "r", {}))
    assert replies(output) == {"a": 200, "c": 400}
    assert "wörld" in output.read_text()
    assert [path.name for path in output.parent.iterdir()] == [output.name]


def test_replies_of_another_batch_are_not_touched(output: Path) -> None:
    for content in ("precious\n", '{"custom_id": "z", "response": {"status_code": 200}}\n', '{"a": 1}\n', "[]\n"):
        output.write_text(content)
        with pytest.raises(ConfigError, match="name another output"):
            ReplyFile(str(output), {"a"})
        assert output.read_text() == content


def test_two_runs_do_not_write_one_file(output: Path) -> None:
    with ReplyFile(str(output), {"a"}), pytest.raises(ConfigError, match="another run writes"):
        ReplyFile(str(output), {"a"})
    with pytest.raises(ConfigError, match="cannot be written"):
        ReplyFile("/nowhere/x", {"a"})


class Answers:
    """Answers with the statuses it is told, request by request, then 200; knows how many were asked at once."""

    def __init__(self, **statuses: list[int]) -> None:
        self.statuses = statuses
        self.asked: list[str] = []
        self.most = self._running = 0

    async def __call__(self, entry: Entry) -> Reply:
        self.asked.append(entry.custom_id)
        self._running += 1
        self.most = max(self.most, self._running)
        await asyncio.sleep(0)
        self._running -= 1
        rest = self.statuses.get(entry.custom_id, [])
        return Reply(rest.pop(0) if rest else 200, "r", {})


def run(
    answers: Callable[[Entry], Awaitable[Reply]], output: Path, names: str, max_concurrency: int = 3
) -> tuple[Counts, list[float]]:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    with ReplyFile(str(output), set(names)) as file:
        counts = asyncio.run(
            run_batch(
                lambda: entries(*names),
                answers,
                file,
                max_concurrency=max_concurrency,
                on_reply=lambda: None,
                sleep=sleep,
            )
        )
    return counts, pauses


def test_every_request_is_asked_once_and_not_too_many_together(output: Path) -> None:
    answers = Answers(b=[400])
    counts, pauses = run(answers, output, "abcdefgh")
    assert (counts, pauses) == (Counts(answered=7, refused=1), [])
    assert sorted(answers.asked) == list("abcdefgh")
    assert answers.most == 3
    assert run(answers, output, "abcdefghi") == (Counts(answered=1), [])
    assert answers.asked[-1] == "i"


def test_a_server_error_is_asked_again_and_at_last_written(output: Path) -> None:
    counts, pauses = run(Answers(a=[503, 500], b=[500] * 99), output, "ab", max_concurrency=1)
    assert counts == Counts(answered=1, failed=1)
    assert pauses == [1, 2, 4, 8]
    assert replies(output) == {"a": 200, "b": 500}
    answers = Answers()
    assert run(answers, output, "ab")[0] == Counts(answered=1)
    assert answers.asked == ["b"]
    assert len(pauses) == MAX_ATTEMPTS - 1


def test_a_request_that_kills_the_engine_each_time_takes_no_other_with_it(output: Path) -> None:
    dead = False

    async def ask(entry: Entry) -> Reply:
        """All that run when the engine dies fail."""
        nonlocal dead
        dead = dead or entry.custom_id == "x"
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        status = 500 if dead else 200
        await asyncio.sleep(0)
        dead = False
        return Reply(status, "r", {})

    counts, _ = run(ask, output, "abcdexfghij", max_concurrency=20)
    assert counts == Counts(answered=10, failed=1)
    assert replies(output)["x"] == 500


def test_a_full_disk_ends_the_run_and_says_so(output: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, hard))
    try:
        with pytest.raises(ConfigError, match="File too large"):
            run(Answers(), output, "ab")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert output.read_bytes().endswith(b"\n")
    answers = Answers()
    run(answers, output, "ab")
    assert replies(output) == {"a": 200, "b": 200}
    assert answers.asked == ["b"]


def test_input_and_output_are_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no regular file"):
        ReplyFile("/dev/full", {"a"})
    with pytest.raises(ConfigError, match="no regular file, and it is read more than once"):
        check_entries("/dev/null")
    path = tmp_path / "in.jsonl"
    with path.open("wb") as file:
        file.write(f"{line('a')}\n".encode())
        file.truncate(MAX_LINE_BYTES + 1000)
    with pytest.raises(ConfigError, match="line 2 is longer than"):
        check_entries(str(path))


def test_what_is_dropped_from_an_output_leaves_its_place_and_its_rights(tmp_path: Path, output: Path) -> None:
    real = tmp_path / "real.jsonl"
    output.symlink_to(real)
    run(Answers(a=[500] * 99), output, "ab")
    real.chmod(0o640)
    assert run(Answers(), output, "abc")[0] == Counts(answered=2)
    assert output.is_symlink()
    assert replies(real) == dict.fromkeys("abc", 200)
    assert real.stat().st_mode & 0o777 == 0o640


def test_an_output_that_cannot_be_mended_says_so(output: Path) -> None:
    run(Answers(b=[500] * 99), output, "ab")
    before = output.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        with pytest.raises(ConfigError, match="File too large"):
            ReplyFile(str(output), {"a", "b"})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert output.read_bytes() == before
    assert os.listdir(output.parent) == [output.name]


def test_a_long_output_is_read_in_large_pieces(output: Path) -> None:
    reply = {"custom_id": "a", "response": {"status_code": 200, "body": "w" * 1000}}
    output.write_text(f"{json.dumps(reply)}\n" * 2000)
    began = time.process_time()
    ReplyFile(str(output), {"a"}).close()
    assert time.process_time() - began < 0.5  # a system call for each byte takes seconds


def test_a_routes_unexpected_error_is_a_reply() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 500, "headers": [(b"x-request-id", b"r1")]})
        await send({"type": "http.response.body", "body": b"{}"})
        raise KeyError("as Starlette does it")

    assert asyncio.run(post(app, *entries("a"))) == Reply(500, "r1", {})


def start(source: Path, output: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "octavo", "run-batch", "-i", str(source), "-o", str(output)]
    flags = ["--max-concurrency", "4", "--max-model-len", "512", "--kv-cache-memory-bytes", "64M"]
    return subprocess.Popen(
        [*command, *flags], env=ENVIRONMENT, text=True, stderr=subprocess.PIPE, stdout=subprocess.PIPE
    )


def wait_for_lines(output: Path, count: int, popen: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 60
    while not output.exists() or output.read_bytes().count(b"\n") < count:
        assert popen.poll() is None, popen.communicate()
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_batch_survives_kills_of_the_run_and_of_its_engine(tmp_path: Path, output: Path) -> None:
    source = tmp_path / "in.jsonl"
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 10, "temperature": 0}
    lines = [line(str(i), max_tokens=10, seed=i) for i in range(60)]
    lines.append(line("chat").replace(ROUTE, "/v1/chat/completions").replace('{"prompt": "chat"}', json.dumps(chat)))
    lines.append(line("refused", temperature=9))
    source.write_text("\n".join(lines))

    killed = start(source, output)
    wait_for_lines(output, 8, killed)
    killed.kill()
    killed.communicate()

    second = start(source, output)
    wait_for_lines(output, 20, second)
    (engine,) = children_of(second.pid)
    os.kill(engine, signal.SIGKILL)
    out, err = second.communicate(timeout=120)
    assert second.returncode == 0, err
    assert "1 refused, 0 failed" in out
    assert replies(output) == {str(i): 200 for i in range(60)} | {"chat": 200, "refused": 400}
    assert len(output.read_text().splitlines()) == 62

    third = start(source, output)
    out, _ = third.communicate(timeout=60)
    assert (third.returncode, "all 62 requests" in out) == (0, True)


def test_ctrl_c_ends_a_batch_and_says_how_to_go_on(tmp_path: Path, output: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join(line(str(i), max_tokens=100, ignore_eos=True) for i in range(60)))
    run_ = start(source, output)
    wait_for_lines(output, 1, run_)
    run_.send_signal(signal.SIGINT)
    _, err = run_.communicate(timeout=20)
    assert run_.returncode == 130
    assert "of 60 requests have their reply; run it again to go on" in err
    assert "Traceback" not in err
