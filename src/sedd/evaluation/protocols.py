"""Protocols: every fact a published likelihood depends on besides model and text, under one name.

Two numbers may stand in one table if their protocols are the same. No torch here.
"""

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, final

from sedd.evaluation import detokenize
from sedd.evaluation.packing import Batches, Packing, Stream, Whole

ALL_TERMS = ("diffusion", "prior", "reconstruction")


class Eos(StrEnum):
    """Where end-of-text tokens stand."""

    NONE = "none"
    BETWEEN = "between documents, where the tokenizer has one"
    AFTER = "after every row"


@final
@dataclass(frozen=True)
class Dataset:
    """A benchmark: how its files become rows of text, and what they are called."""

    title: str
    detokenize: detokenize.Detokenizer
    keeps_ends: bool
    """Whether a row keeps its line end and empty lines are rows; else lines are stripped and empty ones are none."""
    files: Mapping[str, tuple[str, ...]]
    """How file names begin, by split."""

    def split_of(self, path: Path) -> str | None:
        """Which split a file is, by its name."""
        return next((split for split, names in self.files.items() if path.name.startswith(names)), None)

    def rows(self, document: str) -> list[str]:
        """The rows of a text file."""
        lines = document.removesuffix("\n").split("\n")
        if self.keeps_ends:
            return [self.detokenize(line + "\n") if line.strip() else "" for line in lines]
        return [self.detokenize(line.strip()) for line in lines if line.strip()]


DATASETS: Mapping[str, Dataset] = {
    "lambada": Dataset("LAMBADA", detokenize.lambada, False, {"test": ("lambada",)}),
    "wikitext2": Dataset(
        "WikiText-2",
        detokenize.wikitext,
        True,
        {"train": ("wikitext2-train",), "validation": ("wikitext2-valid",), "test": ("wikitext2-test",)},
    ),
    "ptb": Dataset(
        "PTB", detokenize.ptb, False, {"train": ("ptb.train",), "validation": ("ptb.valid",), "test": ("ptb.test",)}
    ),
    "wikitext103": Dataset(
        "WikiText-103",
        detokenize.wikitext,
        True,
        # the raw test files of WikiText-2 and -103 are the same articles
        {"validation": ("wikitext103-valid",), "test": ("wikitext103-test", "wikitext-raw-test")},
    ),
    "lm1b": Dataset(
        "LM1B", detokenize.lm1b, False, {"validation": ("lm1b-valid",), "test": ("lm1b-test", "lm1b-sample")}
    ),
}


@final
@dataclass(frozen=True)
class Protocol:
    """How text becomes sequences, and what of their likelihood is reported."""

    name: str
    split: str
    """Which part of a data set is scored."""
    length: int | None
    """Tokens in a sequence; None: as many as the model was trained on."""
    eos: Eos
    packing: Packing
    terms: tuple[str, ...] = ALL_TERMS
    t_min: float = 0.0
    """Published tables look at times from here to 1."""
    draws: int = 8
    """For each sequence, unless more or fewer are asked for: they decide the error, not the value."""
    precision: str = "float32"
    benchmarks: tuple[str, ...] = ()
    """Data sets that it knows how to detokenize; without any, text is taken as it is."""
    splits: Mapping[str, str] = field(default_factory=dict)
    """Where the split of a data set is another."""
    characters: tuple[int, int] | None = None
    """Which part of the text."""
    alphabet: str | None = None
    tokens: int | None = None
    """The vocabulary that published numbers count in."""
    is_own: bool = False
    """Whether it scores what a run kept from its training, and no other text."""

    def facts(self) -> dict[str, Any]:
        """What a record says of it."""
        return {
            "protocol": self.name,
            "eos": str(self.eos),
            "packing": str(self.packing),
            "t_min": self.t_min,
            "precision": self.precision,
        }

    def split_for(self, dataset: str | None) -> str:
        """The split of a data set that is scored."""
        return self.splits.get(dataset or "", self.split)

    def dataset_of(self, path: Path) -> str:
        """The benchmark that a file belongs to, by its name; one of another split is refused."""
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
            f"{path.name} is none of the files that protocol {self.name} knows by name ({known}); say which data set "
            f"it is with --dataset {' | '.join(self.benchmarks)}"
        )

    def file_in(self, folder: Path, dataset: str) -> Path:
        """The file of a data set in a folder."""
        prefixes = self._prefixes(dataset)
        found = sorted(path for path in folder.iterdir() if path.name.startswith(prefixes)) if folder.is_dir() else []
        if not found:
            raise ValueError(
                f"{folder} holds no {DATASETS[dataset].title} ({self.split_for(dataset)}); protocol {self.name} looks "
                f"for a file that begins with {' or '.join(prefixes)}"
            )
        return found[0]

    def _prefixes(self, dataset: str) -> tuple[str, ...]:
        return DATASETS[dataset].files.get(self.split_for(dataset), (f"{dataset}-{self.split_for(dataset)}",))


SUITES = ("zero-shot",)
ALONE = Protocol("alone", "each text by itself", None, Eos.NONE, Whole(), draws=128)

PROTOCOLS: Mapping[str, Protocol] = {
    found.name: found
    for found in (
        Protocol("strict", "all that is given", None, Eos.BETWEEN, Whole()),
        Protocol("held-out", "the last blocks of a run's data", None, Eos.BETWEEN, Stream(), is_own=True),
        Protocol(
            "text8p",
            "characters 69M to 74M of text8",
            length=256,
            eos=Eos.NONE,
            packing=Stream(),
            characters=(69_000_000, 74_000_000),
            alphabet=" " + string.ascii_lowercase,
        ),
        Protocol(
            "sedd",
            "test",
            length=1024,
            eos=Eos.AFTER,
            packing=Batches(),
            terms=("diffusion",),
            t_min=1e-3,
            benchmarks=tuple(DATASETS),
            splits={"wikitext2": "train"},
            tokens=50_257,
        ),
        Protocol(
            "mdlm",
            "validation",
            length=1024,
            eos=Eos.NONE,
            packing=Stream(),
            terms=("diffusion",),
            t_min=1e-3,
            benchmarks=("lambada", "ptb", "wikitext103", "lm1b"),
            splits={"lambada": "test"},
            tokens=50_257,
        ),
    )
}


def protocol(name: str) -> Protocol:
    """A protocol by its name."""
    if name not in PROTOCOLS:
        raise ValueError(f"protocol is {name!r}; choose one of {', '.join(PROTOCOLS)}")
    return PROTOCOLS[name]


def suite(name: str, protocol: Protocol, only: Sequence[str] | None) -> list[str]:
    """The data sets of a suite under a protocol, or those of them that are asked for."""
    if name not in SUITES:
        raise ValueError(f"suite is {name!r}; choose one of {', '.join(SUITES)}")
    if not protocol.benchmarks:
        others = [other.name for other in PROTOCOLS.values() if other.benchmarks]
        raise ValueError(f"protocol {protocol.name} has no suite {name}; choose one of {', '.join(others)}")
    if strange := [dataset for dataset in only or [] if dataset not in protocol.benchmarks]:
        known = ", ".join(protocol.benchmarks)
        raise ValueError(f"dataset is {strange[0]!r}; protocol {protocol.name} knows {known}")
    return list(only or protocol.benchmarks)
