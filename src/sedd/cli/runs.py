"""``sedd runs``, ``sedd compare`` and ``sedd report``: what runs have stored, side by side or on one page."""

import os
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from sedd import files
from sedd.cli import root
from sedd.cli.evaluate import likelihood_options
from sedd.cli.root import count_of
from sedd.terminal import warn
from sedd.training import checkpoint
from sedd.training.progress import progress_on_stderr

Run = dict[str, Any]
COLUMNS = ("run", "data", "objective", "parameters", "step", "best_bound", "date")


@root.command()
def runs(folder: Path = Path("."), *, as_json: bool = False) -> None:
    """List the runs below a folder, the newest first: data, parameters, steps, best validation bound, date.

    The bound is in nats per token; runs on different data or with different tokenizers cannot be compared by it.

    Args:
        folder: Folder to search, with all folders in it.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; name one that holds runs")
    found = sorted((_describe(path, folder) for path in _find(folder)), key=lambda run: run["date"], reverse=True)
    if as_json:
        root.print_records(found)
        return
    if not found:
        raise ValueError(f"there is no run in {folder} or below it; train one with: sedd train FILE --out {folder}/run")
    root.print_table(COLUMNS, [[_cell(run[name]) for name in COLUMNS] for run in found])


def _find(folder: Path) -> Iterator[Path]:
    """Yield the folders of runs, without hidden folders and those inside a run."""
    for name, folders, names in os.walk(folder):
        if "config.json" in names and ("log.jsonl" in names or "checkpoints" in folders):
            folders.clear()
            yield Path(name)
        folders[:] = sorted(below for below in folders if not below.startswith("."))


def _describe(path: Path, folder: Path) -> Run:
    """Read what a run has stored; a run that is damaged or has no checkpoint yet has gaps."""
    from sedd.runtime.run_log import read_log

    def read(function: Any, *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except (OSError, ValueError):
            return None

    newest = max((path / "checkpoints").glob("step-*"), default=path)
    config, state = read(checkpoint.read_run_config, path), read(checkpoint.read_state, newest) or {}
    steps = [record["step"] for record in (read(read_log, path) or [])[-1:]]
    header = read(checkpoint.read_header, newest)
    changed = max(file.stat().st_mtime for file in (path / "config.json", path / "log.jsonl") if file.exists())
    return {
        "run": str(path.relative_to(folder)) if path != folder else path.resolve().name,
        "folder": str(path),
        "data": ", ".join(Path(source).name for source in config.data.sources) if config else "",
        "objective": config and config.objective,
        "parameters": header and header.parameters,
        "step": max([state.get("step", 0), *steps]),
        "best_bound": state.get("best"),
        "date": datetime.fromtimestamp(changed).isoformat(" ", "minutes"),
    }


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}" if isinstance(value, float) else str(value)


@root.command()
@root.takes(option for option in likelihood_options if option.name in ("draws", "batch", "device", "seed"))
def compare(
    runs: list[Path],
    *,
    data: str | None = None,
    protocol: str | None = None,
    plot: Path = Path("compare.png"),
    as_json: bool = False,
    network: list[str] | None = None,
    **options: Any,
) -> None:
    """Compare runs: a table of validation bounds with standard errors, and a plot of the training curves.

    All runs are evaluated on the same text by the same protocol; runs trained on different data need --data. Runs that
    differ by their seed alone also have a row with their mean ± standard deviation. What else differs is named.

    Args:
        runs: Folders of runs.
        data: Text to evaluate the runs on; by default the validation split of their data.
        plot: Plot to write: .png, or .html for a page.
    """
    from sedd import evaluation
    from sedd.evaluation import compare as comparison
    from sedd.likelihood.variance_reduction import check_draws

    chosen = evaluation.get_protocol(protocol or ("strict" if data else "held-out"))
    root.check_out(plot, (".png", ".html"))
    curves = [comparison.read_curve(run) for run in runs]
    check_draws(options["draws"])
    device = options.pop("device")
    from sedd.loading import LoadedModel, load_model
    from sedd.runtime import distributed

    with distributed.process_group(device) as ranks:

        @checkpoint.retry_if_pruned
        def load(run: Path | str) -> tuple[LoadedModel, Run]:
            loaded = load_model(run, device=str(ranks.device))
            return loaded, checkpoint.read_state(loaded.folder)

        models, states = zip(*map(load, runs), strict=True)
        what = f"{', '.join(map(str, runs))}: {data or 'validation split'}, protocol {chosen.name}"
        root.announce(what, draws=options["draws"], seed=options["seed"])
        advice, rows = "--data DATA --protocol held-out", []
        texts = [text for model in models for text in evaluation.load_corpora(model, data, chosen, advice=advice)]
        if other := [run for run, text in zip(runs, texts, strict=True) if text.sha256 != texts[0].sha256]:
            raise ValueError(f"{runs[0]} and {other[0]} have different validation data; name one text with --data")
        for run, model, state, corpus in zip(runs, models, states, texts, strict=True):
            with progress_on_stderr(str(run), shown=ranks.is_main) as on_progress:
                record = evaluation.evaluate(model, corpus, chosen, ranks, on_progress=on_progress, **options)
            rows.append(comparison.run_record(run, model, state, record))
    if ranks.is_main:
        configs = [model.config for model in models]
        means = comparison.seed_means(rows, configs)
        with root.writing_to(plot):
            comparison.write_comparison(rows, means, curves, plot)
        if difference := comparison.describe_differences(configs, [row["parameters"] for row in rows]):
            warn(difference)
        if as_json:
            root.print_records(rows)
        else:
            root.print_table(comparison.COLUMNS, evaluation.likelihood_table([*rows, *means], comparison.COLUMNS))


@root.command()
def report(
    run: Path,
    *,
    out: Path | None = None,
    samples: int = 4,
    seed: int = 0,
    device: str | None = None,
    network: list[str] | None = None,
    as_json: bool = False,
) -> None:
    """Write an HTML page about a run: training curves, loss by noise level, samples, bound, configuration.

    The page is a single file without scripts or external links.

    Args:
        run: Folder of a run, finished or not.
        out: Page to write; by default report.html in the run's folder.
        samples: Number of samples to show.
        seed: Random seed of the samples, if they are generated now.
    """
    from sedd.evaluation import report as reports

    path = out or run / "report.html"
    history = reports.read_run(run)
    root.check_out(path)
    what = f"{count_of(len(history.records), 'record')} of its log, {count_of(samples, 'sample')}, to {path}"
    root.announce(what, run)
    with Console(stderr=True).status("sampling"):
        texts, origin = reports.report_samples(history, samples, seed, device)
    with root.writing_to(path):
        files.write_text(path, reports.render_report(history, texts, origin))
    root.print_record({"report": str(path), "step": history.records[-1]["step"], "samples": len(texts)}, as_json)
