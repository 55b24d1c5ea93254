from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.main import make_parser
from octavo.cli.server_options import add_server_flags
from octavo.cli.sources import MAX_CONFIG_BYTES
from tests.cli.test_parser import parser


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "octavo.yaml"


def read(config: Path, text: str, *argv: str, environment: Mapping[str, str] | None = None) -> Any:
    config.write_text(text)
    made = parser(environment)
    add_server_flags(made)
    return made.parse_args(["--config", str(config), *argv])


def test_a_file_has_flags_by_name_and_values_as_on_the_command_line(config: Path) -> None:
    args = read(
        config,
        """
        model: org/name  # a comment
        max-model-len: 4K
        max_num_seqs: 8
        enable-prefix-caching: false
        log-things: yes
        served-model-name: [a, b]
        api-key:
          - one
          - two
        hf-overrides: {rope_scaling: {factor: 2.0, type: linear}, rope_theta: 1e6, name: "1e6"}
        allowed-origins: ["https://a", "https://b"]
        uds-mode: 0660
        gpu-memory-utilization: .5
        seed: null
        """,
    )
    assert (args.model, args.max_model_len, args.max_num_seqs) == ("org/name", 4096, 8)
    assert (args.enable_prefix_caching, args.log_things) == (False, True)
    assert (args.served_model_name, args.api_key) == (["a", "b"], ["one", "two"])
    scaling = {"factor": 2.0, "type": "linear"}
    assert args.hf_overrides == {"rope_scaling": scaling, "rope_theta": 1_000_000, "name": "1e6"}
    assert (args.allowed_origins, args.uds_mode) == (("https://a", "https://b"), 0o660)
    assert (args.gpu_memory_utilization, args.seed) == (0.5, None)
    assert args.given == {"config"}


def test_the_command_line_wins_over_the_environment_and_that_over_the_file(config: Path) -> None:
    text = "max-model-len: 1\nmax-num-seqs: 1\nblock-size: 8\n"
    environment = {"OCTAVO_MAX_MODEL_LEN": "2", "OCTAVO_MAX_NUM_SEQS": "2"}
    args = read(config, text, "--max-model-len", "3", environment=environment)
    assert (args.max_model_len, args.max_num_seqs, args.block_size, args.port) == (3, 2, 8, 8000)


def test_another_way_to_say_the_same_thing_wins_too(config: Path) -> None:
    text = "model: of-the-file\napi-key: weak\n"
    args = read(config, text, "mine", "--api-key-file", "f")
    assert (args.model_argument, args.model, args.api_key, args.api_key_file) == ("mine", None, [], "f")
    args = read(config, text, environment={"OCTAVO_API_KEY_FILE": "g", "OCTAVO_MODEL": "m"})
    assert (args.model, args.api_key, args.api_key_file) == ("m", [], "g")


def test_a_key_of_the_environment_wins_over_keys_of_the_file(config: Path) -> None:
    for name in ("OCTAVO_API_KEY", "VLLM_API_KEY"):
        assert read(config, "api-key: weak\n", environment={name: "k"}).api_key == []


def test_the_environment_may_name_the_file(config: Path) -> None:
    config.write_text("port: 9\n")
    made = parser({"OCTAVO_CONFIG": str(config)})
    add_server_flags(made)
    assert made.parse_args([]).port == 9


def test_what_is_behind_two_dashes_names_no_file() -> None:
    args = make_parser("complete").parse_args(["--max-tokens", "3", "--", "--config"])
    assert (args.prompt, args.config) == ("--config", None)


def test_an_empty_file_says_nothing(config: Path) -> None:
    assert read(config, "# nothing\n").max_model_len is None


