"""Detokenizers: from the spaced-out words of a benchmark's files to text as people write it.

A model of ordinary text is surprised by ``He did n't , she said .`` for no good reason. Published numbers were computed
after rules that undo most of it, and differ where the rules do; here they are as tables, in the order they apply.
"""

import re
from collections.abc import Callable, Sequence

Detokenizer = Callable[[str], str]
Rules = Sequence[tuple[str, str]]


def _ruled(*tables: Rules) -> Detokenizer:
    """Every rule of every table once, in turn: a regular expression and what it becomes."""
    compiled = [(re.compile(pattern), becomes) for rules in tables for pattern, becomes in rules]

    def detokenize(text: str) -> str:
        for pattern, becomes in compiled:
            text = pattern.sub(becomes, text)
        return text

    return detokenize


def _plain(*pairs: tuple[str, str]) -> Rules:
    """Rules without regular expressions."""
    return [(re.escape(words), becomes) for words, becomes in pairs]


def _closed(marks: str) -> Rules:
    """`` , `` → ``, ``: marks that stand behind a word and before a space."""
    return [(f" {re.escape(mark)} ", f"{mark} ") for mark in marks]


wikitext = _ruled(
    _plain(("s '", "s'"), (" @-@ ", "-"), (" @,@ ", ","), (" @.@ ", ".")),
    _closed(":;.!?,"),
    [
        (r"\(\s*([^)]*?)\s*\)", r"(\1)"),
        (r"\[\s*([^\]]*?)\s*\]", r"[\1]"),
        (r"\{\s*([^}]*?)\s*\}", r"{\1}"),
        (r'"\s*([^"]*?)\s*"', r'"\1"'),
        (r"'\s*([^']*?)\s*'", r"'\1'"),
    ],
    _plain(("= = = =", "===="), ("= = =", "==="), ("= =", "=="), (" ° ", "°")),
    _plain((" \n", "\n"), ("\n ", "\n"), (" N ", " 1 "), (" 's", "'s")),
)
"""WikiText: numbers and hyphens joined, marks closed up, brackets and quotes hugging what they hold, headings."""

ptb = _ruled(
    _plain((" 's", "'s"), ("s ' ", "s' "), (" n't", "n't"), (" \n ", "\n"), ("\\/", "/")),
    [(r" N(?= )", " 1")],  # N stands for any number; neighbours share a space
    _plain(("$ 1", "$1"), ("# 1", "#1"), ("<unk>", "?")),
)
"""Penn Treebank: contractions joined, every number a 1, unknown words a question mark."""

lm1b = _ruled(
    _plain(("http : / / ", "http://"), ("https : / / ", "https://")),
    [(r" '(\w+)", r"'\1"), (r" (\w+) \. ", r" \1. "), (r" (\w+) \.$", r" \1.")],
    [(r" \? ", "? "), (r" \?$", "?"), (r" ! ", "! "), (r" !$", "!")],
    _closed(",:;"),
    [
        (r" / ", "/"),
        (r'" ([^"]+) "', r'"\1"'),
        (r"' ([^']+) '", r"'\1'"),
        (r"\( ([^()]+) \)", r"(\1)"),
        (r"\[ ([^\[\]]+) \]", r"[\1]"),
    ],
    _plain(("$ ", "$"), ("£ ", "£")),
)
"""One Billion Words: contractions and addresses joined, marks closed up, quotes and brackets hugging, $ and £."""


def lambada(text: str) -> str:
    """LAMBADA: straight quotes, no space around, and a line end before each passage."""
    return "\n" + text.replace("“", '"').replace("”", '"').strip()
