from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.cli.bench import offline
from octavo.cli.bench.http_client import Client
from octavo.cli.bench.report import percentile, write_json
from octavo.cli.bench.workload import Lengths, arrival_times, dataset_samples, ramp, random_samples
from octavo.cli.main import main
from octavo.core.clock import VirtualClock
from octavo.core.config import EngineConfig
from octavo.core.errors import ConfigError
from octavo.llm import LLM
from tests.server.fake_engine import FakeEngine, frontend
from tests.server.harness import ServerProcess, fake_server, metric


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    yield from fake_server(0.001)


def bench(server: ServerProcess, tmp_path: Path, *flags: str) -> dict[str, object]:
    """The JSON of a benchmark of the server; prompts are bytes there, so they must be short."""
    command = ["bench", "serve", "--base-url", server.url, "--save-detailed", "--result-dir", str(tmp_path)]
    short = ["--random-input-len", "200", "--random-output-len", "8", "--result-filename", "r.json"]
    assert main([*command, *short, *flags]) == 0
    result = json.loads((tmp_path / "r.json").read_text())
    assert isinstance(result, dict)
    return result


def test_a_server_is_loaded_and_its_answers_are_counted(
    server: ServerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = metric(server, "generation_tokens_total")
    result = bench(server, tmp_path, "--num-prompts", "30", "--max-concurrency", "4", "--metric-percentiles", "50,99")
    assert (result["completed"], result["failed"], result["model_id"]) == (30, 0, "echo")
    assert result["output_lens"] == [8] * 30
    assert result["total_output_tokens"] == 240
    # Beside the load: two questions that tell words from tokens, and a warm-up.
    assert metric(server, "generation_tokens_total") - before == 240 + 1 + 1 + 8
    lengths = result["input_lens"]
    assert isinstance(lengths, list)
    assert statistics.mean(lengths) == pytest.approx(200, rel=0.1)
    for name in ("mean_ttft_ms", "p50_tpot_ms", "p99_itl_ms"):
        value = result[name]
        assert isinstance(value, float)
        assert value > 0
    table = capsys.readouterr().out
    assert "30 answered, 0 failed" in table
    assert "time to first token" in table


def test_chat_with_shared_prefixes_and_a_rate(server: ServerProcess, tmp_path: Path) -> None:
    flags = ["--backend", "openai-chat", "--dataset-name", "prefix_repetition", "--prefix-repetition-num-prefixes", "2"]
    lengths = ["--prefix-repetition-prefix-len", "100", "--prefix-repetition-suffix-len", "20"]
    rate = ["--prefix-repetition-output-len", "50", "--num-prompts", "10", "--request-rate", "100", "--seed", "3"]
    result = bench(server, tmp_path, *flags, *lengths, *rate, "--ignore-eos", "--goodput", "e2el:60000", "ttft:0")
    assert result["completed"] == 10
    assert result["request_goodput"] == 0
    starts = result["start_times"]
    assert isinstance(starts, list)
    assert starts == sorted(starts)
    assert starts[-1] - starts[0] == pytest.approx(arrival_times(10, 100, 1.0, random.Random(4))[-1], abs=0.1)
    texts = result["generated_texts"]
    assert isinstance(texts, list)
    assert len({text[:40] for text in texts}) == 2  # the echo begins with the prefix


def test_refusals_are_failures_with_the_servers_words(
    server: ServerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "good", "output_tokens": 3}\n\n' + json.dumps({"prompt": "x" * 2000}) + "\n")
    flags = ["--dataset-name", "custom", "--dataset-path", str(path), "--num-prompts", "4", "--num-warmups", "0"]
    result = bench(server, tmp_path, *flags)
    assert (result["completed"], result["failed"]) == (2, 2)
    assert "400: prompt has 2,000 tokens" in capsys.readouterr().err
    assert main(["bench", "serve", "--base-url", server.url, "--model", "other", *flags]) == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--base-url", "localhost"], "--base-url is 'localhost'"),
        (["--base-url", "http://127.0.0.1:9", "--ready-check-timeout-sec", "0"], "is the server there?"),
        (["--num-prompts", "0"], "--num-prompts is 0"),
        (["--request-rate", "0"], "greater than 0"),
        (["--request-rate", "nan"], "greater than 0"),
        (["--dataset-name", "custom"], "--dataset-path goes with"),
        (["--goodput", "speed:1"], "it must look like ttft:200"),
        (["--header", "x"], "NAME=VALUE"),
        (["--metadata", "x"], "--metadata has 'x'; it must look like NAME=VALUE"),
        (["--metadata", "duration=1"], "--metadata sets 'duration', which is a figure"),
        (["--label", "a/b"], "--label is 'a/b'"),
        (["--logprobs", "-1"], "--logprobs is -1"),
        (["--ramp-up-end-rps", "5"], "need --ramp-up-strategy"),
        (["--ramp-up-strategy", "linear", "--ramp-up-end-rps", "5"], "needs --ramp-up-start-rps and"),
        (["--ramp-up-strategy", "linear", "--request-rate", "5"], "leave --request-rate out"),
        (["--percentile-metrics", "ttft,speed"], "of ttft, tpot, itl, e2el"),
        (["--metric-percentiles", "101"], "between 0 and 100"),
        (["--num-warmups", "-1"], "--num-warmups is -1; it must be at least 0"),
        (["--output-len", "0"], "--output-len is 0; it must be at least 1"),
        (["--prefix-repetition-suffix-len", "-3"], "must be at least 1"),
        (["--endpoint", "v1/completions"], "must look like /v1/completions"),
        (["--api-key", "a\nb"], "the API key has characters"),
        (["--save-result", "--result-dir", "/dev/null/x"], "the folder /dev/null/x cannot be made"),
    ],
)
def test_wrong_flags_say_what_is_wrong(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", *flags]) == 2
    assert message in capsys.readouterr().err


def test_what_a_run_is_told_of_itself_is_in_its_result(
    server: ServerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    how = "--num-prompts 3 --top-p 0.9 --top-k 5 --min-p 0.1 --presence-penalty 1 --logprobs 1 --temperature 0"
    ramp = "--ramp-up-strategy exponential --ramp-up-start-rps 50 --ramp-up-end-rps 200"
    name = "--model org/name --served-model-name echo --label mine --metadata version=0.1 cpu=a=b --tokenizer org/name"
    result = bench(server, tmp_path, *f"{how} {ramp} {name} --trust-remote-code".split())
    assert (result["completed"], result["label"], result["model_id"]) == (3, "mine", "org/name")
    assert (result["version"], result["cpu"], result["ramp_up_end_rps"]) == ("0.1", "a=b", 200)
    assert capsys.readouterr().err.count("no tokenizer is loaded") == 2


@pytest.mark.parametrize("flag", [["--profile"], ["--plot-timeline"], ["--hf-name", "x"], ["--insecure"]])
def test_flags_of_vllms_benchmark_that_are_not_here_are_refused_with_a_way_out(
    flag: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "serve", *flag])
    assert ended.value.code == 2
    assert f"{' '.join(flag)} is not supported: " in capsys.readouterr().err


def test_a_rate_may_grow() -> None:
    assert ramp(3, 1, 4, "linear") == [1, 2.5, 4]
    assert ramp(3, 1, 4, "exponential") == [1, 2, 4]
    assert ramp(1, 5, 9, "linear") == [5]
    assert arrival_times(3, ramp(3, 1, 4, "exponential"), math.inf, random.Random(0)) == [0, 1, 1.5]


def test_a_misspelt_flag_of_a_benchmark_suggests_the_right_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "serve", "--num-promts", "3"])
    assert "did you mean --num-prompts?" in capsys.readouterr().err


