"""Downloads, up to the edge of the network: from a hub on this machine, by a process that has no other."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from octavo.core.errors import ConfigError, ModelFileError
from octavo.weights import hub
from octavo.weights.hub import Choice, choose, looks_like_hub_name
from tests.weights.fake_hub import FakeHub, Repo, running

EMPTY = (2).to_bytes(8, "little") + b"{}"
LLAMA = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "model.safetensors": EMPTY,
    "consolidated.safetensors": b"x" * 5000,
    "pytorch_model.bin": b"x" * 5000,
    "README.md": b"hello",
    "original/model.safetensors": b"x",
}
SHARDS = {
    "config.json": b"{}",
    "model-00001-of-00002.safetensors": EMPTY,
    "model-00002-of-00002.safetensors": EMPTY,
    "model.safetensors.index.json": b"{}",
}
GGUFS = {
    "m-Q8_0.gguf": b"8",
    "m-Q4_K_M.gguf": b"4m",
    "m-Q4_K.gguf": b"4",
    "f16/m-F16-00001-of-00002.gguf": b"a",
    "f16/m-F16-00002-of-00002.gguf": b"b",
    "mmproj-F16.gguf": b"p",
}
LARGE = bytes(range(256)) * 100_000  # more than two of the 10 MiB that the library writes at once
REPOS = {
    "org/llama": Repo(LLAMA),
    "org/shards": Repo(SHARDS),
    "org/ggufs": Repo(GGUFS),
    "org/private": Repo(LLAMA, private=True),
    "org/gated": Repo(LLAMA, gated=True),
    "org/pickles": Repo({"config.json": b"{}", "pytorch_model.bin": b"x"}),
    "org/ill": Repo(LLAMA, status=503),
    "org/forbidden": Repo(LLAMA, status=403),
    "org/shaky": Repo({"m.gguf": LARGE}, breaks=2),
    "org/slow": Repo({"m.gguf": bytes(300_000)}, pause=0.05),
    "org/large": Repo({"m.gguf": bytes(3_000_000)}),
}
# Answers each line, a JSON object of arguments for fetch and a token, with the path or the error.
WORKER = """
import json, os, sys
from octavo.core.errors import OctavoError
from octavo.weights.hub import fetch
for line in sys.stdin:
    arguments = json.loads(line)
    os.environ["HF_TOKEN"] = arguments.pop("token")
    try:
        print(json.dumps(["path", str(fetch(**arguments))]), flush=True)
    except OctavoError as error:
        print(json.dumps([type(error).__name__, str(error)]), flush=True)
