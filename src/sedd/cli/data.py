"""``sedd data``: tokenize corpora into shards on disk; ``sedd cache``: the cache of them and of converted models."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from sedd.cache import KINDS, cache_entries, cache_folder, clear_cache
from sedd.cli import root
from sedd.terminal import warn

data = root.App(help="Tokenize corpora into shards on disk.", no_args_is_help=True)
root.app.add_typer(data, name="data")


@data.command("prepare")
def data_prepare(
    sources: Annotated[list[str], typer.Argument(help=f"{root.SOURCES_HELP}.")],
    out: Annotated[Path, typer.Option(help="Folder to write; it must be new or empty.")],
    tokenizer: Annotated[str, typer.Option(help=root.TOKENIZER_HELP, show_default=False)] = "bytes",
    packing: Annotated[str | None, typer.Option(help=root.PACKING_HELP)] = None,
    length: Annotated[
        int | None,
        typer.Option(help="Most tokens of a record, with --packing lines; longer ones are left out."),
    ] = None,
    pad: Annotated[
        str | None,
        typer.Option(
            help="Padding of shorter sequences, with --packing lines: model (a learned token) or ignore "
            "(left out of the loss)."
        ),
    ] = None,
    column: root.Column = None,
    encoding: root.Encoding = None,
    label: Annotated[str | None, typer.Option(help=root.LABEL_HELP)] = None,
    val_fraction: Annotated[
        float, typer.Option(help="What training will hold out at the end; bpe is fitted to what comes before it.")
    ] = 0.05,
    workers: Annotated[int | None, typer.Option(help="Parallel workers; by default one per core.")] = None,
    as_json: root.AsJson = False,
) -> None:
    """Tokenize a corpus into memory-mapped shards with an index, hashes and the tokenizer."""
    from sedd.data import expand_sources, fit_tokenizer, prepare
    from sedd.data.token_files import refuse_fitting
    from sedd.training.config import DataConfig

    packing, encoding = packing or ("packed" if label is None else "lines"), encoding or "utf-8"
    refuse_fitting([file for source in expand_sources(sources) for file in source.files], tokenizer)
    with root.stderr_progress("fitting the tokenizer"):
        fraction = DataConfig(tokenizer=tokenizer, val_fraction=val_fraction).fitted_fraction
        built = fit_tokenizer(tokenizer, sources, column, packing, encoding, fraction)
    if not built.is_lossless:
        warn(f"{tokenizer} is not lossless; decoded text may differ from the text encoded")
    with root.stderr_progress("encoding") as on_progress:
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
        print(json.dumps(row))
        return
    padding = {
        None: "none is shorter, so there is no padding",
        "model": "shorter ones are padded with a token that the model learns",
        "ignore": "shorter ones are padded, and padding is left out of the loss",
    }[index.pad]
    root.show(
        f"{out}: {index.tokens} tokens in {index.records} records, {row['bytes_per_token']:.4f} bytes per token, "
        f"vocabulary of {index.vocab_size}"
        + (f"; records of {index.length} tokens, {padding}" if index.length is not None else "")
    )


@root.app.command("cache")
def show_cache(
    clear: Annotated[
        bool, typer.Option("--clear", help="Remove what it holds; it is made again when it is needed.")
    ] = False,
    as_json: root.AsJson = False,
) -> None:
    """Print the folder of prepared data and converted models (SEDD_CACHE, by default ~/.cache/sedd) and their size."""
    entries = clear_cache() if clear else list(cache_entries())
    sizes = {kind: sum(entry.bytes for entry in entries if entry.kind == kind) for kind in KINDS}
    sizes["total"] = sum(sizes.values())
    record: dict[str, Any] = {"folder": str(cache_folder()), **({"removed": len(entries)} if clear else {})}
    if as_json:
        record |= {f"{kind}_bytes": size for kind, size in sizes.items()}
    else:
        record |= {kind: f"{size / 2**20:,.1f} MiB" for kind, size in sizes.items()}
    root.print_record(record, as_json)