def test_flags_of_vllm_are_known_in_a_file(config: Path) -> None:
    args = read(config, "tensor-parallel-size: 1\nenforce_eager: true\nenable-lora: false\n")
    (note,) = args.notes
    assert note.startswith(f"{config}, line 2: enforce_eager: nothing is compiled")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("port: 1\nmax-modle-len: 5", "line 2: max-modle-len is no flag: did you mean max-model-len?"),
        ("config: other.yaml", "line 1: config cannot be set here, for a file names no other file"),
        ("help: all", "line 1: help is no flag"),
        ("zzzzz: 1", "line 1: zzzzz is no flag\n"),
        ("no-enable-prefix-caching: true", "write 'enable-prefix-caching: false'"),
        ("max-model-len: 1\nmax_model_len: 2", "line 2: max_model_len is there twice, before as "),
        ("max-model-len: [1]", "line 1: max-model-len: '[1]' is not a number"),
        ("max-model-len: true", "line 1: max-model-len: 'true' is not a number"),
        ("max-model-len: 4X", "line 1: max-model-len: '4X' is not a number"),
        ("model: [a]", "line 1: model is a list; it must be one value"),
        ("model: {a: b}", "line 1: model is a mapping; it must be one value"),
        ("enable-prefix-caching: 2", "line 1: enable-prefix-caching: '2' is neither true nor false"),
        ("enable-prefix-caching: [true]", "line 1: enable-prefix-caching is a list"),
        ("served-model-name: [[a]]", "line 1: served-model-name must be a list of plain values"),
        ("served-model-name: []", "line 1: served-model-name must be a list of plain values"),
        ("dtype: int3", "line 1: dtype: invalid choice: 'int3'"),
        ("hf-overrides: [1]", "line 1: hf-overrides: '[1]' is not a JSON object"),
        ("hf-overrides: {a: 2020-01-01}", "line 1: hf-overrides is a mapping that JSON cannot have"),
        ("hf-overrides: {a: .nan}", "line 1: hf-overrides is a mapping that JSON cannot have"),
        ("hf-overrides: &a {b: *a}", "line 1: hf-overrides is a mapping that JSON cannot have"),
        ("hf-overrides: {[1]: 2}", "line 1: hf-overrides"),
        ("tensor-parallel-size: 2", "line 1: tensor-parallel-size 2 is not supported (only 1)"),
        ("[1]: 2", "is no flag"),
        ("<<: {port: 1}", "line 1: << is no flag"),
        ("just text", "must have lines like"),
        ("- port: 1", "must have lines like"),
        ("a: b: c", "is not YAML"),
        ("port: 1\n---\nport: 2", "is not YAML"),
        ("x: !!python/object:os.system ls", "line 1: x is no flag"),
        ("hf-overrides: {a: !!python/object:os.system ls}", "JSON cannot have"),
        ("\x00", "is not YAML"),
        ("[" * 5000, "octavo.yaml"),
    ],
)
def test_what_a_file_has_wrong_is_told_with_its_place(
    config: Path, text: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        read(config, text)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert words in error
    assert str(config) in error


def test_a_file_that_multiplies_itself_ends_at_once(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = ["a0: &a0 [x]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30))]
    inside = ", ".join(lines)
    began = time.monotonic()
    with pytest.raises(SystemExit):
        read(config, f"hf-overrides: {{{inside}}}")
    assert time.monotonic() - began < 5
    assert "more than 10,000 values" in capsys.readouterr().err


def test_a_file_that_cannot_be_one_is_refused(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path, words in ((config, "No such file"), (config.parent, "Is a directory")):
        with pytest.raises(SystemExit):
            parser().parse_args(["--config", str(path)])
        assert words in capsys.readouterr().err
    config.write_bytes(b"#" * (MAX_CONFIG_BYTES + 1))
    with pytest.raises(SystemExit):
        parser().parse_args([f"--config={config}"])
    assert "more than 1,048,576 bytes" in capsys.readouterr().err
    config.write_bytes(b"port: \xff\xfe")
    with pytest.raises(SystemExit):
        parser().parse_args(["--config", str(config)])
    assert "is not YAML" in capsys.readouterr().err


def test_the_file_of_a_server_serves_other_commands_too(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text("port: 9000\napi-key: [a, b]\nmax-model-len: 2K\n")
    args = make_parser("chat").parse_args(["--config", str(config)])
    assert (args.max_model_len, args.api_key, args.notes) == (2048, None, [])
    config.write_text("temperature: 0.5\n")
    assert make_parser("chat").parse_args(["--config", str(config)]).temperature == 0.5
    for command, text in (("serve", "temperature: 0.5"), ("chat", "prot: 9000")):
        config.write_text(text)
        with pytest.raises(SystemExit):
            make_parser(command).parse_args(["--config", str(config)])
        assert "is no flag" in capsys.readouterr().err


def test_commands_without_an_engine_have_no_config_file(config: Path) -> None:
    assert "config" in make_parser("serve").flag_names()
    assert "config" not in make_parser("pull").flag_names()


def test_yaml_is_loaded_only_for_a_file() -> None:
    code = (
        "import sys; from octavo.cli.main import make_parser; make_parser('serve').parse_args([]); "
        "sys.exit('yaml' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
