from __future__ import annotations

import argparse
import dataclasses
import http.server
import io
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from octavo.cli import chat, options, terminal
from octavo.cli.main import main
from octavo.cli.options import engine_config
from octavo.cli.parser import Parser
from octavo.cli.remote import RemoteModel
from octavo.cli.text_models import LocalModel
from octavo.cli.values import human_int
from octavo.core.clock import VirtualClock
from octavo.core.config import EngineConfig
from octavo.core.errors import ConfigError
from octavo.core.records import SamplingParams
from octavo.llm import LLM
from octavo.server.parsers import AnswerParsers
from octavo.server.sockets import listen
from tests.server.fake_engine import FakeEngine, frontend
from tests.server.harness import ServerProcess, fake_server

MODEL = __file__  # any file: nothing here loads it


def config_of(*flags: str) -> EngineConfig:
    parser = Parser(prog="octavo test")
    options.add_engine_flags(parser)
    return engine_config(parser.parse_args(flags))


def error_of(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What a command that must fail says."""
    try:
        code: object = main(argv)
    except SystemExit as error:
        code = error.code
    assert code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def test_every_engine_flag_reaches_the_configuration() -> None:
    expected = EngineConfig(
        model=MODEL,
        served_model_name="m",
        tokenizer=MODEL,
        download_dir="d",
        dtype="half",
        quantization="q4_k",
        hf_overrides={"a": {"b": 1}},
        generation_config="vllm",
        override_generation_config={"top_k": 5},
        max_model_len=4096,
        block_size=32,
        kv_cache_dtype="float16",
        activation_dtype="float32",
        isa="avx512",
        threads=2,
        max_num_batched_tokens=1000,
        max_num_seqs=8,
        max_logprobs=5,
        long_prefill_token_threshold=64,
        gpu_memory_utilization=0.5,
        kv_cache_memory_bytes=3 << 29,
        num_gpu_blocks_override=99,
        enable_prefix_caching=False,
        kv_cache_metrics=True,
        kv_cache_metrics_sample=0.5,
        seed=3,
    )
    default = EngineConfig()
    names = [field.name for field in dataclasses.fields(EngineConfig)]
    # Revisions go with hub names only, and are gone when the model has been found.
    assert [name for name in names if getattr(expected, name) == getattr(default, name)] == [
        "revision",
        "tokenizer_revision",
    ]
    found = config_of(
        *(MODEL, "--served-model-name=m", "--tokenizer", MODEL, "--download-dir=d", "--dtype=half", "-q", "q4_k"),
        *("--hf-overrides", '{"a": {"b": 1}}', "--generation-config=vllm"),
        *("--override-generation-config", '{"top_k": 5}', "--long-prefill-token-threshold=64"),
        *("--max-model-len=4K", "--block-size=32", "--kv-cache-dtype=float16"),
        *("--activation-dtype=float32", "--isa=avx512", "--threads=2", "--max-num-batched-tokens=1k"),
        *("--max-num-seqs=8", "--max-logprobs=5", "--gpu-memory-utilization=0.5", "--kv-cache-memory-bytes=1.5G"),
        *("--num-gpu-blocks-override=99", "--no-enable-prefix-caching", "--seed=3"),
        *("--kv-cache-metrics", "--kv-cache-metrics-sample=0.5"),
    )
    assert found == expected


def test_without_flags_the_configuration_has_its_own_defaults() -> None:
    assert config_of("--model", MODEL) == EngineConfig(model=MODEL, served_model_name=Path(MODEL).stem)


@pytest.mark.parametrize(
    ("flags", "parsers"),
    [
        ((), AnswerParsers()),
        (("--tool-call-parser=hermes",), AnswerParsers()),
        (("--enable-auto-tool-choice", "--tool-call-parser=mistral"), AnswerParsers(tools="mistral")),
        (("--reasoning-parser=qwen3",), AnswerParsers(reasoning="qwen3")),
    ],
)
def test_parsers_of_answers_are_chosen_by_vllms_flags(flags: tuple[str, ...], parsers: AnswerParsers) -> None:
    parser = Parser(prog="octavo test")
    options.add_answer_flags(parser.add_argument_group("server"))
    assert options.answer_parsers(parser.parse_args(flags)) == parsers


def test_a_model_may_have_several_names_in_the_api() -> None:
    config = config_of(MODEL, "--served-model-name", "a", "b")
    assert (config.served_model_name, config.served_names) == (("a", "b"), ("a", "b"))
    assert EngineConfig(served_model_name=["a"]).served_model_name == "a"  # type: ignore[arg-type]
    for wrong in ([], [""], ["a", 5], 5):
        with pytest.raises(ConfigError, match="one or several names"):
            EngineConfig(served_model_name=wrong)  # type: ignore[arg-type]


def test_both_names_of_the_memory_share_mean_the_same() -> None:
    assert config_of(MODEL, "--memory-utilization=0.3").gpu_memory_utilization == 0.3


def test_the_instruction_set_may_come_from_the_environment_and_the_flag_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_ISA", "portable")
    assert config_of(MODEL).isa == "portable"
    assert config_of(MODEL, "--isa=avx512").isa == "avx512"


def test_two_different_models_are_refused() -> None:
    with pytest.raises(ConfigError, match="name one"):
        config_of("a.gguf", "--model", "b.gguf")


@pytest.mark.parametrize(
    ("text", "value"), [("4096", 4096), ("4k", 4000), ("4K", 4096), ("1.5k", 1500), ("2G", 2 << 30)]
)
def test_numbers_are_read_as_people_write_them(text: str, value: int) -> None:
    assert human_int(text) == value


@pytest.mark.parametrize("text", ["9" * 400, "1.2345", "-1", " ", "1e3", "9223372036854775808"])
def test_what_is_no_usable_number_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=text):
        human_int(text)


def test_a_misspelt_flag_suggests_the_right_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert "unknown argument --max-modle-len: did you mean --max-model-len?" in error_of(
        capsys, "serve", "--max-modle-len", "5"
    )
    assert "did you mean --temperature?" in error_of(capsys, "chat", "--temprature=5")
    assert "'octavo serve --help=all' lists" in error_of(capsys, "serve", "--xyzzy")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["serve", "--block-size", "12", MODEL], "--block-size is 12; it must be a power of two"),
        (["serve", "--threads", "two"], "--threads"),
        (["serve", "--threads", "100000", MODEL], "--threads is 100,000; it must be at most 1,024"),
        (["serve", "--seed", str(2**63), MODEL], "--seed is 9,223,372,036,854,775,808; it must be at most"),
        (["serve", "--max-num-seqs", "0", MODEL], "--max-num-seqs is 0; it must be at least 1"),
        (["serve", "--enable-auto-tool-choice"], "--enable-auto-tool-choice needs --tool-call-parser: name one of"),
        (["serve", "--tool-call-parser", "hermse"], "'hermes'"),
        (["serve", "--reasoning-parser", "qwen4"], "'qwen3'"),
        (["serve", "/dev/null"], "'/dev/null' is no regular file"),
        (["serve", "--max-model-len", "4X"], "4K (4096)"),
        (["serve", "--hf-overrides", "[1]"], "'[1]' is not a JSON object"),
        (["serve", "--hf-overrides", f'{{"a": {2**70}}}'], "it must be a plain JSON object: can't serialize ints"),
        (["serve", "--revision", "v1", MODEL], "--revision is 'v1', but"),
        (
            ["complete", "hi", "--generation-config", "/nowhere", MODEL],
            '"vllm", a file or a folder with generation_config',
        ),
        (["serve", "/nowhere/x.gguf"], "'/nowhere/x.gguf' does not exist"),
        (["complete", "hello", "/nowhere/x.gguf"], "does not exist"),
        (["complete", "hello", "--max-tokens", "3", "/nowhere/x.gguf"], "does not exist"),
        (["serve", MODEL, "--threads", "2", MODEL], "unknown argument"),
        (["complete", "hello", "--url", "localhost"], "--url is 'localhost'"),
        (["complete", "hello", "--url", "http://localhost:x"], "--url is 'http://localhost:x'"),
        (["complete", "hello", "--url", "http://[::1"], "--url is 'http://[::1'"),
        (["complete", "hello", MODEL, "--url", "http://127.0.0.1:9"], "leave out the model and engine flags"),
        (["chat", "--url", "http://127.0.0.1:9", "--threads", "1"], "leave out the model and engine flags"),
        (["complete", "hello", "--url", "http://127.0.0.1:9"], "is the server running there?"),
        (["complete", "hello", "--temperature", "3", "--url", "http://127.0.0.1:9"], "temperature is 3.0"),
        (["serve", "--kv-cache-dtype", "fp8", MODEL], "(8 bits and less are not supported yet)"),
        (["serve", "--kv-cache-memory-bytes", "-1G"], "'-1G' is not a number like 4096"),
        (["serve", "--served-model-name", "a", "org/b"], "took 'org/b' as one more name: name the model before"),
        (["serve", "--enable-lora", MODEL], "--enable-lora is not supported: adapters"),
        (["serve", "--tensor-parallel-sise", "1"], "did you mean --tensor-parallel-size?"),
        (["sevre"], "unknown command sevre: did you mean serve?"),
        (["zzzzzz"], "unknown command zzzzzz: the commands are serve, "),
        (
            [],
            "name a command: serve, chat, complete, pull, models, quantize, bench latency, ",
        ),
        (["--prot"], "unknown flag --prot (flags come behind the command)"),
        (["bench"], "name a bench command: latency, throughput, serve"),
        (["bench", "sevre"], "unknown bench command sevre: did you mean serve?"),
        (["--versoin"], "did you mean --version?"),
    ],
)
def test_a_wrong_command_is_one_line_and_code_2(
    capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    assert message in error_of(capsys, *argv)


def test_a_port_in_use_says_so() -> None:
    with listen("127.0.0.1", 0) as sock, pytest.raises(ConfigError, match="is in use"):
        listen("127.0.0.1", sock.getsockname()[1])


def test_an_address_that_is_not_ours_says_so() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1:0 \(Cannot assign requested address\)"):
        listen("192.0.2.1", 0)


def test_info_shows_the_machine_and_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    shown = capsys.readouterr().out
    assert "instruction sets" in shown
    assert ".gguf" in shown


def test_the_command_line_does_not_wait_for_heavy_imports() -> None:
    heavy = ("asyncio", "numpy", "starlette", "uvicorn", "prometheus_client", "tokenizers", "jinja2")
    code = f"import sys, octavo.cli.main; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_version_and_help_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == main(["--help"]) == 0
    for argv in (["serve", "--help"], ["chat", "-h"], ["info", "--help"]):
        with pytest.raises(SystemExit) as ended:
            main(argv)
        assert ended.value.code == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert "octavo serve --help" in shown.out


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    engine = FakeEngine(EngineConfig("echo", max_model_len=64))
    llm = LLM.over(engine, frontend(engine.info), VirtualClock())
    for module in (chat, terminal):
        monkeypatch.setattr(
            module,
            "text_model",
            lambda args: (LocalModel(llm), SamplingParams(temperature=0, max_tokens=args.max_tokens)),
        )
    return engine


def type_in(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def test_chat_answers_each_line_and_remembers_until_told_to_forget(
    offline: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    type_in(monkeypatch, "hi", "yo", "/new", "no")
    assert main(["chat", "--max-tokens", "8", "--system", "be"]) == 0
    assert capsys.readouterr().out == "system:b\n" * 3  # what comes from a pipe is neither greeted nor prompted
    assert offline.closed


def test_a_conversation_that_grew_too_long_says_what_to_do(
    offline: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    type_in(monkeypatch, "x" * 70, "hi")
    assert main(["chat", "--max-tokens", "5"]) == 0
    captured = capsys.readouterr()
    assert "/new forgets" in captured.err
    assert "user:" in captured.out  # the next one is answered


def test_complete_prints_the_continuation(offline: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["complete", "wörld ", "--max-tokens", "10"]) == 0
    assert capsys.readouterr().out == "wörld wö\n"


@pytest.fixture(scope="module")
def server() -> object:
    yield from fake_server()


def test_chat_and_complete_can_ask_a_running_server(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["complete", "wörld ", "--max-tokens", "10", "--url", server.url]) == 0
    assert capsys.readouterr().out == "wörld wö\n"
    type_in(monkeypatch, "hi", "x" * 2000)
    assert main(["chat", "--max-tokens", "7", "--url", f"{server.url}/v1"]) == 0
    captured = capsys.readouterr()
    assert "user:hi" in captured.out
    assert "the limit is 1,023" in captured.err


def test_text_that_is_no_utf8_is_asked_and_answered_all_the_same(server: ServerProcess) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "octavo", "chat", "--max-tokens", "8", "--url", server.url],
        input=b"\xff\xc3\xb6\n",
        env={**os.environ, "PYTHONIOENCODING": "utf-8:strict"},
        capture_output=True,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == "user:\ufffd\n".encode()
    done = subprocess.run(
        [sys.executable, "-m", "octavo", "complete", b"a\xffb", "--max-tokens", "3", "--url", server.url],
        capture_output=True,
    )
    assert (done.returncode, done.stdout) == (0, b"a?b\n")


def test_a_reader_that_leaves_ends_the_command_without_a_traceback(server: ServerProcess) -> None:
    ask = [sys.executable, "-m", "octavo", "complete", "abc", "--max-tokens", "999", "--url", server.url]
    with subprocess.Popen(ask, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as popen:
        assert popen.stdout is not None
        assert popen.stderr is not None
        popen.stdout.close()
        assert (popen.stderr.read(), popen.wait(20)) == (b"", 141)


def test_a_server_of_another_kind_is_told_apart() -> None:
    class OtherKind(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>")

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), OtherKind) as other:
        threading.Thread(target=other.handle_request).start()
        with pytest.raises(ConfigError, match="not as an OpenAI-compatible server"):
            next(RemoteModel(f"http://127.0.0.1:{other.server_port}").stream("hi", SamplingParams()))


def test_the_environment_of_a_server_does_not_disturb_who_asks_one(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("MAX_MODEL_LEN", "64"), ("MODEL", "m"), ("PORT", "1"), ("API_KEY", "k"), ("SEED", "1")):
        monkeypatch.setenv(f"OCTAVO_{name}", value)
    assert main(["complete", "wörld ", "--max-tokens", "10", "--url", server.url]) == 0
    assert capsys.readouterr() == ("wörld wö\n", "")


def test_an_early_interrupt_is_no_traceback() -> None:
    code = (
        "import os, signal, sys\n"
        "class Interrupts:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'octavo.cli.parser': os.kill(os.getpid(), signal.SIGINT)\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests run in the background\n"
        "sys.meta_path.insert(0, Interrupts())\n"
        "from octavo.__main__ import main\n"
        "sys.exit(main())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_the_module_can_be_run() -> None:
    source = str(Path(__file__).parents[2] / "src")
    done = subprocess.run(
        [sys.executable, "-m", "octavo", "--version"], capture_output=True, text=True, env={"PYTHONPATH": source}
    )
    assert done.stdout.startswith("octavo ")


@pytest.mark.parametrize(
    ("argv", "unbuffered"),
    [(["--help"], ""), (["info"], ""), (["--version"], "1"), (["complete", "hi", "--max-tokens", "1"], "1")],
)
def test_an_output_that_is_full_is_one_line_and_code_1(argv: list[str], unbuffered: str) -> None:
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [sys.executable, "-m", "octavo", *argv],
            stdout=full,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
    assert result.stderr == "octavo: cannot write to standard output: No space left on device\n"
    assert result.returncode == 1
