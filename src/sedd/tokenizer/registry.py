"""Tokenizers by name: the part of `build` that needs no torch."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from sedd.tokenizer.base import Tokenizer
from sedd.tokenizer.basic import Bytes, Characters, Integers
from sedd.tokenizer.bpe import BPE
from sedd.tokenizer.loading import load

NAMES = ("bytes", "chars", "bpe:SIZE", "gpt2", "ints", "ints:SIZE")


def named(spec: str, texts: Callable[[], Iterator[str]]) -> Tokenizer:
    """A tokenizer by name, or saved at a path; ``texts`` is called for the corpus where it is fitted to one."""
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
    if (path := Path(spec)).exists():
        return load(path) if path.is_dir() else BPE.read(path)
    raise ValueError(
        f"tokenizer is {spec!r}; choose one of {', '.join(NAMES)}, or the path of a tokenizer.json or of a folder "
        "with one"
    )


def _gpt2() -> Tokenizer:
    place = Path(os.environ.get("SEDD_GPT2") or Path.home() / ".cache" / "sedd" / "gpt2")
    file = place if place.is_file() else place / "tokenizer.json"
    if not file.exists():
        raise ValueError(
            f"{file}, the tokenizer of GPT-2, does not exist; download it from huggingface.co/openai-community/gpt2 "
            "and put it there, or its path into SEDD_GPT2"
        )
    return BPE.read(file)
