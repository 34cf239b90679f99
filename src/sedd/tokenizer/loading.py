"""Load saved tokenizers."""

from pathlib import Path
from typing import Any

from sedd.files import read_json
from sedd.registry import TOKENIZERS
from sedd.tokenizer.base import CONFIG, DEFINITION, FORMAT, Tokenizer
from sedd.tokenizer.bpe import BPE


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer saved in ``folder``, or the ``tokenizer.json`` of a Hugging Face folder."""
    config = _json(folder / CONFIG)
    if "kind" not in config and (folder / DEFINITION).exists():
        return BPE.read(folder / DEFINITION)
    if config.get("format") != FORMAT or config.get("kind") not in TOKENIZERS.names:
        raise ValueError(
            f"{folder / CONFIG} is of kind {config.get('kind')!r}, format {config.get('format')!r}; "
            f"this version reads {', '.join(TOKENIZERS.names)} in format {FORMAT}"
        )
    kind: type[Tokenizer] = TOKENIZERS.load(config["kind"])
    try:
        return kind.restore(folder, config)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{folder / CONFIG} is damaged: {error}; save the tokenizer again") from None


def _json(path: Path) -> dict[str, Any]:
    try:
        found = read_json(path)
    except OSError as error:
        raise ValueError(f"{path} could not be read: {error.strerror}; save the tokenizer again") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}; save the tokenizer again") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__}, not an object; save the tokenizer again")
    return found
