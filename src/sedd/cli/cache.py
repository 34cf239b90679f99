"""``sedd cache``: the size of the cache, and removing it."""

from typing import Annotated

import typer

from sedd.cache import KINDS, CacheEntry, cache_entries, cache_folder, clear_cache
from sedd.cli.root import AsJson, app, print_record


@app.command("cache")
def show_cache(
    clear: Annotated[
        bool, typer.Option("--clear", help="Remove what it holds; it is made again when it is needed.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Print the folder of prepared data and converted models (SEDD_CACHE, by default ~/.cache/sedd) and their size."""
    entries = clear_cache() if clear else list(cache_entries())
    removed = {"removed": len(entries)} if clear else {}
    print_record({"folder": str(cache_folder()), **removed, **_sizes(entries, as_json)}, as_json)


def _sizes(entries: list[CacheEntry], as_json: bool) -> dict[str, int | str]:
    """Return the bytes of each kind and in all; for people, in units that they read."""
    sizes = {kind: sum(entry.bytes for entry in entries if entry.kind == kind) for kind in KINDS}
    sizes["total"] = sum(sizes.values())
    return {f"{kind}_bytes": size for kind, size in sizes.items()} if as_json else _readable(sizes)


def _readable(sizes: dict[str, int]) -> dict[str, int | str]:
    return {kind: f"{size / 2**20:,.1f} MiB" for kind, size in sizes.items()}
