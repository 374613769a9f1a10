"""Prompts of 1 to 4 000 tokens in many languages, the same in every run."""

# ruff: noqa: RUF001 - many scripts are the point

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

Encode = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt. Where ``num_tokens`` is set, it is the text's first so many tokens."""

    name: str
    text: str
    num_tokens: int | None = None

    def token_ids(self, encode: Encode) -> list[int]:
        """Return the prompt as token ids of ``encode``, which adds no special tokens."""
        token_ids = encode(self.text)
        if self.num_tokens is None:
            return token_ids
        if len(token_ids) < self.num_tokens:
            raise ValueError(f"{self.name} has {len(token_ids)} tokens, not {self.num_tokens}")
        return token_ids[: self.num_tokens]


def exact_prompt(name: str, num_tokens: int, *, first: int = 0) -> Prompt:
    """Return varied prose of exactly ``num_tokens`` tokens; ``first`` picks where it begins."""
    # Each sentence has at least eight tokens in any vocabulary that is not of whole words.
    sentences = itertools.islice(_sentences(first), 2 + num_tokens // 8)
    return Prompt(name, " ".join(sentences), num_tokens)


def all_prompts() -> tuple[Prompt, ...]:
    """Return every prompt: short ones in many languages and scripts, code, and long ones."""
    return (*_SHORT, *_SCRIPTS, *_CODE, *_ODD, *_long())


def _sentences(first: int) -> Iterator[str]:
    """Yield prose without end; no two sentences of it are the same."""
    for number in itertools.count(first):
        who = _WHO[number % len(_WHO)]
        did = _DID[number // 3 % len(_DID)]
        where = _WHERE[number // 2 % len(_WHERE)]
        tail = _TAILS[number * 7 % len(_TAILS)]
        yield f"{who} {did} {where} in the year {1400 + number}, {tail}."


_WHO = (
    "The old lighthouse keeper",
    "A young engineer from the northern mills",
    "Nobody except the clockmaker's daughter",
    "The travelling theatre",
    "Two rival mapmakers",
    "An expedition of botanists",
    "The harbour pilot's dog",
)
_DID = (
    "repaired the broken bridge",
    "counted every boat that passed",
    "lost a wager about the tides",
    "planted forty apple trees",
    "discovered a forgotten archive",
)
_WHERE = (
    "near the salt marshes",
    "below the glass observatory",
    "on the far side of the river",
    "between the two market squares",
    "at the foot of the mountain",
    "behind the railway station",
)
_TAILS = (
    "although the rain had not stopped for nine days",
    "because the council had promised a reward of 250 silver coins",
    "and wrote a long letter about it to the academy",
    "while the bells rang for the end of the harvest",
    "but the newspapers never mentioned it",
)

_SHORT = (
    Prompt("single letter", "A"),
    Prompt("single word", "The"),
    Prompt("one digit", "7"),
    Prompt("capital of France", "The capital of France is"),
    Prompt("unfinished story", "Once upon a time, in a village by the sea, there lived"),
    Prompt("question", "Why is the sky blue during the day and red in the evening?"),
    Prompt("list", "Three things to pack for a winter hike:\n1."),
    Prompt("arithmetic", "12 + 30 = 42\n17 + 5 = 22\n8 + 9 ="),
    Prompt(
        "chat",
        "<|im_start|>user\nName a colour of the rainbow.<|im_end|>\n<|im_start|>assistant\n",
    ),
    Prompt(
        "chat with system",
        "<|im_start|>system\nYou answer in one short sentence.<|im_end|>\n"
        "<|im_start|>user\nWhat does a gardener do in spring?<|im_end|>\n"
        "<|im_start|>assistant\n",
    ),
)

_SCRIPTS = (
    Prompt("German", "Am frühen Morgen fuhr der Zug über die Brücke, und die Reisenden sahen"),
    Prompt("German question", "Wie viele Äpfel passen in einen großen Korb, wenn jeder"),
    Prompt("French", "Chaque été, ma grand-mère préparait des confitures d'abricots avec"),
    Prompt("French dialogue", "— Où allez-vous ?\n— Je vais à la gare, parce que"),
    Prompt("Spanish", "El año pasado los niños del barrio construyeron una pequeña cometa y"),
    Prompt("Portuguese", "A estação das chuvas começou cedo, e os pescadores não"),
    Prompt("Italian", "La biblioteca della città è aperta fino a tardi perché"),
    Prompt("Polish", "Zażółcona łąka pod lasem była pełna świerszczy, gdy"),
    Prompt("Turkish", "Güneş doğarken küçük balıkçı teknesi iskeleden ayrıldı ve"),
    Prompt("Vietnamese", "Buổi sáng ở chợ nổi rất đông vui, người ta bán"),
    Prompt("Russian", "Зимним вечером старый почтальон принёс письмо, в котором"),
    Prompt("Greek", "Το καλοκαίρι στο νησί τα παιδιά μαζεύουν κοχύλια και"),
    Prompt("Hebrew", "בבוקר פתח האופה את החנות הקטנה והריח"),
    Prompt("Arabic", "في الصباح الباكر خرج الصياد إلى البحر وكان"),
    Prompt("Hindi", "गाँव के बच्चे हर शाम नदी के किनारे खेलते हैं और"),
    Prompt("Thai", "ตอนเช้าแม่ค้าที่ตลาดน้ำขายผลไม้"),
    Prompt("Chinese", "春天来了，河边的柳树发芽了，孩子们"),
    Prompt("Japanese", "山の上の小さな図書館には、毎朝一人の老人が来て"),
    Prompt("Korean", "가을이 되면 산길은 단풍으로 물들고 사람들은"),
)

_CODE = (
    Prompt(
        "Python",
        "def binary_search(items: list[int], wanted: int) -> int | None:\n"
        '    """Return the place of wanted."""\n    low, high = 0, len(items)\n    while',
    ),
    Prompt(
        "C++", "#include <vector>\n\nint sum(const std::vector<int>& values) {\n  int total = 0;"
    ),
    Prompt("SQL", "SELECT city, COUNT(*) AS visits FROM journeys WHERE year >= 2001 GROUP BY"),
    Prompt("JSON", '{"name": "lamp", "price": 12.5, "tags": ["light", "desk"], "stock":'),
    Prompt("shell", "#!/bin/sh\nset -eu\nfor file in *.txt; do\n  mv"),
    Prompt("HTML", "<table>\n  <tr><th>Day</th><th>Rain</th></tr>\n  <tr><td>Monday</td>"),
)

_ODD = (
    Prompt("emoji", "🎉🎂 Happy birthday! 👩‍👩‍👧‍👦🏳️‍🌈 ❤️"),
    Prompt("only spaces", "          "),
    Prompt("blank lines", "\n\n\n\n"),
    Prompt("tabs and carriage returns", "a\tb\r\nc\td\r\n"),
    Prompt("repeated word", "tick tock " * 24),
    Prompt("repeated letter", "z" * 90),
    Prompt("numbers", ", ".join(str(number * number) for number in range(40))),
    Prompt("combining marks", "e\u0301a\u0308o\u0302 \u202bשלום\u202c \ufeff"),
)


def _long() -> tuple[Prompt, ...]:
    scripts = "\n".join(prompt.text for prompt in _SCRIPTS)
    code = "\n\n".join(prompt.text for prompt in _CODE)
    return (
        exact_prompt("prose of 63 tokens", 63, first=100),
        exact_prompt("prose of 64 tokens", 64, first=150),
        exact_prompt("prose of 65 tokens", 65, first=200),
        exact_prompt("prose of 128 tokens", 128, first=250),
        exact_prompt("prose of 257 tokens", 257, first=300),
        Prompt("many scripts", f"{scripts}\n{scripts[::-1]}", 400),
        Prompt("much code", "\n".join(f"# part {n}\n{code}" for n in range(8)), 640),
        exact_prompt("prose of 1025 tokens", 1025, first=400),
        exact_prompt("prose of 4000 tokens", 4000, first=600),
    )
