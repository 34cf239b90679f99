"""``sedd report``."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from sedd.cli.root import AsJson, app, show


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="The folder of a run, finished or not.")],
    out: Annotated[Path | None, typer.Option(help="The page to write; report.html in the run by default.")] = None,
    samples: Annotated[int, typer.Option(help="How many texts to show.")] = 4,
    seed: Annotated[int, typer.Option(help="Decides the texts, where they are drawn now.")] = 0,
    as_json: AsJson = False,
) -> None:
    """One page about a run: curves, loss by noise level, samples, bound, configuration, environment.

    The page is a single file without scripts or links, to be opened, sent and kept.
    """
    from sedd.evaluation import report as reports

    history = reports.read_run(run)
    with Console(stderr=True).status("drawing samples"):
        texts = reports.report_samples(history, samples, seed)
    path = out or run / "report.html"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(reports.render_report(history, texts))
    except OSError as error:
        raise ValueError(f"{path} cannot be written to ({error.strerror}); choose another --out") from None
    show({"report": str(path), "step": history.records[-1]["step"], "samples": len(texts.texts)}, as_json)
