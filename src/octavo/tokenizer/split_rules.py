"""How each model family cuts text into the words within which byte-level BPE merges.

A GGUF file names its family's rule (`tokenizer.ggml.pre`, llama.cpp's names); the rules are those of the families' own
tokenizer.json files. It does not know vocabularies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tokenizers


@dataclass(frozen=True, slots=True)
class SplitRule:
    """splits: patterns that are applied one after the other; what a pattern matches becomes a word, and so does what
    lies between. nfc: text is composed first. ignore_merges: a word that is a token is taken whole. add_bos: whether
    a prompt begins with BOS if the file does not say.
    """

    splits: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False

    def normalizer(self) -> tokenizers.normalizers.Normalizer | None:
        from tokenizers import normalizers

        return normalizers.NFC() if self.nfc else None

    def pre_tokenizer(self) -> tokenizers.pre_tokenizers.PreTokenizer:
        from tokenizers import Regex, pre_tokenizers

        steps: list[pre_tokenizers.PreTokenizer] = [
            pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.splits
        ]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        return pre_tokenizers.Sequence(steps)


_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_UP_TO_3_DIGITS = r"\p{N}{1,3}"
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_BLOOM = r" ?[^(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"


def _cl100k(digits: str, contractions: str = _CONTRACTIONS) -> str:
    """OpenAI's cl100k pattern with another limit on the digits of a word."""
    return (
        rf"{contractions}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"  # signs with the line end that follows
    )


def _cased(digits: str, contractions: str = "") -> str:
    """OpenAI's o200k pattern: a word begins anew where a capital follows a small letter."""
    lead, upper, lower = r"[^\r\n\p{L}\p{N}]?", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    return (
        f"{lead}{upper}*{lower}+{contractions}|{lead}{upper}+{lower}*{contractions}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


def _deepseek3(signs: str) -> str:
    return (
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        rf"| ?[\p{{P}}\p{{S}}]+{signs}|\s+(?!\S)|\s+"
    )


# The letters with a case, as far as DeepSeek LLM's tokenizer.json lists them.
_DEEPSEEK_LETTERS = (
    "A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)

_PLAIN = SplitRule((_GPT2,))
_PLAIN_NFC = SplitRule((_GPT2,), nfc=True)
_SINGLE_DIGITS = SplitRule((_DIGIT, _GPT2))
_LLAMA3 = SplitRule((_cl100k(_UP_TO_3_DIGITS),), ignore_merges=True, add_bos=True)
_CL100K = SplitRule((_cl100k(_UP_TO_3_DIGITS),))
_CL100K_DIGIT = SplitRule((_cl100k(_DIGIT),))
_QWEN2 = SplitRule((_cl100k(_DIGIT),), nfc=True)
_O200K = SplitRule((_cased(_UP_TO_3_DIGITS, f"{_CONTRACTIONS}?"),))
_DEEPSEEK3 = SplitRule((_UP_TO_3_DIGITS, _CJK, _deepseek3(r"[\r\n]*|\s*[\r\n]+")))
_BAILING = SplitRule(
    (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
        r"|\s*[\r\n]|\s+(?!\S)|\s+",
    )
)

# The values of `tokenizer.ggml.pre`. "default" stands in files written before the key was there.
SPLIT_RULES: dict[str, SplitRule] = {
    **dict.fromkeys(("default", "gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "exaone4", "jais"), _PLAIN),
    **dict.fromkeys(("trillion", "granite-docling"), _PLAIN),
    **dict.fromkeys(("olmo", "mpt"), _PLAIN_NFC),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b", "mellum2"), _SINGLE_DIGITS),
    "command-r": SplitRule((_DIGIT, _GPT2), nfc=True),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0"), _LLAMA3),
    "lfm2": _LLAMA3,
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _CL100K),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "kormo", "f2llmv2", "stablelm2"), _QWEN2),
    **dict.fromkeys(("hunyuan", "solar-open", "grok-2"), _CL100K_DIGIT),
    "qwen35": SplitRule(
        (
            rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
        ),
        nfc=True,
    ),
    "seed-coder": SplitRule(
        (rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",)
    ),
    "tekken": SplitRule((_cased(_DIGIT),), ignore_merges=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _O200K),
    "falcon": SplitRule((r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "deepseek-llm": SplitRule(
        (
            r"[\r\n]",
            rf"\s?[{_DEEPSEEK_LETTERS}]+",
            r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
            r"\p{N}+",
        )
    ),
    "deepseek-coder": SplitRule(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", _DIGIT)
    ),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), _DEEPSEEK3),
    "minicpm5": SplitRule((_UP_TO_3_DIGITS, _cl100k(r"\p{N}+")), ignore_merges=True),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _BAILING),
    **dict.fromkeys(("bloom", "gpt3-finnish", "poro-chat"), SplitRule((_BLOOM,))),
    "viking": SplitRule((_BLOOM, _DIGIT)),
}
