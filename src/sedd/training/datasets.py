"""The data of a run: prepare shards of token ids and open their training and validation splits."""

from collections.abc import Callable
from pathlib import Path

from sedd import data
from sedd.border import warn
from sedd.cache import cache_folder
from sedd.config import RunConfig
from sedd.runtime.distributed import Ranks


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
        return folder
    fraction = options.fitted_fraction
    while _reaches_held_out(folder := _prepare(config, fraction, on_progress), config, fraction):
        fraction /= 2
        warn(f"held-out tokens are long; fitting the tokenizer again, to the first {fraction:.0%} of the text")
    return folder


def _reaches_held_out(folder: Path, config: RunConfig, fraction: float) -> bool:
    """Whether the first ``fraction`` of the characters reaches into the held-out blocks; of records it cannot."""
    if fraction == 1 or config.data.packing == "lines":
        return False
    blocks = data.TokenBlocks.open(folder, config.model.seq_len, "train", config.data.val_fraction)
    return fraction * blocks.index.characters > blocks.characters


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
        config: The run.
        prepare: Prepares the data and returns its folder.
        ranks: The processes of the run.
    """

    def open_blocks(folder: Path, split: str) -> data.TokenBlocks:
        name = ", ".join(config.data.sources)
        return data.TokenBlocks.open(folder, config.model.seq_len, split, config.data.val_fraction, name=name)

    folder = ranks.once_per_node(lambda: open_blocks(prepare(), "train").folder)
    return open_blocks(folder, "train"), open_blocks(folder, "validation")
