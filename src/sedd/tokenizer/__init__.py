"""Tokenizers: text to token ids and back.

The ids of a tokenizer are 0 … vocab_size − 1. The mask of the absorbing process is not among them: it is a state of the
process with id vocab_size, and no tokenizer emits it. No torch here, so that preparing data does not import it.
"""

from sedd.tokenizer.base import CONFIG, DEFINITION, Ids, Tokenizer
from sedd.tokenizer.basic import Bytes, Characters, Integers
from sedd.tokenizer.bpe import BPE
from sedd.tokenizer.loading import load_tokenizer
from sedd.tokenizer.registry import SPECS, build_tokenizer, check_tokenizer

__all__ = [
    "BPE",
    "CONFIG",
    "DEFINITION",
    "SPECS",
    "Bytes",
    "Characters",
    "Ids",
    "Integers",
    "Tokenizer",
    "build_tokenizer",
    "check_tokenizer",
    "load_tokenizer",
]
