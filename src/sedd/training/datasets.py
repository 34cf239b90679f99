"""The data of a run: prepare shards of token ids and open their training and validation splits."""

from collections.abc import Callable
from pathlib import Path

from sedd import data
from sedd.cache import cache_folder
from sedd.runtime.distributed import Ranks
from sedd.terminal import warn
from sedd.training.config import RunConfig


def prepare_data(config: RunConfig, on_progress: Callable[[int, int], None] | None = None) -> Path:
    """Return the folder of the run's shards, checked: a prepared folder, else tokenized once and cached by content.

    Args:
        config: ``data`` and ``model.seq_len`` are read.
        on_progress: Called with (bytes done, bytes in total).
    """
    options = config.data
    if len(options.sources) == 1 and data.is_prepared(options.sources[0]):
        folder = Path(options.sources[0])
        if options.label is not None and data.Index.read(folder).labels is None:
            raise ValueError(
                f"label is {options.label!r}, and {folder} was prepared without labels; prepare it with --label"
            )
        data.TokenBlocks.open(folder, config.model.seq_len, "all", check=True)
        data.repeat_notes(folder)
        if _saw_held_out(folder, config):
            warn(
                f"the tokenizer of {folder} was fitted to text that is held out here; prepare it with "
                f"--val-fraction {options.val_fraction:g} or more"
            )
        return folder
    fraction = options.fitted_fraction
    while _saw_held_out(folder := _prepare(config, fraction, on_progress), config):
        fraction /= 2
        warn(f"the tokenizer saw held-out text; fitting it again, to the first {fraction:.0%} of the data")
    return folder


def _saw_held_out(folder: Path, config: RunConfig) -> bool:
    """Whether the tokenizer was fitted to text that this run holds out."""
    if data.Index.read(folder).fitted is None:
        return False
    return data.TokenBlocks.open(folder, config.model.seq_len, "train", config.data.val_fraction).tokenizer_saw_more


def _prepare(config: RunConfig, fraction: float, on_progress: Callable[[int, int], None] | None) -> Path:
    """Return the folder of prepared data whose tokenizer saw the first ``fraction`` of the text."""
    options = config.data
    encoding = data.TextEncoding.for_tokenizer(options.tokenizer, options.encoding)
    return data.prepare_cached(
        options.sources,
        options.tokenizer,
        lambda: data.fit_tokenizer(
            options.tokenizer, options.sources, options.column, options.packing, encoding, fraction
        ),
        cache=cache_folder() / "data",
        packing=options.packing,
        length=config.model.seq_len if options.packing == "lines" else None,
        pad="ignore" if options.packing == "lines" and options.pad == "ignore" else None,
        column=options.column,
        label=options.label,
        encoding=options.encoding,
        fraction=fraction,
        on_progress=on_progress,
    )


def open_datasets(
    config: RunConfig, prepare: Callable[[], Path], ranks: Ranks
) -> tuple[data.TokenBlocks, data.TokenBlocks]:
    """Open the training and validation sequences; one process per machine prepares and checks them first.

    Args:
        prepare: Prepares the data and returns its folder.
    """

    def open_blocks(folder: Path, split: str) -> data.TokenBlocks:
        name = ", ".join(config.data.sources)
        return data.TokenBlocks.open(folder, config.model.seq_len, split, config.data.val_fraction, name=name)

    folder = ranks.once_per_node(lambda: open_blocks(prepare(), "train").folder)
    train = open_blocks(folder, "train")
    train.text_per_token()  # decodes the held-out text once, before the clock starts
    return train, open_blocks(folder, "validation")
