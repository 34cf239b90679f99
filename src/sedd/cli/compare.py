"""``sedd compare``: runs side by side."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from sedd.cli.evaluate import Batch, Draws, ProtocolName, Seed, describe_draws
from sedd.cli.evaluation_data import check_data, corpora
from sedd.cli.root import AsJson, Device, Networks, announce, app, check_out, show, stderr_progress
from sedd.terminal import warn


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs.")],
    data: Annotated[
        str | None,
        typer.Option(help="Text to evaluate the runs on; by default the validation split of their data."),
    ] = None,
    protocol: ProtocolName = None,
    draws: Draws = None,
    batch: Batch = None,
    device: Device = None,
    network: Networks = None,
    seed: Seed = 0,
    plot: Annotated[Path, typer.Option(help="Plot to write: .png, or .html for a page.")] = Path("compare.png"),
    as_json: AsJson = False,
) -> None:
    """Compare runs: a table of validation bounds with standard errors, and a plot of the training curves.

    All runs are evaluated on the same text by the same protocol; runs trained on different data need --data. Runs that
    differ by their seed alone also have a row with their mean ± standard deviation. What else differs is named.
    """
    from sedd import evaluation
    from sedd.evaluation import compare as comparison
    from sedd.likelihood.variance_reduction import check_draws
    from sedd.training import checkpoint

    chosen_protocol = evaluation.get_protocol(protocol or ("strict" if data else "held-out"))
    path, curves, rows = comparison.check_plot_path(plot), [comparison.read_curve(run) for run in runs], []
    check_out(path)
    stored = [checkpoint.peek_model(run) for run in runs]
    if draws is not None:
        check_draws(draws)
    where = check_data(data, chosen_protocol)
    # a run that cannot be read is refused with torch; diffusion models have draws, and one of them is enough
    configs = [model.config for model in stored if model]
    config = next((c for c in configs if c.objective != "autoregressive"), configs[0] if configs else None)
    how = describe_draws(draws or chosen_protocol.draws, config)
    announce(f"{', '.join(map(str, runs))}: {where}, protocol {chosen_protocol.name}, {how}, seed {seed}")
    from sedd.loading import LoadedModel, load_model
    from sedd.runtime import distributed

    with distributed.process_group(device) as ranks:

        @checkpoint.retry_if_pruned
        def load(run: Path | str) -> tuple[LoadedModel, dict[str, Any]]:
            loaded = load_model(run, device=str(ranks.device))
            return loaded, checkpoint.read_state(loaded.folder)

        models, states = zip(*map(load, runs), strict=True)
        advice = "--data DATA --protocol held-out"
        texts = [text for model in models for text in corpora(model, data, chosen_protocol, advice=advice)]
        comparison.require_same_data([str(run) for run in runs], texts)
        for run, model, state, corpus in zip(runs, models, states, texts, strict=True):
            with stderr_progress(str(run), shown=ranks.is_main) as on_progress:
                record = evaluation.evaluate(
                    model, corpus, chosen_protocol, ranks, draws=draws, batch=batch, seed=seed, on_progress=on_progress
                )
            rows.append(comparison.run_record(run, model, state, record))
        first = ranks.is_main
    if first:
        trained = [model.config for model in models]
        means = comparison.seed_means(rows, trained)
        comparison.write_comparison(rows, means, curves, path)
        if difference := comparison.describe_differences(trained, [row["parameters"] for row in rows]):
            warn(difference)
        _print(rows, means, as_json)


def _print(rows: list[dict[str, object]], means: list[dict[str, object]], as_json: bool) -> None:
    from sedd.evaluation import compare as comparison

    cells = comparison.table_cells([*rows, *means])
    if as_json:
        for row in rows:
            print(json.dumps(row))
        return
    header = [name.replace("_", " ") for name in comparison.COLUMNS]
    for words in (header, ["---"] * len(header), *cells):
        show(f"| {' | '.join(words)} |")
