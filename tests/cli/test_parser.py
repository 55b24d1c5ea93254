from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

import pytest

from octavo.cli.main import COMMANDS, make_parser
from octavo.cli.options import add_engine_flags
from octavo.cli.parser import Parser, names_of
from octavo.core.config import ALL_THAT_FITS
from octavo.core.vllm_flags import NOTE, REFUSED, SILENT, WORKS, vllm_flags


def parser(environment: Mapping[str, str] | None = None) -> Parser:
    made = Parser(prog="octavo test", with_config=True, environment=environment or {})
    add_engine_flags(made)
    made.add_argument("--key", action="append", default=[])
    made.add_argument("--log-things", action="store_true")
    return made


def parsed(*argv: str) -> argparse.Namespace:
    return parser().parse_args(argv)


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as ended:
        parsed(*argv)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def test_underscores_are_as_good_as_dashes() -> None:
    args = parsed("--max_model_len", "4K", "--no_enable_prefix_caching", "--block_size=32", "a_model")
    assert (args.max_model_len, args.enable_prefix_caching, args.block_size) == (4096, False, 32)
    assert args.model_argument == "a_model"


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--enable-prefix-caching=false", False), ("--enable-prefix-caching=True", True), ("--log-things=1", True)],
)
def test_a_switch_may_be_told_true_or_false(flag: str, value: bool) -> None:
    args = parsed(flag)
    assert (args.log_things if "log" in flag else args.enable_prefix_caching) is value


def test_keys_of_json_may_be_told_one_by_one() -> None:
    args = parsed("--hf-overrides.rope_scaling.factor", "2", "--hf-overrides.rope_scaling.rope_type=yarn", "m")
    assert args.hf_overrides == {"rope_scaling": {"factor": 2, "rope_type": "yarn"}}
    assert args.model_argument == "m"


@pytest.mark.parametrize(
    ("argv", "value"),
    [
        (["-cc.mode=3"], {"mode": 3}),
        (["-cc.mode", "3", "-cc.pass_config.fuse=true"], {"mode": 3, "pass_config": {"fuse": True}}),
        (["-O.level", "3"], {"level": 3}),
        (["-O.level=3"], {"level": 3}),
    ],
)
def test_keys_behind_a_short_flag_of_vllm_are_read_too(argv: list[str], value: dict[str, Any]) -> None:
    args = parsed(*argv, "m")
    assert (json.loads(args.compilation_config), args.model_argument, len(args.notes)) == (value, "m", 1)


def test_a_length_may_be_all_that_fits() -> None:
    for argv in (["--max-model-len", "auto"], ["--max-model-len", "-1"], ["--max-model-len=-1"]):
        args = parsed(*argv, "m")
        assert (args.max_model_len, args.model_argument) == (ALL_THAT_FITS, "m")


def test_a_key_inside_of_a_value_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no JSON object" in refusal(capsys, "--hf-overrides.a", "1", "--hf-overrides.a.b", "2")
    assert "--hf-overrides.a: expected one argument" in refusal(capsys, "--hf-overrides.a")
    assert "--config  cannot be read" in refusal(capsys, "--config=")


def test_the_namespace_knows_what_the_command_line_named() -> None:
    assert parsed("m", "--seed", "0", "--key", "a", "--key", "b").given == {"model_argument", "seed", "key"}
    assert parsed().given == set()


def test_a_repeated_flag_is_a_list() -> None:
    assert (parsed("--key", "a", "--key", "b").key, parsed().key) == (["a", "b"], [])


