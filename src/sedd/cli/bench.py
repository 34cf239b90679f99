"""``sedd bench``: time and memory on this machine."""

import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from sedd import recipes, registry
from sedd.cli.root import App, AsJson, Device, app, list_names
from sedd.config import NOT_FOR_TRAINING, check_choice

if TYPE_CHECKING:
    from sedd.bench import Load, Machine, Measurement

bench = App(help="Time and memory on this machine, compared with the PyTorch reference.", no_args_is_help=True)
app.add_typer(bench, name="bench")


def _check_recipe(recipe: str | None) -> str | None:
    """Refuse an unknown recipe before torch is imported."""
    if recipe is not None:
        check_choice("recipe", recipe, tuple(recipes.RECIPES))
    return recipe


RecipeName = Annotated[
    str | None,
    typer.Option(
        "--recipe",
        help=f"Network: {', '.join(recipes.RECIPES)}; by default small, on a CPU tiny.",
        callback=_check_recipe,
    ),
]
Process = Annotated[
    str,
    typer.Option(
        help=f"Noise process: {list_names(registry.PROCESSES)}.",
        callback=lambda name: registry.PROCESSES.check(name) or name,
    ),
]
Objective = Annotated[
    str,
    typer.Option(
        help=f"Training objective: {list_names(registry.OBJECTIVES, hidden=NOT_FOR_TRAINING)}.",
        callback=lambda name: registry.OBJECTIVES.check(name) or name,
    ),
]
VocabSize = Annotated[int | None, typer.Option("--vocab", help="Vocabulary size; by default 50257, on a CPU 4096.")]
Length = Annotated[int | None, typer.Option(help="Tokens per sequence; by default the recipe's.")]
Precision = Annotated[
    str | None, typer.Option(help="Precision: bfloat16 or float32; by default bfloat16, on a CPU float32.")
]
Repeats = Annotated[int, typer.Option(help="Number of timed calls, of which the median is shown.")]


@bench.command("loss")
def bench_loss(
    process: Process = "absorbing",
    parameterization: Annotated[str, typer.Option(help="Network output: score or mean.")] = "score",
    rows: Annotated[int | None, typer.Option(help="Token positions; by default 65536, on a CPU 1024.")] = None,
    masked: Annotated[float, typer.Option(help="Fraction of positions changed by noise.")] = 0.5,
    width: Annotated[int | None, typer.Option(help="Width of the network; by default 768, on a CPU 128.")] = None,
    vocab: VocabSize = None,
    precision: Precision = None,
    device: Device = None,
    repeats: Repeats = 15,
    as_json: AsJson = False,
) -> None:
    """Measure the output layer and the loss, forward and backward."""
    from sedd import bench as benches

    defaults = benches.device_defaults(device)
    setting = benches.LossSetting(
        process=process,
        parameterization=parameterization,
        rows=rows or defaults.rows,
        masked=masked,
        width=width or defaults.width,
        vocab_size=vocab or defaults.vocab_size,
        precision=precision or defaults.precision,
        device=defaults.device,
        repeats=repeats,
    )
    machine = benches.describe_machine(setting.device, setting.precision)
    _print(setting.__dict__, machine, benches.LOSS_FLOPS, benches.measure_loss(setting, machine), as_json)


@bench.command("train")
def bench_train(
    recipe: RecipeName = None,
    process: Process = "absorbing",
    objective: Objective = "score-entropy",
    parameterization: Annotated[
        str | None, typer.Option(help="Network output: score or mean; by default what the objective needs.")
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences per step; by default 64, on a CPU 8.")] = None,
    length: Length = None,
    vocab: VocabSize = None,
    precision: Annotated[
        str | None, typer.Option(help="Precision: float8, bfloat16 or float32; by default bfloat16, on a CPU float32.")
    ] = None,
    compile: Annotated[bool, typer.Option("--compile", help="Use torch.compile.")] = False,
    cuda_graphs: Annotated[bool, typer.Option(help="Capture blocks in CUDA graphs, on a GPU.")] = True,
    activation_checkpointing: Annotated[
        str, typer.Option(help="Activation checkpointing: none, selective or full.")
    ] = "none",
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", help="Set another configuration key, as in --set optim.name=muon. Repeatable."),
    ] = None,
    device: Device = None,
    repeats: Repeats = 20,
    as_json: AsJson = False,
) -> None:
    """Measure a training step: forward, backward, gradient clipping, optimizer and EMA."""
    from sedd import bench as benches

    defaults = benches.device_defaults(device)
    setting = benches.TrainSetting(
        recipe=recipe or defaults.recipe,
        process=process,
        objective=objective,
        parameterization=parameterization,
        batch=batch or defaults.batch,
        length=length,
        vocab_size=vocab or defaults.vocab_size,
        precision=precision or defaults.precision,
        device=defaults.device,
        compile=compile,
        cuda_graphs=cuda_graphs,
        activation_checkpointing=activation_checkpointing,
        repeats=repeats,
        sets=tuple(sets or ()),
    )
    machine = benches.describe_machine(setting.device, setting.precision)
    _print(setting.__dict__, machine, benches.TRAIN_FLOPS, benches.measure_training(setting, machine), as_json)


