"""Evaluation protocols: everything a published likelihood depends on besides the model and the text, under one name.

Results can be compared in one table if their protocols are the same.

References: the protocol ``sedd`` is that of Lou et al. 2024, arXiv 2310.16834; ``mdlm`` that of Sahoo et al. 2024,
arXiv 2406.07524; text8 is from Mahoney, "Large Text Compression Benchmark".
"""

import string
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, final

import numpy as np

from sedd.evaluation import detokenize
from sedd.likelihood.estimators import BoundTerms
from sedd.likelihood.orders import Orders
from sedd.schema import check_choice
from sedd.tokenizer import Ids


class Eos(StrEnum):
    """Where end-of-text tokens are placed."""

    NONE = "none"
    BETWEEN = "between documents, where the tokenizer has one"
    AFTER = "after every row"


@final
@dataclass(frozen=True)
class Packing:
    """How token rows are cut into sequences: each batch of each shard of the rows is one stream."""

    description: str  # is stored with results
    keep_remainder: bool = False  # whether the tokens left at the end of a stream are a shorter sequence, or dropped
    rows: int = sys.maxsize  # per batch
    shards: int = 1  # contiguous parts of the rows; published code had one for each of 8 worker processes

    def __call__(self, rows: Sequence[Ids], length: int) -> list[Ids]:
        """Cut the rows, in order, into sequences of ``length`` tokens."""
        sequences, start = [], 0
        for size in (len(part) for part in np.array_split(np.arange(len(rows)), self.shards)):
            shard, start = rows[start : start + size], start + size
            for i in range(0, size, self.rows):
                batch = shard[i : i + self.rows]
                stream = batch[0] if len(batch) == 1 else np.concatenate(batch)
                stop = len(stream) if self.keep_remainder else len(stream) - length + 1
                sequences += [stream[j : j + length] for j in range(0, stop, length)]
        return sequences


KEEP_REMAINDER = Packing("one stream, nothing dropped", keep_remainder=True)
DROP_REMAINDER = Packing("one stream, the rest at its end dropped")


@final
@dataclass(frozen=True)
class Dataset:
    """A benchmark: how its files are named and become rows of text."""

    title: str
    detokenize: detokenize.Detokenizer
    keep_line_ends: bool  # whether rows keep their line ends and empty lines are rows; else lines are stripped
    files: Mapping[str, tuple[str, ...]]  # prefixes of file names, by split

    def split_of(self, path: Path) -> str | None:
        """Return the split that a file holds, judging by its name."""
        return next((split for split, names in self.files.items() if path.name.startswith(names)), None)

    def split_rows(self, document: str) -> list[str]:
        """Split a text file into detokenized rows."""
        lines = document.removesuffix("\n").split("\n")
        if self.keep_line_ends:
            return [self.detokenize(line + "\n") if line.strip() else "" for line in lines]
        return [self.detokenize(line.strip()) for line in lines if line.strip()]


DATASETS: Mapping[str, Dataset] = {
    "lambada": Dataset("LAMBADA", detokenize.lambada, False, {"test": ("lambada",)}),
    "wikitext2": Dataset(
        *("WikiText-2", detokenize.wikitext, True),
        {"train": ("wikitext2-train",), "validation": ("wikitext2-valid",), "test": ("wikitext2-test",)},
    ),
    "ptb": Dataset(
        "PTB", detokenize.ptb, False, {"train": ("ptb.train",), "validation": ("ptb.valid",), "test": ("ptb.test",)}
    ),
    "wikitext103": Dataset(  # its raw test file has the same articles as that of WikiText-2
        *("WikiText-103", detokenize.wikitext, True),
        {"validation": ("wikitext103-valid",), "test": ("wikitext103-test", "wikitext-raw-test")},
    ),
    "lm1b": Dataset(
        "LM1B", detokenize.lm1b, False, {"validation": ("lm1b-valid",), "test": ("lm1b-test", "lm1b-sample")}
    ),
}