# Facts that were true of vLLM 0.32; here lest a line of the table is lost.
@pytest.mark.parametrize(
    ("argv", "verdict"),
    [
        (["--tensor-parallel-size", "1"], SILENT),
        (["-tp", "2"], REFUSED),
        (["-tp=1"], SILENT),
        (["--pipeline-parallel-size", "1"], SILENT),
        (["--scheduling-policy", "fcfs"], SILENT),
        (["--scheduling-policy", "priority"], REFUSED),
        (["--enable-chunked-prefill"], SILENT),
        (["--no-enable-chunked-prefill"], NOTE),
        (["--swap-space", "4"], NOTE),
        (["--swap-space", "0"], SILENT),
        (["--trust-remote-code"], NOTE),
        (["--load-format", "auto"], SILENT),
        (["--load-format", "dummy"], REFUSED),
        (["--enforce-eager"], NOTE),
        (["--disable-log-requests"], SILENT),
        (["--enable-lora"], REFUSED),
        (["--no-enable-lora"], SILENT),
        (["--lora-modules", "a=b", "c=d"], REFUSED),
        (["--speculative-config", '{"method": "ngram"}'], REFUSED),
        (["--speculative-config.method", "ngram"], REFUSED),
        (["-O3"], NOTE),
        (["--compilation-config", "{}"], SILENT),
        (["--limit-mm-per-prompt", '{"image": 2}'], NOTE),
        (["--hf-token"], SILENT),
        (["--headless"], REFUSED),
        (["--api-server-count", "1"], SILENT),
        (["--tokenizer-mode", "None"], SILENT),
        (["--task=embed"], REFUSED),
    ],
)
def test_flags_of_vllm_are_accepted_noted_or_refused(
    argv: list[str], verdict: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if verdict == REFUSED:
        assert "not supported" in refusal(capsys, "model", *argv)
        return
    args = parsed("model", *argv)
    assert args.model_argument == "model"
    assert len(args.notes) == (verdict == NOTE)


def test_a_flag_of_vllm_leaves_the_model_alone() -> None:
    """Its value is no positional argument, although argparse meets the flag for the first time."""
    assert parsed("--swap-space", "0", "--enforce-eager", "MODEL").model_argument == "MODEL"


def test_vllms_flags_are_in_one_of_the_two_tables_and_none_in_both() -> None:
    serve = set(make_parser("serve").flag_names())
    works = WORKS.split()
    assert len(works) == len(set(works))
    assert set(works) <= serve
    assert not serve & set(vllm_flags())
    spellings = [spelling for flag in vllm_flags().values() for spelling in flag.spellings]
    assert len(spellings) == len(set(spellings))
    assert len(works) + len(vllm_flags()) > 300


def test_every_flag_of_every_command_is_in_a_group_and_has_a_help_line() -> None:
    for command in COMMANDS:
        made = make_parser(command)
        made.help_about("all")
        for action in made._actions:
            assert action.help or not action.option_strings, (command, action)


def test_short_help_shows_what_is_used_most_and_names_the_rest() -> None:
    serve = make_parser("serve")
    short, everything = serve.help_about(None), serve.help_about("all")
    assert short.count("\n") < 80 < everything.count("\n")
    for name in serve.flag_names():
        assert name in short
    for action in serve._actions:
        assert all(f"--{name}" in everything for name in names_of(action))


@pytest.mark.parametrize(
    ("topic", "shown", "missing"),
    [
        ("cache", "--block-size", "--port"),
        ("CacheConfig", "--block-size", "--port"),
        ("KV", "--kv-cache-dtype", "--port"),
        ("tensor_parallel", "not supported: one process", "--port"),
    ],
)
def test_help_shows_a_group_or_what_is_like_a_word(topic: str, shown: str, missing: str) -> None:
    text = " ".join(make_parser("serve").help_about(topic).split())
    assert shown in text
    assert missing not in text


def test_help_about_nothing_lists_the_groups(capsys: pytest.CaptureFixture[str]) -> None:
    assert "the groups are" in refusal(capsys, "--help=zzz")


def values(environment: Mapping[str, str], *argv: str) -> Any:
    return parser(environment).parse_args(argv)


def test_the_environment_sets_what_the_command_line_does_not() -> None:
    environment = {
        "OCTAVO_MAX_MODEL_LEN": "4K",
        "OCTAVO_ENABLE_PREFIX_CACHING": "0",
        "OCTAVO_LOG_THINGS": "true",
        "OCTAVO_SERVED_MODEL_NAME": "a, b",
        "OCTAVO_KEY": "x,y",
        "OCTAVO_SEED": "",
        "OCTAVO_HF_OVERRIDES": '{"a": 1}',
        "OCTAVO_ISA": "portable",
    }
    args = values(environment, "--key", "mine")
    assert (args.max_model_len, args.enable_prefix_caching, args.log_things) == (4096, False, True)
    assert (args.served_model_name, args.key, args.seed) == (["a", "b"], ["mine"], None)
    assert (args.hf_overrides, args.isa, args.notes) == ({"a": 1}, "portable", [])
    assert args.given == {"key"}


def test_a_variable_that_nobody_knows_is_a_warning() -> None:
    (note,) = values({"OCTAVO_MAX_MODLE_LEN": "5"}).notes
    assert note == (
        "the environment has OCTAVO_MAX_MODLE_LEN, which octavo does not know: did you mean OCTAVO_MAX_MODEL_LEN?"
    )
    (note,) = values({"OCTAVO_HELP": "1"}).notes
    assert "OCTAVO_HELP, which octavo does not know" in note
    assert values({"OCTAVO_API_KEY": "k", "octavo_seed": "x", "OTHER": "y"}).notes == []


def test_a_variable_of_another_command_is_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_PORT", "9000")
    monkeypatch.setenv("OCTAVO_NOTHING_LIKE_IT_AT_ALL", "1")
    assert len(make_parser("info").parse_args([]).notes) == 1


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("OCTAVO_MAX_MODEL_LEN", "4X", "OCTAVO_MAX_MODEL_LEN: '4X' is not a number"),
        ("OCTAVO_ENABLE_PREFIX_CACHING", "maybe", "'maybe' is neither true nor false"),
        ("OCTAVO_DTYPE", "int3", "OCTAVO_DTYPE: invalid choice"),
        ("OCTAVO_TENSOR_PARALLEL_SIZE", "2", "OCTAVO_TENSOR_PARALLEL_SIZE 2 is not supported (only 1)"),
    ],
)
def test_a_variable_that_does_not_do_is_named(
    variable: str, value: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        values({variable: value})
    assert words in capsys.readouterr().err
