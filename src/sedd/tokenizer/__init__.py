"""Tokenizers: text to token ids and back, without loss.

The ids of a tokenizer are 0 … vocab_size − 1. The mask of the absorbing process is not among them: it is a state of the
process, comes after them, and no tokenizer ever emits it. No torch here, so that preparing data does not wait for it.
"""

from sedd.tokenizer.base import CONFIG, DEFINITION, Ids, Tokenizer
from sedd.tokenizer.basic import Bytes, Characters, Integers
from sedd.tokenizer.bpe import BPE
from sedd.tokenizer.loading import KINDS, load
from sedd.tokenizer.registry import NAMES, named

__all__ = [
    "BPE",
    "CONFIG",
    "DEFINITION",
    "KINDS",
    "NAMES",
    "Bytes",
    "Characters",
    "Ids",
    "Integers",
    "Tokenizer",
    "load",
    "named",
]
