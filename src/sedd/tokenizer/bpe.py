"""Byte pair encoding: the door to the `tokenizers` library."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, final

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from sedd.tokenizer.base import DEFINITION, Ids, Tokenizer, read_text, utf8


@final
@dataclass(frozen=True, kw_only=True)
class BPE(Tokenizer):
    """Frequent runs of bytes: a ``tokenizer.json`` as the `tokenizers` library defines it.

    One that is trained here, and GPT-2's, loses nothing. A file from elsewhere may change a text before it splits it
    (lower case, joined spaces); `is_exact` says whether it can.
    """

    kind = "bpe"
    definition: str

    def __post_init__(self) -> None:
        _ = self._model  # a damaged definition is refused here, not at the first text
        self._check_specials()

    @classmethod
    def train(cls, texts: Iterator[str], vocab_size: int) -> "BPE":
        """A byte-level vocabulary of ``vocab_size`` runs at most, fewer where ``texts`` do not repeat themselves."""
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        if vocab_size < len(alphabet):
            raise ValueError(f"vocab_size is {vocab_size}; byte-level BPE needs {len(alphabet)} or more, one a byte")
        model = _byte_level(models.BPE())
        trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
        model.train_from_iterator(texts, trainer)
        return cls(definition=model.to_str())

    @classmethod
    def read(cls, path: Path) -> "BPE":
        """Any ``tokenizer.json``; its own end-of-text and padding tokens are used where it has them."""
        made = cls(definition=read_text(path))
        special = {token.content: id for id, token in made._model.get_added_tokens_decoder().items() if token.special}
        eos = [special[name] for name in ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>") if name in special]
        pad = [special[name] for name in ("<|padding|>", "<|pad|>", "<pad>", "[PAD]") if name in special]
        return replace(made, eos=eos[0] if eos else None, pad=pad[0] if pad else None)

    @classmethod
    def gpt2(cls, vocab: Path, merges: Path) -> "BPE":
        """GPT-2's tokenizer from its two published files, ``encoder.json`` and ``vocab.bpe``."""
        for path in (vocab, merges):
            read_text(path)
        try:
            model = _byte_level(models.BPE.from_file(str(vocab), str(merges)))
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"{vocab} and {merges} are no vocabulary and merges of GPT-2: {error}") from None
        model.add_special_tokens(["<|endoftext|>"])
        return cls(definition=model.to_str(), eos=model.token_to_id("<|endoftext|>"))

    @cached_property
    def _model(self) -> tokenizers.Tokenizer:
        try:
            model = tokenizers.Tokenizer.from_str(self.definition)
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"the definition of the tokenizer is damaged or of an unknown kind: {error}") from None
        model.no_padding()
        model.no_truncation()
        model.encode_special_tokens = True  # "<|endoftext|>" inside a text is text
        return model

    @property
    def attached(self) -> Mapping[str, bytes]:
        """The definition, as other programs read it."""
        return {DEFINITION: self.definition.encode()}

    @cached_property
    def base_size(self) -> int:
        """One more than the largest id of the definition."""
        return 1 + max(self._model.get_vocab(with_added_tokens=True).values(), default=0)

    @cached_property
    def is_exact(self) -> bool:
        """Byte level, nothing normalised, no space put in front."""
        parts = json.loads(self.definition)
        splitter = parts["pre_tokenizer"] or {}
        steps = splitter.get("pretokenizers", [splitter])
        return (
            parts["normalizer"] is None
            and (parts["decoder"] or {}).get("type") == "ByteLevel"
            and any(step.get("type") == "ByteLevel" for step in steps)
            and not any(step.get("add_prefix_space") for step in steps)
        )

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of the runs; the library leaves Python's lock alone meanwhile, so that threads do help."""
        for text in texts:
            utf8(text)
        found = self._model.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(one.ids, np.int64) for one in found]

    def settings(self) -> dict[str, Any]:
        """None beside the definition, which is a file of its own."""
        return {}

    @classmethod
    def restore(cls, folder: Path, config: Mapping[str, Any]) -> "BPE":
        """From its definition."""
        return cls(definition=read_text(folder / DEFINITION), eos=config["eos"], pad=config["pad"])

    def _decode(self, ids: Ids) -> str:
        text: str = self._model.decode(ids.tolist(), skip_special_tokens=True)
        return text

    def _piece(self, id: int) -> str:
        text: str = self._model.decode([id], skip_special_tokens=False)
        return self._model.id_to_token(id) or "" if "\ufffd" in text else text  # part of a character


def _byte_level(model: models.BPE) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made
