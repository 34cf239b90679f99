"""``sedd bench``: time and memory on this machine."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from sedd.cli.root import AsJson, app

if TYPE_CHECKING:
    from sedd.bench import Machine, Row

bench = typer.Typer(help="Time and memory on this machine, beside the plain path in one run.", no_args_is_help=True)
app.add_typer(bench, name="bench")

Process = Annotated[str, typer.Option(help="What noise does: absorbing or uniform.")]
Device = Annotated[str | None, typer.Option(help="cuda or cpu; by default cuda if there is one.")]
Vocabulary = Annotated[int | None, typer.Option("--vocab", help="Tokens; by default 50257, on a CPU 4096.")]
Precision = Annotated[str | None, typer.Option(help="bfloat16 or float32; by default bfloat16, on a CPU float32.")]
TrainPrecision = Annotated[
    str | None, typer.Option(help="float8, bfloat16 or float32; by default bfloat16, on a CPU float32.")
]
Repeats = Annotated[int, typer.Option(help="How many calls the median is taken of.")]


@bench.command("loss")
def bench_loss(
    process: Process = "absorbing",
    parameterization: Annotated[str, typer.Option(help="What the head says: score or mean.")] = "score",
    rows: Annotated[int | None, typer.Option(help="Positions; by default 65536, on a CPU 1024.")] = None,
    masked: Annotated[float, typer.Option(help="The share of them that noise has touched.")] = 0.5,
    width: Annotated[int | None, typer.Option(help="What the head reads; by default 768, on a CPU 128.")] = None,
    vocab: Vocabulary = None,
    precision: Precision = None,
    device: Device = None,
    repeats: Repeats = 15,
    as_json: AsJson = False,
) -> None:
    """Head and loss with all gradients: fused, and by the definition."""
    from sedd import bench as benches

    place = benches.place(device)
    setting = benches.LossSetting(
        process=process,
        parameterization=parameterization,
        rows=rows or place.rows,
        masked=masked,
        width=width or place.width,
        vocab_size=vocab or place.vocab_size,
        precision=precision or place.precision,
        device=place.device,
        repeats=repeats,
    )
    on = benches.machine(setting.device, setting.precision)
    _show(setting.__dict__, on, benches.LOSS_FLOPS, benches.loss(setting, on), as_json)


@bench.command("train")
def bench_train(
    recipe: Annotated[str | None, typer.Option(help="Whose network; by default small, on a CPU tiny.")] = None,
    process: Process = "absorbing",
    objective: Annotated[str, typer.Option(help="What is made small: score-entropy, lambda-dce …")] = "score-entropy",
    parameterization: Annotated[str | None, typer.Option(help="score or mean; by default what fits.")] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences a step; by default 64, on a CPU 8.")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens a sequence; by default the recipe's.")] = None,
    vocab: Vocabulary = None,
    precision: TrainPrecision = None,
    compile: Annotated[bool, typer.Option("--compile", help="Let torch compile the trunk instead.")] = False,
    record: Annotated[bool, typer.Option(help="Replay the launches of blocks on a GPU, where they can be.")] = True,
    recompute: Annotated[str, typer.Option(help="Activation checkpointing: none, selective or full.")] = "none",
    device: Device = None,
    repeats: Repeats = 20,
    as_json: AsJson = False,
) -> None:
    """A whole training step: loss, gradients, clipping, AdamW, average."""
    from sedd import bench as benches

    place = benches.place(device)
    setting = benches.TrainSetting(
        recipe=recipe or place.recipe,
        process=process,
        objective=objective,
        parameterization=parameterization,
        batch=batch or place.batch,
        length=length,
        vocab_size=vocab or place.vocab_size,
        precision=precision or place.precision,
        device=place.device,
        compile=compile,
        record=record,
        recompute=recompute,
        repeats=repeats,
    )
    on = benches.machine(setting.device, setting.precision)
    _show(setting.__dict__, on, benches.TRAIN_FLOPS, benches.train(setting, on), as_json)


@bench.command("sample")
def bench_sample(
    recipe: Annotated[str | None, typer.Option(help="Whose network; by default small, on a CPU tiny.")] = None,
    process: Process = "absorbing",
    objective: Annotated[
        str, typer.Option(help="What made the network: lambda-dce (a denoiser, not told the noise), score-entropy …")
    ] = "lambda-dce",
    sampler: Annotated[str | None, typer.Option(help="exact, tweedie, euler …; by default what fits.")] = None,
    steps: Annotated[int | None, typer.Option(help="From noise to text; by default 128, on a CPU 16.")] = None,
    batch: Annotated[int | None, typer.Option(help="Samples side by side; by default 16, on a CPU 4.")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens a sample; by default the recipe's.")] = None,
    vocab: Vocabulary = None,
    precision: Precision = None,
    device: Device = None,
    repeats: Repeats = 3,
    as_json: AsJson = False,
) -> None:
    """Sampling from noise to text: with recorded launches and draws without tables, and plain. Times are of a step."""
    from sedd import bench as benches

    place = benches.place(device)
    quick = place.device == "cpu"
    setting = benches.SampleSetting(
        recipe=recipe or place.recipe,
        process=process,
        objective=objective,
        sampler=sampler,
        steps=steps or (16 if quick else 128),
        batch=batch or (4 if quick else 16),
        length=length,
        vocab_size=vocab or place.vocab_size,
        precision=precision or place.precision,
        device=place.device,
        repeats=repeats,
    )
    on = benches.machine(setting.device, setting.precision)
    _show(setting.__dict__, on, benches.SAMPLE_FLOPS, benches.sample(setting, on), as_json)


def _show(setting: dict[str, object], on: "Machine", formula: str, rows: "Iterator[Row]", as_json: bool) -> None:
    measured = list(track(rows, "measuring", 2, console=Console(stderr=True), transient=True))
    if as_json:
        record = {"machine": on._asdict(), "setting": setting, "flops": formula}
        print(json.dumps({**record, "rows": [row._asdict() for row in measured]}))
        return
    table = Table("way", "ms", "tokens/s", "GiB", "of ceiling", "speed", box=None, pad_edge=False)
    plain = measured[-1].milliseconds
    for row in measured:
        if row.milliseconds is None or row.tokens_per_second is None:
            table.add_row(row.way, "out of memory")
            continue
        speed = "" if plain is None else f"{plain / row.milliseconds:.2f}×"
        share = f"{row.share_of_ceiling or 0:.1%}"
        times = f"{row.milliseconds:,.2f}", f"{row.tokens_per_second:,.0f}", f"{row.peak_gib or 0:.2f}"
        table.add_row(row.way, *times, share, speed)
    print(f"{on.name}, torch {on.torch}, {on.precision}, ceiling {on.ceiling_tflops:.3g} TFLOP/s")
    print(", ".join(f"{name.replace('_', ' ')} {value}" for name, value in setting.items()))
    print(f"useful FLOP: {formula}")
    Console().print(table)
