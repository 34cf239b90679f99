"""The data of a run: find its files, prepare shards of token ids, open the training and validation splits.

Sources are stored by absolute path, and found again if they were moved together with the run.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sedd import data, registry
from sedd.cache import cache_folder
from sedd.data.readers import read_chunks
from sedd.data.token_files import refuse_fitting
from sedd.terminal import warn
from sedd.tokenizer import check_tokenizer
from sedd.training import checkpoint
from sedd.training.config import DataConfig, RunConfig

if TYPE_CHECKING:
    from sedd.runtime.distributed import Ranks


def prepare_data(config: RunConfig, on_progress: Callable[[int, int], None] | None = None) -> Path:
    """Return the folder of the run's shards, checked: a prepared folder, else tokenized once and cached by content."""
    options = config.data
    if len(options.sources) == 1 and data.is_prepared(options.sources[0]):
        folder = Path(options.sources[0])
        if options.label is not None and data.Index.read(folder).labels is None:
            raise ValueError(f"label is {options.label!r}, and {folder} was prepared without --label; prepare it again")
        data.TokenBlocks.open(folder, config.model.seq_len, "all", check=True)
        data.repeat_notes(folder)
        if _saw_held_out(folder, config):
            advice = f"prepare it with --val-fraction {options.val_fraction:g} or more"
            warn(f"the tokenizer of {folder} was fitted to text that is held out here; {advice}")
        return folder
    is_lines, fraction = options.packing == "lines", options.fitted_fraction
    fitted_to = (options.tokenizer, options.sources, options.column, options.packing, options.encoding)
    while True:
        folder = data.prepare_cached(
            options.sources,
            options.tokenizer,
            partial(data.fit_tokenizer, *fitted_to, fraction),
            cache=cache_folder() / "data",
            packing=options.packing,
            length=config.model.seq_len if is_lines else None,
            pad="ignore" if is_lines and options.pad == "ignore" else None,
            column=options.column,
            label=options.label,
            encoding=options.encoding,
            fraction=fraction,
            on_progress=on_progress,
        )
        if not _saw_held_out(folder, config):
            return folder
        fraction /= 2
        warn(f"the tokenizer saw held-out text; fitting it again, to the first {fraction:.0%} of the data")


def _saw_held_out(folder: Path, config: RunConfig) -> bool:
    """Whether the tokenizer was fitted to text that this run holds out."""
    if data.Index.read(folder).fitted is None:
        return False
    return data.TokenBlocks.open(folder, config.model.seq_len, "train", config.data.val_fraction).tokenizer_saw_more


def open_datasets(
    config: RunConfig, prepare: Callable[[], Path], ranks: "Ranks"
) -> tuple[data.TokenBlocks, data.TokenBlocks]:
    """Open the training and validation sequences; one process per machine prepares and checks them first."""

    def open_blocks(folder: Path, split: str) -> data.TokenBlocks:
        name = ", ".join(config.data.sources)
        return data.TokenBlocks.open(folder, config.model.seq_len, split, config.data.val_fraction, name=name)

    folder = ranks.once_per_node(lambda: open_blocks(prepare(), "train").folder)
    train = open_blocks(folder, "train")
    train.text_per_token()  # decodes the held-out text once, before the clock starts
    return train, open_blocks(folder, "validation")


def check_data(options: DataConfig) -> None:
    """Reject data that cannot be read, before any work: read the first records of every source."""
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

    def absolute(name: str) -> str:
        return os.path.abspath(name) if os.path.exists(name) else name  # also hf:NAME

    sources, tokenizer = [absolute(source) for source in config.data.sources], config.data.tokenizer
    is_name = tokenizer.partition(":")[0] in registry.TOKENIZERS.names  # also where a file has the same name
    options = replace(config.data, sources=sources, tokenizer=tokenizer if is_name else absolute(tokenizer))
    return replace(config, data=options, out=os.path.abspath(out))


def find_sources(config: RunConfig, folder: Path) -> RunConfig:
    """Return the configuration of a run with its data where it is now; what is not found is left as it is.

    ``folder`` is the run or one of its checkpoints. What is no longer at its path is searched at the same position
    relative to the run; a tokenizer that is not there either is read from the checkpoint.
    """
    run = checkpoint.run_folder(folder)
    sources = [_find(source, config.out, run) or source for source in config.data.sources]
    tokenizer = config.data.tokenizer
    if os.path.isabs(tokenizer):
        copies = [*checkpoint.list_checkpoints(run / checkpoint.CHECKPOINTS), folder]
        tokenizer = _find(tokenizer, config.out, run) or str(copies[0])
    return replace(config, data=replace(config.data, sources=sources, tokenizer=tokenizer))


def require_sources(config: RunConfig, folder: Path, advice: str) -> None:
    """Raise an error that names the run and the first of its sources that does not exist, after `find_sources`."""
    for source in config.data.sources:
        if not source.startswith("hf:") and not os.path.exists(source):
            what = f"the run {checkpoint.run_folder(folder)} was trained on {source}, which does not exist now"
            raise ValueError(f"{what}; if it was moved, name its new place: {advice}")


def _find(path: str, old_run: str | None, run: Path) -> str | None:
    """Return where a path is now: as it was, or where it was relative to the run; None if it is in neither place."""
    if os.path.exists(path):
        return path
    if old_run is None or not os.path.isabs(path):
        return None
    moved = os.path.normpath(run.absolute() / os.path.relpath(path, old_run))
    return moved if os.path.exists(moved) else None
