"""The data of a run, as shards."""

import os
from collections.abc import Callable
from pathlib import Path

from sedd import data, factory
from sedd.config import RunConfig


def prepared(config: RunConfig, progress: Callable[[int, int], None] | None = None) -> Path:
    """The shards of a run: made once for each content and kept in a cache, or a folder of them as it is."""
    chosen = config.data
    if not chosen.sources:
        raise ValueError("no data was given; name a file or a folder, as in: sedd train book.txt --out run")
    if len(chosen.sources) == 1 and data.is_prepared(chosen.sources[0]):
        folder = Path(chosen.sources[0])
        if chosen.label is not None and data.Index.read(folder).labels is None:
            raise ValueError(f"label is {chosen.label!r}, and {folder} was prepared without; prepare it with --label")
        return folder
    return data.prepare_cached(
        chosen.sources,
        chosen.tokenizer,
        lambda: factory.build_tokenizer(
            chosen.tokenizer, lambda: data.read_documents(chosen.sources, chosen.column, chosen.packing)
        ),
        cache=Path(os.environ.get("SEDD_CACHE", Path.home() / ".cache" / "sedd")) / "data",
        packing=chosen.packing,
        length=config.model.seq_len if chosen.packing == "lines" else None,
        pad=chosen.pad if chosen.packing == "lines" else None,
        column=chosen.column,
        label=chosen.label,
        on_progress=progress,
    )
