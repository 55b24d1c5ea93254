"""Difficult strings for tokenizers: every piece that ever broke one, alone, in systematic series, and in mixtures.

All is derived from seeds: the same call gives the same strings on every machine. No lone surrogates: other libraries
refuse them.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

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

# Text that looks like the special tokens of some family.
LOOK_ALIKES = [
    "<s>", "</s>", "<unk>", "<pad>", "<|endoftext|>", "<|im_start|>user\n", "<|im_end|>", "<|eot_id|>", "[INST] ",
    " [/INST]", "<<SYS>>\n", "<start_of_turn>", "<|begin_of_text|>", "<|start_header_id|>", "<0x0A>", "<0xE2>", "▁",
    "▁▁", "Ġ", "Ċ", "<|x", "<think>\n", "</think>", "<tool_call>", "<|assistant|>", "<｜User｜>", "[TOOL_CALLS]", "<|>",
]  # fmt: skip

SENTENCES = [
    "The 3 cats' 12 kittens weren't hers; they'd left at 09:45.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "Le cœur déçu mais l’âme plutôt naïve, Louÿs rêva de crapaüter en canoë.",
    "В чащах юга жил бы цитрус? Да, но фальшивый экземпляр!",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία.",
    "いろはにほへと ちりぬるを。わかよたれそ、つねならむ。",
    "天地玄黄，宇宙洪荒。日月盈昃，辰宿列张。2024年12月31日",
    "다람쥐 헌 쳇바퀴에 타고파. 3번째",
    "ऋषियों को सताने वाले दुष्ट राक्षसों के राजा रावण।",
    "نص حكيم له سر قاطع وذو شأن عظيم مكتوب على ثوب أخضر",
    "דג סקרן שט בים מאוכזב ולפתע מצא חברה",
    "เป็นมนุษย์สุดประเสริฐเลิศคุณค่า กว่าบรรดาฝูงสัตว์เดรัจฉาน",
    "Chữ Việt: tôi có thể ăn thủy tinh mà không hại gì.",
    "ქართული ენა და ანბანი; Հայերեն գիր; አማርኛ ቋንቋ; ភាសាខ្មែរ; བོད་སྐད།",
    "import numpy as np\n\n\ndef mean(xs: list[float]) -> float:\n\treturn sum(xs) / len(xs)  # 1.0e-9\n",
    "#include <vector>\nint main() { std::vector<int> v{1,2,3}; return v[0]==1 ? 0 : -1; }\n",
    '{"name": "x", "args": {"a": [1, 2.5, null], "b": "\\u00e9\\n"}}\n',
    "| a | b |\n|---|---|\n| 1 | **2** |\n\n> quote\n\n* item\n  * nested\n",
    "<!DOCTYPE html><p style=\"color:#fff\">a&nbsp;b</p>\r\n<!-- c -->\r\n",
    "$$\\int_0^\\infty e^{-x^2}\\,dx = \\frac{\\sqrt{\\pi}}{2}$$",
    "CamelCaseWordsHTTPServerXMLParserID42 snake_case_words SCREAMING_CASE kebab-case-words",
    "I'm, you're, he's, we'll, they'd, I've, O'CLOCK'S, rock'n'roll, 'tis, y'all'd've",
]  # fmt: skip


def difficult_texts(count: int, seed: int = 0) -> list[str]:
    """The first `count` of: each piece alone, the series (about 700 strings), then mixtures without end."""
    return list(itertools.islice(_texts(random.Random(seed)), count))


def _texts(rng: random.Random) -> Iterator[str]:
    yield ""
    yield from PIECES
    yield from LOOK_ALIKES
    yield from SENTENCES
    yield from _series()
    while True:
        parts = rng.choices(PIECES, k=rng.randrange(2, 12))
        kind = rng.random()
        if kind < 0.3:
            parts.insert(rng.randrange(len(parts)), "".join(random_character(rng) for _ in range(rng.randrange(1, 8))))
        elif kind < 0.5:
            parts.insert(rng.randrange(len(parts)), rng.choice(LOOK_ALIKES))
        elif kind < 0.8:
            sentence = rng.choice(SENTENCES)
            at = rng.randrange(len(sentence))
            parts.insert(rng.randrange(len(parts)), sentence[at : at + rng.randrange(1, 40)])
        yield "".join(parts)


def _series() -> Iterator[str]:
    spaces = [" ", "\t", "\n", "\r\n", "\u00a0", "\u3000", "\v", "\f", "\x1c", "\u180e", "\u200a"]
    for space, length in itertools.product(spaces, (1, 2, 3, 4, 7, 8, 15, 16, 31, 33, 63)):
        yield space * length  # alone, and before a word, a digit and a line end
        yield f"a{space * length}b{space * length}7{space * length}\n"
    for first, second in itertools.product([" ", "\n", "\t", "\r"], repeat=2):
        yield f"x{first}{second}{first}y{second}{second}{first}."
    for length in (1, 2, 3, 4, 5, 6, 7, 9, 10, 13, 20, 50):
        digits = "".join(str(i % 10) for i in range(length))
        yield from (digits, f" {digits} ", f"a{digits}b", f"-{digits}.{digits}e+{digits}", f"${digits},{digits}")
        yield "٠١٢٣٤٥٦٧٨٩"[:length] * 2 + "".join(chr(0xFF10 + i % 10) for i in range(length))
    for sign in "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~«»“”‘’…—–·•€£¥°±×÷§¶©®™":
        yield from (f"{sign}", f" {sign}a", f"a{sign}{sign}\n", f"{sign * 3} {sign} \n\n{sign}7")
    for base in "aoeuнаկक가あ":
        yield base + "\u0301" + base + "\u0300\u0327" + base + "\u20e3 " + base + "\ufe0f"
    for code in range(0x20):
        yield f"a{chr(code)}b {chr(code)}{chr(code)}"
    for code in (0x80, 0x9F, 0xAD, 0x61C, 0x200B, 0x200D, 0x200E, 0x2028, 0x2060, 0xFEFF, 0xFFF9, 0xFFFF, 0xE0041):
        yield f"a{chr(code)}b {chr(code)} {chr(code)}{chr(code)}1"
    for script in range(0x0, 0x3100, 0x80):  # a window into each block of letters
        letters = "".join(char for char in map(chr, range(script + 0x20, script + 0x50)) if char.isprintable())
        yield f"{letters} {letters[::3]} {letters[:7].upper()}"
    for emoji in (
        "👩🏿‍🚀",
        "🧑‍🤝‍🧑",
        "🏴\U000e0067\U000e0062\U000e0073\U000e0063\U000e0074\U000e007f",
        "1️⃣",
        "☎️",
        "🇺🇳🇩🇪",
    ):
        yield from (emoji, f" {emoji}{emoji} ", f"a{emoji}b", emoji[:-1], emoji[1:])
    for word in ("a", "ab", "Ab", "é", "日", "😀", "'s", "ha ", "\u0301"):
        yield from (word * 100, word * 333)
    for text in LOOK_ALIKES:
        yield from (f" {text}", f"{text} ", f"{text}{text}", f"a{text}b", text[:-1], text[1:], f"\n{text}\n")


def random_character(rng: random.Random) -> str:
    code = rng.choice([rng.randrange(0x80), rng.randrange(0x3000), rng.randrange(0x10000), rng.randrange(0x110000)])
    return "\ufffd" if 0xD800 <= code < 0xE000 else chr(code)
