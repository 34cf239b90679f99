"""Tokenizers: text to token ids and back; by name, or saved in a folder.

The ids of a tokenizer are 0 … vocab_size − 1. The mask of the absorbing process is not among them: it is a state of the
process with id vocab_size, and no tokenizer emits it. No torch here, so that preparing data does not import it.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from sedd.files import read_json
from sedd.registry import TOKENIZERS
from sedd.schema import MAX_COUNT, MAX_VOCABULARY, check_count, check_fields
from sedd.tokenizer.base import CONFIG as CONFIG
from sedd.tokenizer.base import DEFINITION as DEFINITION
from sedd.tokenizer.base import FORMAT
from sedd.tokenizer.base import Bytes as Bytes
from sedd.tokenizer.base import Characters as Characters
from sedd.tokenizer.base import Ids as Ids
from sedd.tokenizer.base import Integers as Integers
from sedd.tokenizer.base import Tokenizer as Tokenizer
from sedd.tokenizer.bpe import BPE as BPE

SPECS = ("bytes", "chars", "bpe:SIZE", "gpt2", "ints", "ints:SIZE")
NEEDS_SIZE = {"bytes": False, "chars": False, "gpt2": False, "bpe": True}  # whether a size follows; to others it may


def build_tokenizer(spec: str, texts: Callable[[], Iterator[str]]) -> Tokenizer:
    """Build a tokenizer from its name, or load it from a path.

    Args:
        spec: One of `SPECS`, the name of a plugin, or the path of a tokenizer.json or of a folder with one.
        texts: Called for the corpus if the tokenizer has to be fitted; a plugin is by ``fit(texts[, size=SIZE])``.
    """
    name, size = check_tokenizer(spec)
    match name:
        case None:
            path = Path(spec)
            return load_tokenizer(path) if path.is_dir() else BPE.read(path)
        case "bytes":
            return Bytes()
        case "ints" if size:
            return Integers(size=size)
        case "bpe":
            return BPE.train(texts(), size)
        case "gpt2":
            path = Path(os.environ.get("SEDD_GPT2") or Path.home() / ".cache" / "sedd" / "gpt2")
            file = path if path.is_file() else path / DEFINITION
            if not file.exists():
                raise ValueError(
                    f"{file}, GPT-2's tokenizer, does not exist; download it from huggingface.co/openai-community/gpt2 "
                    "to this path, or set SEDD_GPT2 to the path of your copy"
                )
            return BPE.read(file)
    fitted: Tokenizer = TOKENIZERS.load(name).fit(texts(), **({"size": size} if size else {}))
    return fitted


def check_tokenizer(spec: str) -> tuple[str | None, int]:
    """Split the name of a tokenizer into its kind, None for a path, and its size, 0 for none."""
    name, _, size = spec.partition(":")
    has_size = NEEDS_SIZE.get(name, bool(size)) == bool(size) and (not size or size.isdecimal())
    if name in (*TOKENIZERS.names, "gpt2") and has_size:
        if size and name in ("bpe", "ints"):
            check_count(f"the vocabulary of {name}", int(size), most=MAX_COUNT if name == "bpe" else MAX_VOCABULARY)
        return name, int(size or 0)
    if Path(spec).exists():
        return None, 0
    names = ", ".join([*SPECS, *TOKENIZERS.plugins])
    raise ValueError(f"tokenizer is {spec!r}; choose one of {names}, or the path of a tokenizer.json or its folder")


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer saved in ``folder``, or the ``tokenizer.json`` of a Hugging Face folder."""
    path = folder / CONFIG
    try:
        config = read_json(path)
        check_fields("it", config, {})
        if "kind" not in config and (folder / DEFINITION).exists():
            return BPE.read(folder / DEFINITION)
        if config.get("format") != FORMAT or config.get("kind") not in TOKENIZERS.names:
            found, known = f"{config.get('kind')!r}, format {config.get('format')!r}", ", ".join(TOKENIZERS.names)
            raise ValueError(f"it is of kind {found}; this version reads {known} in format {FORMAT}")
        kind: type[Tokenizer] = TOKENIZERS.load(config["kind"])
        return kind.restore(folder, config)
    except (OSError, KeyError, TypeError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{path} cannot be loaded: {why}; save the tokenizer again") from None
