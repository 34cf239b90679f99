"""``sedd info``: describe a model."""

from pathlib import Path
from typing import Any

import typer

from sedd.card_facts import CardFacts
from sedd.cli import root
from sedd.terminal import warn
from sedd.training import checkpoint


@root.command()
def info(model: root.OptionalModel = None, *, as_json: bool = False) -> None:
    """Describe a model: size, noise process, objective, tokenizer, training progress, validation bounds, its card.

    The exit code is 2 if a weight is NaN or infinite: no other command takes such a model.
    """
    assert model is not None  # its callback returns the default
    _describe(model, as_json)


@checkpoint.retry_if_pruned
def _describe(model: Path | str, as_json: bool) -> None:
    from safetensors.torch import load_file

    from sedd.runtime.run_log import read_log
    from sedd.tokenizer import load_tokenizer

    found = checkpoint.find_model(model)
    folder, config, run = found.folder, found.config, checkpoint.run_folder(found.folder)
    state, stored = checkpoint.read_state(folder), checkpoint.read_header(folder)
    facts, nonfinite = CardFacts.read(folder), checkpoint.nonfinite(load_file(folder / "ema.safetensors"))
    record: dict[str, Any] = {
        "folder": str(folder),
        "parameters": stored.parameters,
        "weights": stored.dtype,
        "bytes": stored.bytes,
        "vocab_size": found.vocab_size,
        "seq_len": config.model.seq_len,
        "process": config.noise.process,
        "mask_share": config.noise.mask_share,
        "schedule": " ".join([str(config.noise.schedule), *(f"{k}={v}" for k, v in config.noise.options.items())]),
        "objective": config.objective,
        "parameterization": config.model.parameterization,
        "architecture": config.describe_network() if config.network else config.model.architecture,
        "tokenizer": load_tokenizer(folder).kind,
        "labels": ", ".join(found.labels) or None,
        "step": state["step"],
        "tokens": state["tokens"],
    }
    record = {name: value for name, value in record.items() if value is not None}
    has_log = (run / "log.jsonl").is_file()
    logged = [r for r in (read_log(run) if has_log else ()) if "bound" in r and r["step"] <= state["step"]]
    last = logged[-1] if logged else {}
    bounds = {
        "bound": last.get("bound"),
        "bound_step": last.get("step"),
        "bound_bits_per_char": last.get("bound_bits_per_char"),
        "best_bound": state["best"],  # of the checkpoints that were saved
        "best_bound_step": state["best_step"],
    }
    card = {name: value for name, value in vars(facts).items() if value}
    if as_json:
        record |= {"nonfinite": nonfinite, **bounds, **({"card": card} if card else {})}
    else:
        record |= {"nonfinite": nonfinite} if nonfinite else {}
        record |= _card_facts(facts) if card else _describe_bounds(bounds, has_log, config.eval_every, model)
    root.print_record(record, as_json)
    if nonfinite is not None:
        warn(f"{folder}: weight {nonfinite} holds a value that is NaN or infinite; use another checkpoint")
        raise typer.Exit(2)


def _describe_bounds(bounds: dict[str, Any], has_log: bool, every: int, model: Path | str) -> dict[str, str]:
    """Return the bounds for people, or why there is none and how to get one."""
    shown = {
        name: f"{bounds[name]:.4f} nats per token at step {bounds[f'{name}_step']:,}"
        for name in ("bound", "best_bound")
        if None not in (bounds[name], bounds[f"{name}_step"])
    }
    if shown:
        return shown
    if not has_log:
        return {"bound": f"none (no log of a run is with this model); compute it with: sedd eval {model} DATA"}
    when = f"the run evaluates every {every:,} steps and at its end" if every else "the run evaluates at its end"
    return {"bound": f"none yet ({when}); compute it with: sedd eval {model}"}


def _card_facts(card: CardFacts) -> dict[str, str]:
    """Return the facts of a card for people, a line each."""
    facts = {name: " ".join(getattr(card, name).split()) for name in ("summary", "data", "licence", "limits")}
    facts["command"] = card.command.partition("\n")[0]
    for result in card.results:
        error = f" ± {result['stderr_nats_per_token']}" if result.get("stderr_nats_per_token") else ""
        data = result.get("dataset") or result.get("data") or "a text"
        facts[f"bound, {data}"] = f"{result['nats_per_token']}{error} nats per token"
    if cost := card.weights_cost:
        facts[f"cost of {cost.get('dtype')}"] = f"{cost['nats_per_token']:.6f} nats per token"
    metrics = card.sample_metrics or {}
    facts |= {n: str(metrics[n]) for n in ("validity", "uniqueness", "novelty") if metrics.get(n) is not None}
    return {name: text for name, text in facts.items() if text}
