"""Makes data/llama_cpp_ids.json.gz: what llama.cpp makes of the difficult texts under each split rule. Not a test.

Run from the project's root with the path of a Python that has the package xllamacpp (2026.10 was used):

    PYTHONPATH=src python -m tests.tokenizer.make_llama_cpp_ids /path/to/other/python

For each value of tokenizer.ggml.pre it writes a tiny model with one and the same trained vocabulary, lets llama.cpp's
server tokenize every text, and keeps two bytes of checksum of the ids of each. Models whose own tokenizer composes
characters (NFC) get composed texts, as llama.cpp does not do that. The vocabulary is kept too, so that the checksums
hold whatever version of the `tokenizers` library trains another one.
"""

from __future__ import annotations

import base64
import gzip
import json
import re
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
import tokenizers

from octavo.tokenizer.split_rules import SPLIT_RULES
from tests.tiny_models import TinyLlama, random_tensors
from tests.tokenizer.texts import difficult_texts

DATA = Path(__file__).parent / "data" / "llama_cpp_ids.json.gz"
NUM_TEXTS, SEED = 2500, 5

# llama.cpp has another rule for "default" than transformers, and its rules for these leave out the marks (\p{M}) of
# the original patterns, which its regular expressions do not know.
NOT_COMPARABLE = ("default", "tekken", "gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2")

SERVE = """
import http.client, json, os, sys
import xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_batch, params.n_ubatch, params.n_parallel = sys.argv[1], 64, 64, 64, 1
params.cpuparams.n_threads = 1
server = xllamacpp.Server(params)
connection = http.client.HTTPConnection(server.listening_address.split("//")[-1].strip("/"))
found = []
for text in json.load(open(sys.argv[2])):
    body = {"content": text, "add_special": False, "parse_special": False}
    connection.request("POST", "/tokenize", json.dumps(body), {"Content-Type": "application/json"})
    found.append(json.loads(connection.getresponse().read())["tokens"])
json.dump(found, open(sys.argv[3], "w"))
os._exit(0)
"""


def checksum(ids: Sequence[int]) -> bytes:
    return zlib.crc32(np.asarray(ids, "<u4").tobytes()).to_bytes(4, "little")[:2]


def texts_for(pre: str) -> list[str]:
    texts = difficult_texts(NUM_TEXTS, SEED)
    if SPLIT_RULES[pre].nfc:
        return [tokenizers.normalizers.NFC().normalize_str(text) for text in texts]
    if pre in ("deepseek-llm", "deepseek-coder"):
        # llama.cpp turns rare spaces into a line tabulation before it matches ranges of characters.
        return [text for text in texts if not re.search("[\u0800-\u9fff]", "".join(filter(str.isspace, text)))]
    return texts


def train() -> tuple[list[str], list[tuple[str, str]]]:
    """Trained on uncut text, so that merges reach over every border that a rule might draw or forget."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=4000, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    corpus = [text for text in difficult_texts(2500, seed=2) if "<" not in text]
    bpe.train_from_iterator([*corpus, *corpus], trainer)
    vocab = bpe.get_vocab()
    merges = json.loads(bpe.to_str())["model"]["merges"]
    return sorted(vocab, key=vocab.__getitem__), [(left, right) for left, right in merges]


def write_model(path: Path, pre: str, tokens: list[str], merges: list[tuple[str, str]]) -> None:
    spec = TinyLlama(hidden_size=32, intermediate_size=32, num_layers=1, num_heads=1, vocab_size=len(tokens) + 1)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*tokens, "<|endoftext|>"])
    writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens) + [gguf.TokenType.CONTROL])
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(len(tokens))
    writer.add_eos_token_id(len(tokens))
    for name, values in random_tensors(spec).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    tokens, merges = train()
    checksums = {}
    with tempfile.TemporaryDirectory() as folder:
        model, asked, answered = (Path(folder) / name for name in ("model.gguf", "texts.json", "ids.json"))
        for pre in SPLIT_RULES:
            if pre in NOT_COMPARABLE:
                continue
            write_model(model, pre, tokens, merges)
            asked.write_text(json.dumps(texts_for(pre)))
            subprocess.run([sys.argv[1], "-c", SERVE, model, asked, answered], check=True, capture_output=True)
            ids = json.loads(answered.read_text())
            checksums[pre] = base64.b64encode(b"".join(map(checksum, ids))).decode()
            print(pre, sum(map(len, ids)), flush=True)
    content = {"tokens": tokens, "merges": merges, "checksums": checksums}
    DATA.write_bytes(gzip.compress(json.dumps(content).encode(), 9, mtime=0))


if __name__ == "__main__":
    main()
