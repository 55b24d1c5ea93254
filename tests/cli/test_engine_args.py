from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import pytest

import octavo
from octavo import EngineArgs
from octavo.cli.parser import Parser
from octavo.cli.serve import for_another_engine
from octavo.core.config import EngineConfig
from octavo.core.errors import ConfigError
from octavo.llm import LLM
from tests.server.fake_engine import FakeEngine

MODEL = __file__  # any file: nothing here loads it


def test_options_have_vllms_names_and_become_an_engine_config() -> None:
    args = EngineArgs(model=MODEL, max_model_len=64, gpu_memory_utilization=0.5, served_model_name=["a", "b"])
    config = args.create_engine_config()
    assert type(config) is EngineConfig
    assert config == EngineConfig(
        model=MODEL, max_model_len=64, gpu_memory_utilization=0.5, served_model_name=("a", "b")
    )
    assert EngineArgs(Path(MODEL)).create_engine_config().model == MODEL


def test_none_means_the_default() -> None:
    assert EngineArgs(max_num_seqs=None, tensor_parallel_size=None) == EngineArgs()


def test_vllms_other_options_are_judged_as_on_the_command_line(caplog: pytest.LogCaptureFixture) -> None:
    EngineArgs(tensor_parallel_size=1, trust_remote_code=True, enable_lora=False, enforce_eager=True)
    assert [line.split(": ")[2] for line in caplog.messages] == ["trust_remote_code", "enforce_eager"]
    for options, words in (
        ({"tensor_parallel_size": 2}, r"tensor_parallel_size 2 is not supported \(only 1\)"),
        ({"enable_lora": True}, "enable_lora is not supported"),
        ({"speculative_config": {"method": "ngram"}}, "speculative_config"),
        ({"max_modle_len": 5}, "has no option 'max_modle_len': did you mean max_model_len?"),
        ({"tensor_parallel_sise": 1}, "did you mean tensor_parallel_size?"),
        ({"zzzzzzzz": 1}, "the options are model, served_model_name"),
        ({"max_model_len": 0}, "--max-model-len is 0"),
        ({"enable_prefix_caching": "false"}, "--enable-prefix-caching is 'false'; it must be True or False"),
    ):
        with pytest.raises(ConfigError, match=words):
            EngineArgs(**options)
        with pytest.raises(ConfigError, match=words):
            LLM(MODEL, **options)


@pytest.mark.parametrize("kind", [argparse.ArgumentParser, Parser])
def test_any_parser_can_have_the_flags(kind: type[argparse.ArgumentParser]) -> None:
    parser = EngineArgs.add_cli_args(kind(prog="mine"))
    parser.add_argument("--own", default=3)
    argv = ["--model", MODEL, "--max-model-len", "4K", "-tp", "1", "--enforce-eager", "--served-model-name", "a", "b"]
    args = EngineArgs.from_cli_args(parser.parse_args(argv))
    assert (args.model, args.max_model_len, args.served_names) == (MODEL, 4096, ("a", "b"))
    with pytest.raises(ConfigError, match="only 1"):
        EngineArgs.from_cli_args(parser.parse_args(["-tp", "2"]))


def test_it_is_a_frozen_dataclass_that_llm_takes() -> None:
    args = EngineArgs(MODEL, max_num_seqs=3)
    assert dataclasses.replace(args, max_num_seqs=4) == EngineArgs(MODEL, max_num_seqs=4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        args.max_num_seqs = 5  # type: ignore[misc]
    with pytest.raises(ConfigError, match="--block-size is 12"):
        LLM(**dataclasses.asdict(args) | {"block_size": 12})
    assert octavo.EngineArgs is EngineArgs


def test_an_engine_that_follows_on_another_has_the_same_length() -> None:
    info = FakeEngine(EngineConfig("echo", max_model_len=64)).info
    config = EngineConfig("m", max_model_len="auto")
    again = for_another_engine(config, info)
    assert again == dataclasses.replace(config, num_gpu_blocks_override=info.num_blocks)
    assert for_another_engine(EngineConfig("m"), info) == EngineConfig("m")
