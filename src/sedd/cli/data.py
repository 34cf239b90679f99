"""``sedd data``: tokenize corpora into shards on disk; ``sedd cache``: the cache of them and of converted models."""

from pathlib import Path
from typing import Any

import typer

from sedd.cache import KINDS, cache_entries, cache_folder, clear_cache
from sedd.cli import root
from sedd.terminal import warn
from sedd.training.progress import progress_on_stderr

data = typer.Typer(cls=root.Group, help="Tokenize corpora into shards on disk.", no_args_is_help=True)
root.app.add_typer(data, name="data")


@root.command("prepare", data)
def data_prepare(
    sources: list[str],
    *,
    out: Path,
    tokenizer: str | None = None,
    packing: str | None = None,
    length: int | None = None,
    pad: str | None = None,
    column: str | None = None,
    encoding: str | None = None,
    label: str | None = None,
    val_fraction: float = 0.05,
    workers: int | None = None,
    as_json: bool = False,
) -> None:
    """Tokenize a corpus into memory-mapped shards with an index, hashes and the tokenizer.

    Args:
        out: Folder to write; it must be new or empty.
        length: Most tokens of a record, with --packing lines; longer ones are left out.
        pad: Padding of shorter sequences, with --packing lines: model (a learned token) or ignore (left out of the
            loss).
        val_fraction: What training will hold out at the end; bpe is fitted to what comes before it.
        workers: Parallel workers; by default one per core.
    """
    from sedd.data import expand_sources, fit_tokenizer, prepare
    from sedd.data.token_files import refuse_fitting
    from sedd.training.config import DataConfig

    tokenizer, encoding = tokenizer or "bytes", encoding or "utf-8"
    packing = packing or ("packed" if label is None else "lines")
    refuse_fitting([file for source in expand_sources(sources) for file in source.files], tokenizer)
    with progress_on_stderr("fitting the tokenizer"):
        fraction = DataConfig(tokenizer=tokenizer, val_fraction=val_fraction).fitted_fraction
        built = fit_tokenizer(tokenizer, sources, column, packing, encoding, fraction)
    if not built.is_lossless:
        warn(f"{tokenizer} is not lossless; decoded text may differ from the text encoded")
    with progress_on_stderr("encoding") as on_progress:
        form: dict[str, Any] = {"packing": packing, "length": length, "pad": pad, "column": column, "label": label}
        form |= {"encoding": encoding, "fraction": fraction, "workers": workers}
        index = prepare(sources, out, built, **form, on_progress=on_progress)
    row = {
        "folder": str(out),
        "tokens": index.tokens,
        "records": index.records,
        "vocab_size": index.vocab_size,
        "bytes_per_token": round(index.bytes / index.tokens, 4),
        "length": index.length,
        "pad": index.pad,
        **({"labels": index.labels.names} if index.labels else {}),
        "sha256": index.sha256,
    }
    if as_json:
        root.print_records([row])
    else:
        root.print_rows({name: value for name, value in row.items() if value is not None}, 16)


@root.command("cache")
def show_cache(*, clear: bool = False, as_json: bool = False) -> None:
    """Print the folder of prepared data and converted models (SEDD_CACHE, by default ~/.cache/sedd) and their size.

    Args:
        clear: Remove what it holds; it is made again when it is needed.
    """
    entries = clear_cache() if clear else list(cache_entries())
    sizes = {kind: sum(entry.bytes for entry in entries if entry.kind == kind) for kind in KINDS}
    sizes["total"] = sum(sizes.values())
    record: dict[str, Any] = {"folder": str(cache_folder()), **({"removed": len(entries)} if clear else {})}
    if as_json:
        record |= {f"{kind}_bytes": size for kind, size in sizes.items()}
    else:
        record |= {kind: f"{size / 2**20:,.1f} MiB" for kind, size in sizes.items()}
    root.print_record(record, as_json)
