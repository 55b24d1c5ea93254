"""Difficult strings for tokenizers: every piece that ever broke one, alone and in seeded random mixtures."""

from __future__ import annotations

import random

PIECES = [
    "Hello", " world", "the quick brown fox", "can't", "I'LL", "We'VEry", "'Sx", "we'Ve", "'s", "''", "don’t",
    "O'Neill's",
    " ", "  ", "     ", "\t", "\t\t", "\n", "\n\n", "\r\n", "\r", " \n ", "\n   \n", "\u00a0", "\u2003", "\u3000",
    "\u200b", "0", "7", "42", "123", "1234567890", "3.14159", "1,000,000",
    "٣٤٥", "५६", "Ⅳ", "½", "x²", "①", "10e-5", "0x1F",
    "!", "...", "?!", "—", "«»", "()", "[]{}", "<|", "|>", "<>", "$%^&*", "@user", "#tag", "a_b", "__init__", "--",
    "//", "é", "e\u0301", "ñ", "n\u0303", "Å",
    "\u212b", "ﬁ", "ß", "İ", "ǆ", "Ω", "\u2126", "한국어", "\u1112\u1161\u11ab",
    "日本語", "中文字符", "ひらがな", "カタカナ", "ไทย", "हिन्दी", "العربية", "עברית", "Ελληνικά", "русский",
    "українська", "😀", "👍🏽", "👨‍👩‍👧‍👦", "🇩🇪", "❤️", "🏳️‍🌈", "𝔘𝔫𝔦", "𒀀", "\U0010ffff", "\ufffd", "\ufeff", "\ufffe",
    "\0", "\x01", "\x07", "\x1b[31m", "\x7f", "\x85", "\u2028", "\u2029",
    "def f(x):\n    return x + 1\n", "for (int i = 0; i < n; ++i) {", "\\n", '"quoted"', "`code`",
    "https://a.b/c?d=e&f=1", "SELECT * FROM t;", "<div class='a'>",
    "λx.x", "a\u0300\u0301\u0302", "aaaaaaaaaaaaaaaaaaaa", "ABCdefGHI", "iPhone15",
]  # fmt: skip


def difficult_texts(count: int, seed: int = 0) -> list[str]:
    """Each piece alone, then mixtures of two to twelve pieces and random characters."""
    rng = random.Random(seed)
    texts = ["", *PIECES]
    while len(texts) < count:
        parts = rng.choices(PIECES, k=rng.randrange(2, 12))
        if rng.random() < 0.3:
            parts.insert(rng.randrange(len(parts)), "".join(random_character(rng) for _ in range(rng.randrange(1, 8))))
        texts.append("".join(parts))
    return texts


def random_character(rng: random.Random) -> str:
    code = rng.choice([rng.randrange(0x80), rng.randrange(0x3000), rng.randrange(0x10000), rng.randrange(0x110000)])
    return "\ufffd" if 0xD800 <= code < 0xE000 else chr(code)
