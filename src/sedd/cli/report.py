"""``sedd report``: one page about a run."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from sedd import files
from sedd.cli.root import AsJson, Device, Networks, announce, app, check_out, count_of, print_record, writing_to


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="Folder of a run, finished or not.")],
    out: Annotated[Path | None, typer.Option(help="Page to write; by default report.html in the run's folder.")] = None,
    samples: Annotated[int, typer.Option(help="Number of samples to show.")] = 4,
    seed: Annotated[int, typer.Option(help="Random seed of the samples, if they are generated now.")] = 0,
    device: Device = None,
    network: Networks = None,
    as_json: AsJson = False,
) -> None:
    """Write an HTML page about a run: training curves, loss by noise level, samples, bound, configuration.

    The page is a single file without scripts or external links.
    """
    from sedd.evaluation import report as reports

    path = out or run / "report.html"
    history = reports.read_run(run)
    check_out(path)
    reports.check_samples(samples)
    announce(f"{run}: {count_of(len(history.records), 'record')} of its log, {count_of(samples, 'sample')}, to {path}")
    with Console(stderr=True).status("sampling"):
        texts = reports.report_samples(history, samples, seed, device)
    with writing_to(path):
        files.write_text(path, reports.render_report(history, texts))
    print_record({"report": str(path), "step": history.records[-1]["step"], "samples": len(texts.texts)}, as_json)
