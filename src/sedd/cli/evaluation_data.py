"""The data of commands that evaluate: checked and described, then read."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sedd.evaluation import Corpus, Protocol
    from sedd.loading import LoadedModel


def check_source(source: str) -> None:
    """Reject a text that does not exist or is of an unknown kind."""
    from sedd.data import expand_sources, is_prepared

    if not is_prepared(source):
        expand_sources([source])


def describe_source(source: str) -> str:
    """Return a text that was checked and the size of its files: book.txt (1.1 MB)."""
    from sedd.data import Index, expand_sources, is_prepared

    if is_prepared(source):
        return f"{source} ({Index.read(Path(source)).tokens:,} tokens)"
    found = [file for part in expand_sources([source]) for file in part.files]
    if not found:  # a data set on the Hub
        return source
    size = sum(map(os.path.getsize, found))
    return f"{source} ({f'{size / 1e6:,.1f} MB' if size >= 1e5 else f'{size:,} bytes'})"


def check_data(
    data: str | None, protocol: "Protocol", suite: str | None = None, dataset: list[str] | None = None
) -> str:
    """Reject data that is missing or does not fit the protocol; return what is evaluated."""
    from sedd import evaluation

    if suite is not None:
        names = evaluation.suite_datasets(suite, protocol, dataset)
        for name in names:
            protocol.find_file(Path(data or "."), name)
        return f"{', '.join(names)} in {data or '.'}"
    if dataset and len(dataset) > 1:
        raise ValueError(f"dataset is {' and '.join(dataset)}; name one for a file, several only with --suite")
    if dataset:
        protocol.check_dataset(dataset[0])
    if data is not None:
        check_source(data)
        return describe_source(data)
    if not protocol.uses_validation_split:
        raise ValueError(
            f"protocol {protocol.name} needs DATA: name a file, or leave --protocol out to evaluate the validation "
            "split of the run's own data"
        )
    return "validation split"


def corpora(
    loaded: "LoadedModel",
    data: str | None,
    protocol: "Protocol",
    suite: str | None = None,
    dataset: list[str] | None = None,
    column: str | None = None,
    encoding: str = "utf-8",
    advice: str = "sedd eval RUN DATA --protocol held-out",
) -> "Iterator[Corpus]":
    """Yield the texts to evaluate, which `check_data` has checked.

    With protocol held-out, ``data`` is the place of the run's own data; ``advice`` says how to name it.
    """
    from sedd import evaluation
    from sedd.training.datasets import find_sources, prepare_data, require_sources

    if suite is not None:
        for name in evaluation.suite_datasets(suite, protocol, dataset):
            path = protocol.find_file(Path(data or "."), name)
            yield evaluation.read_corpus(str(path), protocol, loaded, name, column, encoding)
    elif protocol.uses_validation_split:
        config = find_sources(loaded.config, loaded.folder)
        if data is not None:
            config = replace(config, data=replace(config.data, sources=[data]))
        else:
            require_sources(config, loaded.folder, advice)
        yield evaluation.validation_corpus(prepare_data(config), replace(loaded, config=config))
    else:
        assert data is not None
        yield evaluation.read_corpus(data, protocol, loaded, dataset[0] if dataset else None, column, encoding)
