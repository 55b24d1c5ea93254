"""Runs the schemas of the public JSON Schema Test Suite through the real engine, with a model that knows nothing.

The suite is in the source package of `jsonschema`; it is fetched from the package registry in the release that is
installed, and nothing of it is kept here. `python -m tests.structured.public_schemas --seeds 20` is the long run.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import MAX_EMAX, MIN_EMIN, Decimal, localcontext
from pathlib import Path
from typing import Any

import jsonschema
from jsonschema.protocols import Validator

from octavo.core.config import EngineConfig
from octavo.core.records import FinishReason, Request, SamplingParams, StructuredOutputs
from octavo.engine.engine import Engine
from octavo.structured.checker import Job, judge
from octavo.structured.compiler import GrammarCompiler
from octavo.tokenizer.token_table import byte_alphabet
from octavo.tokenizer.vocabulary import Vocabulary
from octavo.weights.open_checkpoint import open_checkpoint
from tests.tiny_models import TinyLlama, write_tiny_llama

DRAFTS: dict[str, type[Validator]] = {
    "draft4": jsonschema.Draft4Validator,
    "draft6": jsonschema.Draft6Validator,
    "draft7": jsonschema.Draft7Validator,
    "draft2019-09": jsonschema.Draft201909Validator,
    "draft2020-12": jsonschema.Draft202012Validator,
}
SPEC = TinyLlama(hidden_size=32, intermediate_size=32, num_layers=1, num_heads=1, context_length=512)
MAX_TOKENS = 400
MAX_NUM_SEQS = 64


def suite_archive(folder: Path) -> Path:
    """The source package of the installed jsonschema, from `folder` or else from the registry."""
    name = f"jsonschema-{importlib.metadata.version('jsonschema')}.tar.gz"
    if not (folder / name).is_file():
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "download"]
        wanted = name.removesuffix(".tar.gz").replace("-", "==")
        subprocess.run([*command, "--no-deps", "--no-binary", ":all:", "--dest", str(folder), wanted], check=True)
    return folder / name


def schemas(archive: Path) -> Iterator[tuple[str, Any]]:
    """(draft, schema), each once. What is optional there is about formats and regular expressions of JavaScript."""
    seen = set()
    with tarfile.open(archive) as tar:
        for member in sorted(tar.getmembers(), key=lambda m: m.name):
            parts = Path(member.name).parts
            if parts[1:3] != ("json", "tests") or len(parts) != 5 or parts[3] not in DRAFTS:
                continue
            file = tar.extractfile(member)
            assert file is not None
            for case in json.load(file):
                schema = case["schema"]
                key = (parts[3], json.dumps(schema))
                if key not in seen:
                    seen.add(key)
                    yield parts[3], schema


@dataclass
class Report:
    refused: Counter[str] = field(default_factory=Counter)  # by reason
    num_supported: int = 0
    num_outputs: int = 0
    num_ended: int = 0
    wrong: list[str] = field(default_factory=list)

    @property
    def summary(self) -> str:
        num_refused, num_valid = self.refused.total(), self.num_ended - len(self.wrong)
        return (
            f"{self.num_supported + num_refused} schemas, {num_refused} refused, {self.num_supported} supported; "
            f"{self.num_outputs} outputs, {self.num_ended} ended, {num_valid} valid"
        )


def run(archive: Path, seeds: int) -> Report:
    """`seeds` outputs for each schema at each of the temperatures 1 and 2."""
    report = Report()
    with tempfile.TemporaryDirectory() as folder:
        path = write_tiny_llama(Path(folder) / "tiny.gguf", SPEC)
        engine = Engine(EngineConfig(str(path), threads=1, max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=256))
        checkpoint = open_checkpoint(path)
        vocabulary = Vocabulary.from_gguf(checkpoint.config)
        checkpoint.close()
    compiler = GrammarCompiler(vocabulary.token_bytes, [SPEC.eos_token_id], [SPEC.eos_token_id], SPEC.vocab_size)
    wanted: dict[str, tuple[str, Any]] = {}
    for draft, schema in schemas(archive):
        told = schema
        if isinstance(schema, dict):  # which draft it is of, as a client says it
            told = {"$schema": DRAFTS[draft].META_SCHEMA["$schema"], **schema}
        verdict = judge(compiler, Job(StructuredOutputs(json=told)))
        if verdict.grammar is None:
            assert verdict.error
            report.refused[verdict.error] += 1
            continue
        report.num_supported += 1
        for number in range(2 * seeds):
            request_id = str(len(wanted))
            wanted[request_id] = (draft, told)
            engine.submit(_request(request_id, verdict.grammar, 1.0 + number % 2, number))
    outputs = dict.fromkeys(wanted, b"")
    while engine.has_work:
        for output in engine.step():
            outputs[output.request_id] += output.text
            assert output.finish_reason is not FinishReason.ERROR, (wanted[output.request_id], output.error)
            if output.finish_reason is not None:
                report.num_outputs += 1
            if output.finish_reason is FinishReason.STOP:
                report.num_ended += 1
                complaint = _complaint(*wanted[output.request_id], outputs[output.request_id])
                if complaint:
                    report.wrong.append(f"{wanted[output.request_id]}: {outputs[output.request_id]!r}: {complaint}")
    engine.close()
    return report


def _request(request_id: str, grammar: str, temperature: float, seed: int) -> Request:
    """A bias for what closes things, or random texts would go on for ever; less of it for every other seed."""
    alphabet = byte_alphabet()
    strength = (4.0 if seed % 4 < 2 else 6.0) * temperature
    bias = {alphabet.index(character): strength for character in '"}]'} | {SPEC.eos_token_id: strength}
    params = SamplingParams(temperature=temperature, seed=seed, max_tokens=MAX_TOKENS, logit_bias=bias)
    return Request(
        request_id=request_id, prompt_token_ids=[seed % 256], params=params, arrival_time=0.0, grammar=grammar
    )


def _complaint(draft: str, schema: Any, output: bytes) -> str:
    """Why an output does not fit, "" if it does. Numbers are decimal, as JSON writes them."""
    try:
        json.loads(output)
        value = json.loads(output, parse_float=Decimal)
    except ValueError as error:
        return f"is no JSON: {error}"
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    validator = DRAFTS[draft](exact, format_checker=DRAFTS[draft].FORMAT_CHECKER)
    with localcontext(prec=2000, Emax=MAX_EMAX, Emin=MIN_EMIN):  # for remainders of long numbers
        return "; ".join(error.message for error in validator.iter_errors(value))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where the suite is or goes")
    args = parser.parse_args()
    report = run(suite_archive(args.folder), args.seeds)
    for reason, count in report.refused.most_common():
        print(f"{count:4} refused: {reason}")
    print(*report.wrong, report.summary, sep="\n")
    return bool(report.wrong)


if __name__ == "__main__":
    sys.exit(main())