@final
@dataclass(frozen=True)
class Protocol:
    """How text becomes sequences, and which terms of their likelihood are reported."""

    name: str
    split: str  # the part of a data set that is scored
    length: int | None = None  # tokens per sequence; None: the length the model was trained on
    eos: Eos = Eos.NONE
    packing: Packing = KEEP_REMAINDER
    terms: tuple[str, ...] = BoundTerms._fields
    t_min: float = 0.0  # smallest time of the diffusion term; published tables average over times from here to 1
    draws: int = 8  # default of Monte Carlo draws per sequence; it affects the standard error, not the expected value
    benchmarks: tuple[str, ...] = ()  # data sets it can detokenize; if there are none, text is used unchanged
    splits: Mapping[str, str] = field(default_factory=dict)  # of data sets whose split differs from ``split``
    char_range: tuple[int, int] | None = None  # first and last character of the part that is scored; None: all
    alphabet: str | None = None
    published_vocab_size: int | None = None  # of the published numbers
    uses_validation_split: bool = False  # whether it scores the validation split of a run's own data, and no other text

    def as_record(self, by_record: bool = False) -> dict[str, Any]:
        """Return the fields that are stored with a result; ``by_record``, of records that are not packed."""
        return {
            "protocol": self.name,
            "eos": str(Eos.NONE if by_record else self.eos),
            "packing": "one sequence per record" if by_record else self.packing.description,
            "t_min": self.t_min,
        }

    def split_for(self, dataset: str | None) -> str:
        """Return the split of a data set that is scored."""
        return self.splits.get(dataset or "", self.split)

    def check_dataset(self, name: str) -> None:
        """Reject a benchmark that the protocol does not have."""
        if name not in self.benchmarks:
            allowed = f"has {', '.join(self.benchmarks)}" if self.benchmarks else "takes any text as it is"
            raise ValueError(f"dataset is {name!r}; protocol {self.name} {allowed}")

    def identify_dataset(self, path: Path) -> str:
        """Return the benchmark that a file belongs to by its name; reject a file of another split."""
        for name in self.benchmarks:
            split, wanted = DATASETS[name].split_of(path), self.split_for(name)
            if split == wanted:
                return name
            if split is not None:
                raise ValueError(
                    f"{path.name} is the {split} split of {DATASETS[name].title}, and protocol {self.name} scores "
                    f"{wanted}; give that, or use protocol strict"
                )
        known = ", ".join(f"{prefix}…" for name in self.benchmarks for prefix in self._prefixes(name))
        raise ValueError(
            f"{path.name} is not among the files of protocol {self.name} ({known}); name the data set "
            f"with --dataset {' | '.join(self.benchmarks)}"
        )

    def find_file(self, folder: Path, dataset: str) -> Path:
        """Return the file of a data set in a folder."""
        for path in sorted(folder.iterdir()) if folder.is_dir() else []:
            if path.name.startswith(self._prefixes(dataset)):
                return path
        raise ValueError(
            f"{folder} holds no {DATASETS[dataset].title} ({self.split_for(dataset)}); protocol {self.name} needs a "
            f"file that begins with {' or '.join(self._prefixes(dataset))}"
        )

    def _prefixes(self, dataset: str) -> tuple[str, ...]:
        return DATASETS[dataset].files.get(self.split_for(dataset), (f"{dataset}-{self.split_for(dataset)}",))


SUITES = ("zero-shot",)
SINGLE_TEXT = Protocol("single-text", "each text by itself", draws=128)
"""The protocol of `sedd score`, which takes no data set."""
OWN_SAMPLES = Protocol("own-samples", "samples of the model")
"""The protocol of `sedd eval --samples`, which generates its data."""
PUBLISHED: Any = {"length": 1024, "terms": ("diffusion",), "t_min": 1e-3, "published_vocab_size": 50_257}
PROTOCOLS: Mapping[str, Protocol] = {
    protocol.name: protocol
    for protocol in (
        Protocol("strict", "all that is given", eos=Eos.BETWEEN),
        Protocol(
            "held-out",
            "the last blocks of a run's data",
            eos=Eos.BETWEEN,
            packing=DROP_REMAINDER,
            uses_validation_split=True,
        ),
        Protocol(
            "text8p",
            "characters 69M to 74M of text8",
            length=256,
            packing=DROP_REMAINDER,
            char_range=(69_000_000, 74_000_000),
            alphabet=" " + string.ascii_lowercase,
        ),
        Protocol(
            "sedd",
            "test",
            eos=Eos.AFTER,
            packing=Packing("8 shards, batches of 1000 rows, the rest of every batch dropped", rows=1000, shards=8),
            benchmarks=tuple(DATASETS),
            splits={"wikitext2": "train"},
            **PUBLISHED,
        ),
        Protocol(
            "mdlm",
            "validation",
            packing=DROP_REMAINDER,
            benchmarks=("lambada", "ptb", "wikitext103", "lm1b"),
            splits={"lambada": "test"},
            **PUBLISHED,
        ),
    )
}


def get_protocol(name: str) -> Protocol:
    """Return the protocol called ``name``."""
    check_choice("protocol", name, PROTOCOLS)
    return PROTOCOLS[name]


def suite_datasets(name: str, protocol: Protocol, only: Sequence[str] = ()) -> list[str]:
    """Return the data sets of a suite under a protocol, restricted to ``only`` if there are any."""
    check_choice("suite", name, SUITES)
    if not protocol.benchmarks:
        others = [other.name for other in PROTOCOLS.values() if other.benchmarks]
        raise ValueError(f"protocol {protocol.name} has no suite {name}; choose one of {', '.join(others)}")
    for dataset in only:
        protocol.check_dataset(dataset)
    return list(only or protocol.benchmarks)


def default_draws(protocol: Protocol, orders: Orders | None) -> int:
    """Return the Monte Carlo draws per sequence: fewer where each of them consists of several orders."""
    return protocol.draws if orders is None else max(2, protocol.draws // 16)
