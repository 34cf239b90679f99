"""``sedd info``."""

from pathlib import Path
from typing import Annotated

import typer

from sedd.cli.root import AsJson, app, show


@app.command()
def info(
    model: Annotated[Path, typer.Argument(help="The folder of a run, or one of its checkpoints.")],
    as_json: AsJson = False,
) -> None:
    """What a model is: its size, noise, objective, tokenizer, and how far it was trained."""
    from sedd import checkpoint, factory

    loaded = factory.load(model)
    state = checkpoint.load_json(loaded.folder, "state")
    record = {
        "folder": str(loaded.folder),
        "parameters": sum(p.numel() for p in loaded.network.parameters()),
        "vocab_size": loaded.process.vocab_size,
        "length": loaded.config.model.seq_len,
        "process": loaded.config.noise.process,
        "schedule": str(loaded.schedule),
        "objective": loaded.config.objective,
        "parameterization": loaded.config.model.parameterization,
        "style": loaded.config.model.architecture,
        "tokenizer": loaded.tokenizer.kind,
        **({"labels": ", ".join(loaded.labels)} if loaded.labels else {}),
        "step": state["step"],
        "tokens": state["tokens"],
        "best_bound": None if state["best"] is None else f"{state['best']:.4f} nats a token",
    }
    if record["best_bound"] is None and not as_json:
        every = loaded.config.train.eval_every
        when = f"the run looks every {every:,} steps" if every else "the run never looked, train.eval_every is 0"
        record["best_bound"] = f"none so far ({when}); sedd eval {model} finds the bound"
    show(record, as_json)
