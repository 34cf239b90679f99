"""Where a run finds its data: stored by absolute path, and found again if it was moved together with the run."""

import os
from dataclasses import replace
from pathlib import Path

from sedd import data, registry
from sedd.data.readers import read_chunks
from sedd.data.token_files import refuse_fitting
from sedd.tokenizer import check_tokenizer
from sedd.training import checkpoint
from sedd.training.config import DataConfig, RunConfig


def check_data(options: DataConfig) -> None:
    """Refuse data that cannot be read, before any work: the first records of every source are read."""
    if not options.sources:
        raise ValueError("no data was given; name a file or a folder, as in: sedd train book.txt --out run")
    if len(options.sources) == 1 and data.is_prepared(options.sources[0]):
        return
    check_tokenizer(options.tokenizer)
    encoding = data.TextEncoding.for_tokenizer(options.tokenizer, options.encoding)
    for source in data.expand_sources(options.sources):
        refuse_fitting(source.files, options.tokenizer)
        if source.files:  # a data set of the Hub is not downloaded for this
            next(read_chunks([source], options.column, options.packing, options.label, encoding), None)


def with_absolute_paths(config: RunConfig, out: Path) -> RunConfig:
    """Return the configuration of the run in ``out`` with absolute paths: of itself, its sources and its tokenizer."""
    sources, tokenizer = [_absolute(source) for source in config.data.sources], config.data.tokenizer
    is_name = tokenizer.partition(":")[0] in registry.TOKENIZERS.names  # also where a file has the same name
    data = replace(config.data, sources=sources, tokenizer=tokenizer if is_name else _absolute(tokenizer))
    return replace(config, data=data, out=os.path.abspath(out))


def _absolute(name: str) -> str:
    """Return the absolute path of a file or folder; other names, as of a tokenizer or hf:NAME, are left as they are."""
    return os.path.abspath(name) if os.path.exists(name) else name


def find_sources(config: RunConfig, folder: Path) -> RunConfig:
    """Return the configuration of a run with its data where it is now; what is not found is left as it is.

    What is no longer at its path is searched at the same position relative to the run; a tokenizer that is not there
    either is read from the checkpoint.

    Args:
        folder: The run, or one of its checkpoints.
    """
    run = checkpoint.run_folder(folder)
    sources = [_find(source, config.out, run) or source for source in config.data.sources]
    tokenizer = config.data.tokenizer
    if os.path.isabs(tokenizer):
        copies = [*checkpoint.list_checkpoints(run / checkpoint.CHECKPOINTS), folder]
        tokenizer = _find(tokenizer, config.out, run) or str(copies[0])
    return replace(config, data=replace(config.data, sources=sources, tokenizer=tokenizer))


def require_sources(config: RunConfig, folder: Path, advice: str) -> None:
    """Raise an error that names the run and the first of its sources that does not exist.

    Args:
        config: As `find_sources` returns it.
        folder: The run, or one of its checkpoints.
        advice: How to name the new place of the data.
    """
    for source in config.data.sources:
        if not source.startswith("hf:") and not os.path.exists(source):
            raise ValueError(
                f"the run {checkpoint.run_folder(folder)} was trained on {source}, which does not exist now; if it "
                f"was moved, name its new place: {advice}"
            )


def _find(path: str, old_run: str | None, run: Path) -> str | None:
    """Return where a path is now: as it was, or where it was relative to the run; None if it is in neither place."""
    if os.path.exists(path):
        return path
    if old_run is None or not os.path.isabs(path):
        return None
    moved = os.path.normpath(run.absolute() / os.path.relpath(path, old_run))
    return moved if os.path.exists(moved) else None
