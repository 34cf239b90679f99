"""Detokenizers: turn the space-separated tokens of benchmark files into ordinary text.

Files such as PTB and WikiText contain ``He did n't , she left .``, to which a model of ordinary text assigns too low a
likelihood. Published numbers were computed after rules that undo most of the tokenization, and depend on those rules;
they are listed here as tables in the order in which they apply.

References: Merity et al. 2016, "Pointer Sentinel Mixture Models", arXiv 1609.07843 (WikiText); Marcus et al. 1993,
"Building a Large Annotated Corpus of English: The Penn Treebank"; Chelba et al. 2013, "One Billion Word Benchmark for
Measuring Progress in Statistical Language Modeling", arXiv 1312.3005; Paperno et al. 2016, "The LAMBADA dataset: Word
prediction requiring a broad discourse context", arXiv 1606.06031.
"""

import re
from collections.abc import Callable, Sequence

Detokenizer = Callable[[str], str]
Rules = Sequence[tuple[str, str]]


def _rules(*tables: Rules) -> Detokenizer:
    """Return a function that applies every rule (a regular expression and its replacement) once, in order."""

    def detokenize(text: str) -> str:
        for pattern, replacement in (rule for rules in tables for rule in rules):
            text = re.sub(pattern, replacement, text)
        return text

    return detokenize


def _literal(*pairs: tuple[str, str]) -> Rules:
    """Return rules that replace literal strings."""
    return [(re.escape(old), new) for old, new in pairs]


def _attach(marks: str) -> Rules:
    """Return rules that attach punctuation marks to the preceding word: `` , `` → ``, ``."""
    return [(f" {re.escape(mark)} ", f"{mark} ") for mark in marks]


wikitext = _rules(
    _literal(("s '", "s'"), (" @-@ ", "-"), (" @,@ ", ","), (" @.@ ", ".")),
    _attach(":;.!?,"),
    [(r"\(\s*([^)]*?)\s*\)", r"(\1)"), (r"\[\s*([^\]]*?)\s*\]", r"[\1]"), (r"\{\s*([^}]*?)\s*\}", r"{\1}")],
    [(r'"\s*([^"]*?)\s*"', r'"\1"'), (r"'\s*([^']*?)\s*'", r"'\1'")],
    _literal(("= = = =", "===="), ("= = =", "==="), ("= =", "=="), (" ° ", "°")),
    _literal((" \n", "\n"), ("\n ", "\n"), (" N ", " 1 "), (" 's", "'s")),
)
"""WikiText: joins numbers and hyphens, attaches punctuation, brackets and quotes, and restores headings."""

ptb = _rules(
    _literal((" 's", "'s"), ("s ' ", "s' "), (" n't", "n't"), (" \n ", "\n"), ("\\/", "/")),
    [(r" N(?= )", " 1")],  # N stands for any number; the lookahead leaves the space for the next match
    _literal(("$ 1", "$1"), ("# 1", "#1"), ("<unk>", "?")),
)
"""Penn Treebank: joins contractions; numbers become 1 and unknown words a question mark."""

lm1b = _rules(
    _literal(("http : / / ", "http://"), ("https : / / ", "https://")),
    [(r" '(\w+)", r"'\1"), (r" (\w+) \. ", r" \1. "), (r" (\w+) \.$", r" \1.")],
    [(r" \? ", "? "), (r" \?$", "?"), (r" ! ", "! "), (r" !$", "!")],
    _attach(",:;"),
    [(r" / ", "/"), (r'" ([^"]+) "', r'"\1"'), (r"' ([^']+) '", r"'\1'")],
    [(r"\( ([^()]+) \)", r"(\1)"), (r"\[ ([^\[\]]+) \]", r"[\1]")],
    _literal(("$ ", "$"), ("£ ", "£")),
)
"""One Billion Words: joins contractions and addresses, attaches punctuation, quotes, brackets and currency signs."""


def lambada(text: str) -> str:
    """LAMBADA: straight quotes, no surrounding whitespace, and a line break before each passage."""
    return "\n" + text.replace("“", '"').replace("”", '"').strip()
