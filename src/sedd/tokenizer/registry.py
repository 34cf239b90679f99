"""Tokenizers by name."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from sedd.registry import TOKENIZERS
from sedd.schema import MAX_COUNT, MAX_VOCABULARY, check_count
from sedd.tokenizer.base import Tokenizer
from sedd.tokenizer.basic import Bytes, Characters, Integers
from sedd.tokenizer.bpe import BPE
from sedd.tokenizer.loading import load_tokenizer

SPECS = ("bytes", "chars", "bpe:SIZE", "gpt2", "ints", "ints:SIZE")


def build_tokenizer(spec: str, texts: Callable[[], Iterator[str]]) -> Tokenizer:
    """Build a tokenizer from its name, or load it from a path.

    Args:
        spec: One of `SPECS`, the name of a plugin, or the path of a tokenizer.json or of a folder with one.
            A plugin's class is fitted by ``fit(texts)``, or ``fit(texts, size=SIZE)`` for NAME:SIZE.
        texts: Called for the corpus if the tokenizer has to be fitted to one.
    """
    name, _, size = spec.partition(":")
    match name, size:
        case "bytes", "":
            return Bytes()
        case "chars", "":
            return Characters.fit(texts())
        case "ints", "":
            return Integers.fit(texts())
        case "ints", _ if size.isdecimal():
            return Integers(size=int(size))
        case "bpe", _ if size.isdecimal():
            return BPE.train(texts(), int(size))
        case "gpt2", "":
            return _gpt2()
    if name in TOKENIZERS.plugins and (not size or size.isdecimal()):
        fitted: Tokenizer = TOKENIZERS.load(name).fit(texts(), **({"size": int(size)} if size else {}))
        return fitted
    if (path := Path(spec)).exists():
        return load_tokenizer(path) if path.is_dir() else BPE.read(path)
    raise ValueError(_unknown(spec))


def check_tokenizer(spec: str) -> None:
    """Refuse a name that `build_tokenizer` does not take."""
    name, _, size = spec.partition(":")
    takes_size = size.isdecimal() if name == "bpe" else not size or size.isdecimal()
    known = name in (*TOKENIZERS.names, "gpt2") and takes_size and not (size and name in ("bytes", "chars", "gpt2"))
    if not known and not Path(spec).exists():
        raise ValueError(_unknown(spec))
    if known and size and name in ("bpe", "ints"):
        check_count(f"the vocabulary of {name}", int(size), most=MAX_COUNT if name == "bpe" else MAX_VOCABULARY)


def _unknown(spec: str) -> str:
    names = ", ".join([*SPECS, *TOKENIZERS.plugins])
    return f"tokenizer is {spec!r}; choose one of {names}, or the path of a tokenizer.json or of a folder with one"


def _gpt2() -> Tokenizer:
    path = Path(os.environ.get("SEDD_GPT2") or Path.home() / ".cache" / "sedd" / "gpt2")
    file = path if path.is_file() else path / "tokenizer.json"
    if not file.exists():
        raise ValueError(
            f"{file}, GPT-2's tokenizer, does not exist; download it from huggingface.co/openai-community/gpt2 "
            "to this path, or set SEDD_GPT2 to the path of your copy"
        )
    return BPE.read(file)