@bench.command("sample")
def bench_sample(
    recipe: RecipeName = None,
    process: Process = "absorbing",
    objective: Objective = "lambda-dce",
    sampler: Annotated[
        str | None, typer.Option(help=f"Sampler: {list_names(registry.SAMPLERS)}; by default one that fits the model.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Sampling steps; by default 128, on a CPU 16.")] = None,
    batch: Annotated[int | None, typer.Option(help="Samples per batch; by default 16, on a CPU 4.")] = None,
    length: Length = None,
    vocab: VocabSize = None,
    precision: Precision = None,
    device: Device = None,
    repeats: Repeats = 3,
    as_json: AsJson = False,
) -> None:
    """Measure sampling; times are per step."""
    from sedd import bench as benches

    defaults = benches.device_defaults(device)
    on_cpu = defaults.device == "cpu"
    setting = benches.SampleSetting(
        recipe=recipe or defaults.recipe,
        process=process,
        objective=objective,
        sampler=sampler,
        steps=steps or (16 if on_cpu else 128),
        batch=batch or (4 if on_cpu else 16),
        length=length,
        vocab_size=vocab or defaults.vocab_size,
        precision=precision or defaults.precision,
        device=defaults.device,
        repeats=repeats,
    )
    machine = benches.describe_machine(setting.device, setting.precision)
    _print(setting.__dict__, machine, benches.SAMPLE_FLOPS, benches.measure_sampling(setting, machine), as_json)


def _milliseconds(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f} ms"


_LOAD_ROWS: "dict[str, Callable[[Load], str]]" = {
    "tokens/s": lambda load: f"{load.tokens_per_second:,.0f}",
    "replies": lambda load: str(load.replies),
    "refused (429)": lambda load: str(load.refused),
    "errors": lambda load: str(load.errors),
    "latency p50": lambda load: _milliseconds(load.p50),
    "p95": lambda load: _milliseconds(load.p95),
    "p99": lambda load: _milliseconds(load.p99),
    "first edit p50": lambda load: _milliseconds(load.first_edit),
    "rows per pass": lambda load: f"{load.occupancy or 0:.1f}",
    "passes skipped": lambda load: f"{load.skipped or 0:.0%}",
    "differing": lambda load: str(load.differing),
}


@bench.command("serve")
def bench_serve(
    recipe: RecipeName = None,
    process: Process = "absorbing",
    objective: Objective = "lambda-dce",
    sampler: Annotated[
        str | None, typer.Option(help=f"Sampler: {list_names(registry.SAMPLERS)}; by default one that fits the model.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Sampling steps; by default 128, on a CPU 16.")] = None,
    clients: Annotated[int, typer.Option(help="Clients, and slots of the server.")] = 32,
    seconds: Annotated[float, typer.Option(help="Duration of each of the four loads.")] = 10.0,
    length: Length = None,
    vocab: VocabSize = None,
    precision: Precision = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Measure a server over the loopback interface: one request at a time, many clients, and random arrivals.

    Random arrivals come at half and at twice the throughput of many clients. Latencies are to the end of a reply, and
    to the first edit of a stream. A request without other load must get the same text as with it; replies that differ
    are counted. Compare with offline sampling, which is measured in the server's process first.
    """
    from sedd import bench as benches

    defaults = benches.device_defaults(device)
    on_cpu = defaults.device == "cpu"
    model = benches.SampleSetting(
        recipe=recipe or defaults.recipe,
        process=process,
        objective=objective,
        sampler=sampler,
        steps=steps or (16 if on_cpu else 128),
        batch=clients,
        length=length,
        vocab_size=vocab or defaults.vocab_size,
        precision=precision or defaults.precision,
        device=defaults.device,
    )
    offline: list[float] = []
    loads = benches.measure_serving(benches.ServeSetting(model, clients, seconds), offline.append)
    measured = list(track(loads, "measuring", 4, console=Console(stderr=True), transient=True))
    if as_json:
        machine = benches.describe_machine(model.device, model.precision)
        record = {"machine": machine._asdict(), "setting": model.__dict__, "offline_tokens_per_second": offline[0]}
        print(json.dumps({**record, "loads": [load._asdict() for load in measured]}))
        return
    table = Table("", *(load.variant for load in measured), box=None, pad_edge=False)
    for name, show in _LOAD_ROWS.items():
        table.add_row(name, *map(show, measured))
    alone, many = measured[:2]
    print(f"offline sampling, batch {clients}: {offline[0]:,.0f} tokens/s")
    print(
        f"{many.variant}: {many.tokens_per_second / offline[0]:.1%} of that, "
        f"{many.tokens_per_second / alone.tokens_per_second:.1f} times {alone.variant}"
    )
    Console().print(table)


def _print(
    setting: dict[str, object], machine: "Machine", formula: str, rows: "Iterator[Measurement]", as_json: bool
) -> None:
    measured = list(track(rows, "measuring", 2, console=Console(stderr=True), transient=True))
    if as_json:
        record = {"machine": machine._asdict(), "setting": setting, "flops": formula}
        print(json.dumps({**record, "rows": [row._asdict() for row in measured]}))
        return
    table = Table("variant", "ms", "tokens/s", "GiB", "utilization", "speedup", box=None, pad_edge=False)
    reference = measured[-1].milliseconds
    for row in measured:
        if row.milliseconds is None or row.tokens_per_second is None:
            table.add_row(row.variant, "out of memory")
            continue
        speedup = "" if reference is None else f"{reference / row.milliseconds:.2f}×"
        utilization = f"{row.utilization or 0:.1%}"
        times = f"{row.milliseconds:,.2f}", f"{row.tokens_per_second:,.0f}", f"{row.peak_gib or 0:.2f}"
        table.add_row(row.variant, *times, utilization, speedup)
    speed = f"matrix products {machine.matmul_tflops:.3g} TFLOP/s"
    print(f"{machine.name}, torch {machine.torch}, {machine.precision}, {speed}")
    print(", ".join(f"{name.replace('_', ' ')} {value}" for name, value in setting.items()))
    print(f"FLOPs: {formula}")
    Console().print(table)