"""


def environment(url: str, home: Path, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return {**kept, "HF_ENDPOINT": url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", **more}


@pytest.fixture(scope="module")
def server() -> Iterator[FakeHub]:
    with running(FakeHub(REPOS)) as fake:
        yield fake


Fetch = Callable[..., tuple[str, str]]


@pytest.fixture(scope="module")
def worker(server: FakeHub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fetch]:
    home = tmp_path_factory.mktemp("hf")
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(server.url, home),
    )
    assert process.stdin
    assert process.stdout

    def fetch(name: str, *, token: str = "", **more: str | bool) -> tuple[str, str]:
        assert process.stdin
        assert process.stdout
        process.stdin.write(json.dumps({"name": name, "token": token, **more}) + "\n")
        process.stdin.flush()
        kind, text = json.loads(process.stdout.readline())
        return kind, text

    yield fetch
    process.stdin.close()
    process.wait()


def octavo(*arguments: str, env: dict[str, str], file_limit: int | None = None) -> subprocess.CompletedProcess[str]:
    def limit() -> None:
        if file_limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))

    command = [sys.executable, "-m", "octavo", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, preexec_fn=limit)


def test_of_a_folder_only_what_a_model_needs_is_downloaded_and_only_once(
    server: FakeHub, worker: Fetch, tmp_path: Path
) -> None:
    for _ in range(2):
        kind, path = worker("org/llama", download_dir=str(tmp_path))
        assert kind == "path"
        assert {p.name for p in Path(path).iterdir()} == {"config.json", "tokenizer.json", "model.safetensors"}
    assert [name for name, _ in server.downloads].count("model.safetensors") == 1
    assert Path(path).is_relative_to(tmp_path)


def test_a_tokenizer_comes_without_the_weights_unless_it_is_in_them(worker: Fetch, tmp_path: Path) -> None:
    kind, path = worker("org/llama", download_dir=str(tmp_path), tokenizer_only=True)
    assert (kind, {p.name for p in Path(path).iterdir()}) == ("path", {"config.json", "tokenizer.json"})
    assert Path(worker("org/ggufs:Q8_0", download_dir=str(tmp_path), tokenizer_only=True)[1]).read_bytes() == b"8"


def test_shards_come_with_their_index(worker: Fetch) -> None:
    kind, path = worker("org/shards", revision="main")
    assert (kind, {p.name for p in Path(path).iterdir()}) == ("path", set(SHARDS))


def test_a_pattern_picks_one_gguf_model_with_all_its_parts(worker: Fetch) -> None:
    assert Path(worker("org/ggufs:q4_k_m")[1]).read_bytes() == b"4m"
    assert Path(worker("org/ggufs:Q4_K")[1]).read_bytes() == b"4"
    first = Path(worker("org/ggufs:F16")[1])
    assert first.name == "m-F16-00001-of-00002.gguf"
    assert first.with_name("m-F16-00002-of-00002.gguf").read_bytes() == b"b"


def test_a_token_opens_what_is_private_or_gated(worker: Fetch) -> None:
    assert worker("org/private", token="good")[0] == "path"
    assert worker("org/gated", token="good")[0] == "path"


def test_a_slow_download_arrives(worker: Fetch) -> None:
    assert Path(worker("org/slow")[1]).stat().st_size == 300_000


def test_a_download_that_breaks_off_goes_on_where_it_stopped(server: FakeHub, worker: Fetch) -> None:
    kind, path = worker("org/shaky")
    assert kind == "path"
    assert Path(path).read_bytes() == LARGE
    ranges = [asked for name, asked in server.downloads if name == "m.gguf" and asked]
    assert ranges[:2] == ["bytes=10485760-"] * 2


@pytest.mark.parametrize(
    ("name", "revision", "kind", "message"),
    [
        ("org/nowhere", None, "ConfigError", "org/nowhere is not on the hub: check the name"),
        ("org/private", None, "ConfigError", "does not exist or is private.*HF_TOKEN"),
        ("org/gated", None, "ConfigError", "is gated: ask for access at http://127.0.0.1:.*/org/gated.*HF_TOKEN"),
        ("org/forbidden", None, "ConfigError", "denies org/forbidden to this token .403"),
        ("org/ill", None, "ConfigError", "the hub answers 503 for org/ill: try again later"),
        ("org/llama", "v9", "ConfigError", "org/llama has no revision 'v9'.*--revision"),
        ("org/pickles", None, "ModelFileError", "no GGUF model or safetensors .*it has config.json, pytorch_model.bin"),
        ("org/ggufs", None, "ModelFileError", r"4 GGUF models \(f16.*such as org/ggufs:F16"),
        ("org/ggufs:IQ2", None, "ModelFileError", "no GGUF model with 'IQ2' in its name: it has f16/m-F16"),
        ("noslash", None, "ConfigError", "'noslash' is no name of the hub"),
    ],
)
def test_each_failure_has_its_own_sentence(
    worker: Fetch, tmp_path: Path, name: str, revision: str | None, kind: str, message: str
) -> None:
    more = {} if revision is None else {"revision": revision}
    found, text = worker(name, download_dir=str(tmp_path), **more)
    assert found == kind
    assert re.search(message, text), text
    assert "\n" not in text


def test_without_a_network_what_is_in_the_cache_serves(server: FakeHub, tmp_path: Path) -> None:
    env = environment(server.url, tmp_path)
    pulled = octavo("pull", "org/ggufs:Q4_K_M", env=env)
    assert pulled.returncode == 0, pulled.stderr
    assert Path(pulled.stdout.strip()).read_bytes() == b"4m"
    listed = octavo("models", "--download-dir", str(tmp_path / "hub"), env=env)
    assert [line.split() for line in listed.stdout.splitlines() if line.startswith("org/")] == [
        ["org/ggufs", "main", "0.0", "MiB", "1", "file"]
    ]
    offline = octavo("pull", "org/ggufs:Q4_K_M", env={**env, "HF_HUB_OFFLINE": "1"})
    assert offline.stdout == pulled.stdout
    away = octavo("pull", "org/ggufs:Q4_K_M", env={**env, "HF_ENDPOINT": "http://127.0.0.1:9"})
    assert away.stdout == pulled.stdout


def test_without_a_network_what_is_not_in_the_cache_is_refused(tmp_path: Path) -> None:
    env = environment("http://127.0.0.1:9", tmp_path)
    away = octavo("pull", "org/llama", env=env)
    assert (away.returncode, away.stdout) == (2, "")
    assert away.stderr.startswith(
        f"octavo: org/llama is not in {tmp_path}/hub, and the hub at http://127.0.0.1:9 cannot"
    )
    offline = octavo("pull", "org/llama", env={**env, "HF_HUB_OFFLINE": "1"})
    assert "HF_HUB_OFFLINE forbids to download it" in offline.stderr


def test_a_full_disk_is_said_and_leaves_no_model(server: FakeHub, tmp_path: Path) -> None:
    full = octavo("pull", "org/large", env=environment(server.url, tmp_path), file_limit=1 << 20)
    assert full.returncode == 2
    assert f"there is no room for org/large in {tmp_path}/hub" in full.stderr
    assert not list(tmp_path.rglob("m.gguf"))


def test_an_empty_cache_lists_nothing_but_the_built_in_model(tmp_path: Path) -> None:
    assert hub.cached_models(str(tmp_path / "gone")) == []


def test_a_cache_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be read as a cache of the hub"):
        hub.cached_models(str(tmp_path / "file"))


def test_names_of_the_hub_are_told_from_paths() -> None:
    for name in ("org/name", "Qwen/Qwen3-0.6B", "org/name-GGUF:Q4_K_M", "a/b.c:sub/m-Q8_0.gguf"):
        assert looks_like_hub_name(name), name
    for name in ("name", "./org/name", "/org/name", "a/b/c", "models/m.gguf", "a/m.safetensors", "a/", "a b/c", "../a"):
        assert not looks_like_hub_name(name), name


def test_what_is_chosen_of_a_repository() -> None:
    assert choose(GGUFS, "m-Q8_0.gguf", "x", "a/b") == Choice(("m-Q8_0.gguf",), "m-Q8_0.gguf")
    mixed = {**SHARDS, "additional_chat_templates/rag.jinja": b"", "m.gguf": b"", "consolidated.safetensors": b""}
    assert choose(mixed, None, "x", "a/b").files == (
        "additional_chat_templates/rag.jinja",
        *SHARDS,
    )
    assert choose(["m.gguf", "mmproj-m.gguf"], None, "x", "a/b").main == "m.gguf"
    with pytest.raises(ModelFileError, match="it has no files"):
        choose([], None, "a/b", "a/b")
    with pytest.raises(ConfigError, match="no name of the hub"):
        hub.fetch("a/b/c")
