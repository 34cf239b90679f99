"""``sedd cache``: the size of the cache, and removing it."""

import typer

from sedd.cache import KINDS, CacheEntry, cache_entries, cache_folder, clear_cache
from sedd.cli.root import App, AsJson, app, print_record

cache = App()
app.add_typer(cache, name="cache", invoke_without_command=True)


@cache.callback(invoke_without_command=True)
def show_cache(context: typer.Context) -> None:
    """Prepared data and converted models on disk: their size, and removing them."""
    if context.invoked_subcommand is None:
        cache_size()


@cache.command("size")
def cache_size(as_json: AsJson = False) -> None:
    """Print the folder of the cache (SEDD_CACHE, by default ~/.cache/sedd), and how much it holds of each kind."""
    print_record({"folder": str(cache_folder()), **_sizes(list(cache_entries()), as_json)}, as_json)


@cache.command("clear")
def cache_clear(as_json: AsJson = False) -> None:
    """Remove prepared data and converted models; they are made again when they are needed."""
    entries = clear_cache()
    print_record({"folder": str(cache_folder()), "removed": len(entries), **_sizes(entries, as_json)}, as_json)


def _sizes(entries: list[CacheEntry], as_json: bool) -> dict[str, int | str]:
    """Return the bytes of each kind and in all; for people, in units that they read."""
    sizes = {kind: sum(entry.bytes for entry in entries if entry.kind == kind) for kind in KINDS}
    sizes["total"] = sum(sizes.values())
    return {f"{kind}_bytes": size for kind, size in sizes.items()} if as_json else _readable(sizes)


def _readable(sizes: dict[str, int]) -> dict[str, int | str]:
    return {kind: f"{size / 2**20:,.1f} MiB" for kind, size in sizes.items()}
