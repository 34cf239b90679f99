"""Tokenizers: text to token ids and back.

The ids of a tokenizer are 0 … vocab_size − 1. The mask of the absorbing process is not among them: it is a state of the
process with id vocab_size, and no tokenizer emits it. No torch here, so that preparing data does not import it.
"""

from sedd.tokenizer.base import CONFIG as CONFIG
from sedd.tokenizer.base import DEFINITION as DEFINITION
from sedd.tokenizer.base import Bytes as Bytes
from sedd.tokenizer.base import Characters as Characters
from sedd.tokenizer.base import Ids as Ids
from sedd.tokenizer.base import Integers as Integers
from sedd.tokenizer.base import Tokenizer as Tokenizer
from sedd.tokenizer.bpe import BPE as BPE
from sedd.tokenizer.registry import build_tokenizer as build_tokenizer
from sedd.tokenizer.registry import check_tokenizer as check_tokenizer
from sedd.tokenizer.registry import load_tokenizer as load_tokenizer