def answer_with(*pieces: bytes) -> int:
    """The port of a server that answers one connection with these bytes and closes it."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with listener, listener.accept()[0] as connection:
            connection.recv(65536)
            for piece in pieces:
                connection.sendall(piece)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65536):  # closed with something unread, it would be reset
                pass

    threading.Thread(target=serve, daemon=True).start()
    return int(listener.getsockname()[1])


HEAD = b"HTTP/1.1 200 OK\r\n\r\n"


@pytest.mark.parametrize(
    ("pieces", "error", "text"),
    [
        (
            (HEAD + b'data: {"choices": [{"text": "a"}]}\r\n', b'\r\ndata: {"usage', b'": {}}\n\ndata: [DONE]\n\n'),
            "",
            "a",
        ),
        ((HEAD + b'data: {"choices": [{"text": "a"}]}\n\n',), "without [DONE]", "a"),
        ((HEAD + b'data: {"choices": [{"text": "a"}]}\n\ndata: [DONE]\n',), "", "a"),
        (
            (HEAD + b': ping\n\ndata: {"error": null, "choices": [{"text": "a", "finish_reason": "stop"}]}\n\n',),
            "",
            "a",
        ),
        ((HEAD + b'data: {"error": {"message": "broke"}}\n\ndata: [DONE]\n\n',), "broke", ""),
        ((HEAD + b"data: nonsense\n\n",), "no event of a stream: nonsense", ""),
        ((b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nda",), "closed the connection", ""),
        ((b"garbage\r\n\r\n",), "HttpParser", ""),
        ((b"HTTP/1.1 500 Oh\r\nContent-Length: 2\r\n\r\nno",), "500: no", ""),
        ((), "closed the connection", ""),
    ],
)
def test_whatever_a_server_says_becomes_an_answer(pieces: tuple[bytes, ...], error: str, text: str) -> None:
    client = Client(f"http://127.0.0.1:{answer_with(*pieces)}/v1")
    answer = asyncio.run(client.stream("/v1/completions", {}))
    assert error in (answer.error or "")
    assert (answer.error is None) == (error == "")
    assert answer.text == text
    assert answer.end >= answer.start


def test_a_kept_connection_that_the_server_closed_is_made_again() -> None:
    async def twice() -> list[int]:
        head = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
        connections = 0

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal connections
            connections += 1
            await reader.readuntil(b"\r\n\r\n")
            writer.write(head)
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as listener:
            client = Client(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}")
            for _ in range(2):
                assert await client.get("/v1/models") == {}
                await asyncio.sleep(0.05)
            client.close()
        return [connections]

    assert asyncio.run(twice()) == [2]


async def serve_slowly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """The first chunk after FIRST seconds, five more GAP apart, the end after TAIL; closes each connection."""
    head = await reader.readuntil(b"\r\n\r\n")
    body = b'{"data": [{"id": "slow"}]}' if head.startswith(b"GET") else b""
    writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + body)
    if not body:
        writer.write(b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\r\n\r\n')
        for pause in (FIRST, *[GAP] * 5):
            await asyncio.sleep(pause)
            writer.write(b'data: {"choices": [{"delta": {"content": "a"}, "finish_reason": null}]}\r\n\r\n')
        await asyncio.sleep(TAIL)
        usage = b"" if b"x-no-usage" in head else b', "usage": {"prompt_tokens": 9, "completion_tokens": 6}'
        writer.write(b'data: {"choices": [{"delta": {}, "finish_reason": "length"}]%b}\r\n\r\n' % usage)
        writer.write(b"data: [DONE]\r\n\r\n")
    writer.close()


FIRST, GAP, TAIL = 0.15, 0.02, 0.3


@pytest.mark.parametrize("flags", [[], ["--header", "x-no-usage=ä"]])
def test_times_are_those_of_the_server(tmp_path: Path, flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    ports: list[int] = []
    ready, end = threading.Event(), threading.Event()

    async def serve() -> None:
        async with await asyncio.start_server(serve_slowly, "127.0.0.1", 0) as listener:
            ports.append(listener.sockets[0].getsockname()[1])
            ready.set()
            await asyncio.to_thread(end.wait)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    ready.wait()
    (tmp_path / "p").write_text('{"prompt": "good", "output_tokens": 6}')
    command = ["bench", "serve", "--backend", "openai-chat", "--port", str(ports[0]), "--num-prompts", "10"]
    dataset = ["--dataset-name", "custom", "--dataset-path", str(tmp_path / "p"), "--max-concurrency", "5"]
    result_flags = ["--save-result", "--result-dir", str(tmp_path / "new"), "--result-filename", "r.json"]
    figures = ["--percentile-metrics", "ttft,tpot,itl,e2el", "--goodput", "tpot:19", "e2el:60000"]
    try:
        assert main([*command, *dataset, *result_flags, *figures, *flags]) == 0
    finally:
        end.set()
        thread.join()
    result = json.loads((tmp_path / "new" / "r.json").read_text())
    for name, seconds in (("ttft", FIRST), ("tpot", GAP), ("itl", GAP), ("e2el", FIRST + 5 * GAP + TAIL)):
        assert 990 * seconds <= result[f"median_{name}_ms"] < 3000 * seconds, name
    assert result["request_goodput"] == 0
    assert result["duration"] >= 2 * (FIRST + 5 * GAP + TAIL)
    assert result["total_output_tokens"] == 60
    assert result["total_input_tokens"] == (0 if flags else 90)
    assert ("10 answers came without usage" in capsys.readouterr().err) == bool(flags)


def test_a_server_that_refuses_is_not_waited_for(server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    refusal = b"HTTP/1.1 401 No\r\nContent-Length: 7\r\n\r\nno key!"
    began = time.monotonic()
    assert main(["bench", "serve", "--port", str(answer_with(refusal))]) == 2
    assert "/v1/models is answered with 401: no key!" in capsys.readouterr().err
    assert main(["bench", "serve", "--base-url", f"{server.url}/elsewhere"]) == 2
    assert time.monotonic() - began < 10  # it is a minute for one that does not answer yet


def test_lengths_keep_to_their_distribution() -> None:
    generator = random.Random(1)
    uniform = [Lengths(100, 0.5).draw(generator) for _ in range(4000)]
    assert (min(uniform), max(uniform)) == (50, 150)
    lognormal = [Lengths(100, 0.5, "lognormal").draw(generator) for _ in range(20000)]
    assert statistics.mean(lognormal) == pytest.approx(100, rel=0.03)
    assert statistics.stdev(map(math.log, lognormal)) == pytest.approx(0.5, rel=0.05)
    assert {Lengths(7).draw(generator) for _ in range(10)} == {7}
    assert Lengths(1, 1.0).draw(generator) >= 1


def test_arrivals_keep_to_their_rate_and_burstiness() -> None:
    def gaps(burstiness: float) -> list[float]:
        times = arrival_times(20000, 50.0, burstiness, random.Random(1))
        return [b - a for a, b in itertools.pairwise(times)]

    for burstiness in (0.25, 1.0, 4.0):
        values = gaps(burstiness)
        assert statistics.mean(values) == pytest.approx(1 / 50, rel=0.05)
        variation = statistics.stdev(values) / statistics.mean(values)
        assert variation == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)
    assert arrival_times(3, 50.0, math.inf, random.Random(1)) == [0.0, 0.02, 0.04]
    assert arrival_times(3, math.inf, 1.0, random.Random(1)) == [0.0, 0.0, 0.0]


def test_the_same_seed_asks_the_same() -> None:
    def ask(seed: int) -> object:
        return random_samples(5, Lengths(9, 0.5), Lengths(4, 0.5), random.Random(seed), prefix=3, num_prefixes=2)

    assert ask(1) == ask(1) != ask(2)


def test_sharegpt_conversations_become_samples(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    turns = [{"value": "question"}, {"value": "answer" * 10}, {"value": "more"}]
    path.write_text(json.dumps([{"conversations": turns}, {"conversations": turns[:1]}, {"other": 1}, 5]))
    (sample, again) = dataset_samples(str(path), 2, None, random.Random(0))
    assert sample == again
    assert (sample.prompt, sample.output_tokens) == ("question", 15)
    for content in ("[]", "[1", '{"prompt": 1}', '{"prompt": "a", "output_tokens": 0}', "", "[" * 100000):
        path.write_text(content)
        with pytest.raises(ConfigError, match=r"s\.json"):
            dataset_samples(str(path), 2, None, random.Random(0))
    with pytest.raises(ConfigError, match="cannot be read"):
        dataset_samples("/nowhere", 1, None, random.Random(0))


def test_percentiles_lie_between_values() -> None:
    assert [percentile([1, 2, 3, 4], p) for p in (0, 50, 100)] == [1, 2.5, 4]
    assert math.isnan(percentile([], 50))


def test_json_has_neither_nan_nor_infinity(tmp_path: Path) -> None:
    write_json(str(tmp_path / "x"), {"a": math.nan, "b": [math.inf, 1], "c": {"d": 2.5}})
    assert json.loads((tmp_path / "x").read_text()) == {"a": None, "b": ["inf", 1], "c": {"d": 2.5}}
    with pytest.raises(ConfigError, match="cannot be written"):
        write_json("/nowhere/x", {})


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    engine = FakeEngine(EngineConfig("echo", max_model_len=64))
    llm = LLM.over(engine, frontend(engine.info), VirtualClock())
    monkeypatch.setattr(offline, "_load", lambda args: llm)
    return engine


def test_latency_times_batches_of_new_prompts(
    engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--input-len", "8", "--output-len", "4", "--batch-size", "3", "--num-iters", "5"]
    assert main(["bench", "latency", *flags, "--output-json", str(tmp_path / "l")]) == 0
    result = json.loads((tmp_path / "l").read_text())
    assert len(result["latencies"]) == 5
    assert result["percentiles"]["50"] == sorted(result["latencies"])[2]
    assert "mean latency" in capsys.readouterr().out
    assert engine.stats().num_steps == 7 * 4
    assert engine.closed


def test_throughput_counts_what_came_out(engine: FakeEngine, tmp_path: Path) -> None:
    flags = ["--num-prompts", "6", "--input-len", "8", "--output-len", "4", "--prefix-len", "5"]
    assert main(["bench", "throughput", *flags, "--output-json", str(tmp_path / "t")]) == 0
    result = json.loads((tmp_path / "t").read_text())
    assert (result["total_prompt_tokens"], result["total_output_tokens"]) == (6 * 13, 24)
    assert result["tokens_per_second"] == pytest.approx((78 + 24) / result["elapsed_time"])


def test_a_benchmark_longer_than_the_model_is_refused(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "latency", "--input-len", "60", "--output-len", "5"]) == 2
    assert "the model's length is 64" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "flags", "message"),
    [
        ("latency", ["--batch-size", "0"], "--batch-size is 0; it must be at least 1"),
        ("latency", ["--num-iters-warmup", "-1"], "--num-iters-warmup is -1; it must be at least 0"),
        ("throughput", ["--random-range-ratio", "nan"], "--random-range-ratio is nan"),
        ("throughput", ["--output-json", "/dev/null/x/y.json"], "the folder /dev/null/x cannot be made"),
    ],
)
def test_a_benchmark_that_cannot_be_is_refused_before_a_model_is_loaded(
    command: str, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", command, "/no/model", *flags]) == 2
    assert message in capsys.readouterr().err
