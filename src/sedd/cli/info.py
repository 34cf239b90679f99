"""``sedd info``: describe a model."""

from sedd.cli.root import AsJson, ModelFolder, app, print_record


@app.command()
def info(
    model: ModelFolder,
    as_json: AsJson = False,
) -> None:
    """Describe a model: size, noise process, objective, tokenizer, training progress."""
    from sedd import checkpoint, factory

    loaded = factory.load_model(model)
    state = checkpoint.load_json(loaded.folder, "state")
    record = {
        "folder": str(loaded.folder),
        "parameters": sum(p.numel() for p in loaded.network.parameters()),
        "vocab_size": loaded.process.vocab_size,
        "seq_len": loaded.config.model.seq_len,
        "process": loaded.config.noise.process,
        "schedule": str(loaded.schedule),
        "objective": loaded.config.objective,
        "parameterization": loaded.config.model.parameterization,
        "architecture": loaded.config.model.architecture,
        "tokenizer": loaded.tokenizer.kind,
        **({"labels": ", ".join(loaded.labels)} if loaded.labels else {}),
        "step": state["step"],
        "tokens": state["tokens"],
        "best_bound": None if state["best"] is None else f"{state['best']:.4f} nats per token",
    }
    if record["best_bound"] is None and not as_json:
        every = loaded.config.train.eval_every
        when = f"the run evaluates every {every:,} steps" if every else "train.eval_every is 0"
        record["best_bound"] = f"none yet ({when}); compute it with: sedd eval {model}"
    print_record(record, as_json)
