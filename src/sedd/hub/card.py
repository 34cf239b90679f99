"""The model card: what a model is, what it was trained on, how well it does, and how to use it."""

from collections.abc import Mapping, Sequence
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from sedd.factory import LoadedModel

TEXTS = ("bytes", "chars", "bpe")
"""Kinds of tokenizers whose tokens are text."""


def card(loaded: LoadedModel, name: str, results: Sequence[Mapping[str, Any]], origin: Mapping[str, Any] | None) -> str:
    """The README.md of a model.

    ``results`` are records of `sedd eval`, or of the held-out bound of a run; ``origin`` says which published
    checkpoint it was, where it was one.
    """
    parts = [
        f"# {name}",
        _what(loaded, origin),
        "## How to use it\n\n" + _use(loaded, name),
        "## How good it is\n\n" + _results(results),
        "## How it was trained\n\n" + _training(loaded, origin),
    ]
    return f"---\n{_metadata(loaded, name, results).to_yaml()}\n---\n\n" + "\n\n".join(parts) + "\n"


def _metadata(loaded: LoadedModel, name: str, results: Sequence[Mapping[str, Any]]) -> ModelCardData:
    found = [
        EvalResult(
            task_type="text-generation",
            dataset_type="other",
            dataset_name=_data(record),
            metric_type="nats_per_token",
            metric_name="upper bound on nats a token",
            metric_value=record["nats_per_token"],
        )
        for record in results
    ]
    return ModelCardData(
        library_name="sedd",
        pipeline_tag="text-generation" if loaded.tokenizer.kind in TEXTS else None,
        tags=["sedd", "discrete-diffusion", "score-entropy", loaded.config.noise.process],
        model_name=name if found else None,
        eval_results=found or None,
    )


def _what(loaded: LoadedModel, origin: Mapping[str, Any] | None) -> str:
    run, parameters = loaded.config, sum(p.numel() for p in loaded.network.parameters())
    told = {"sigma": "told the noise", "zero": "told no noise (σ = 0)", "none": "not told the noise"}[
        run.time_conditioning
    ]
    lines = [
        "A discrete diffusion model of sequences of tokens, made with `sedd`."
        if origin is None
        else f"A discrete diffusion model of sequences of tokens: the published {origin['layout'].upper()} checkpoint "
        f"`{origin['source']}`, converted by `sedd import`.",
        "",
        "| | |",
        "|---|---|",
        f"| parameters | {parameters:,} |",
        f"| network | {run.model.architecture}, {run.model.depth} blocks, width {run.model.width}, {told} |",
        f"| length | {run.model.seq_len} tokens |",
        f"| tokenizer | {loaded.tokenizer.kind}, {loaded.tokenizer.vocab_size:,} tokens |",
        *([f"| labels | {', '.join(loaded.labels)} |"] if loaded.labels else []),
        f"| noise | {run.noise.process}, {loaded.schedule} |",
        f"| objective | {run.objective}, parameterization {run.model.parameterization} |",
    ]
    return "\n".join(lines)


def _use(loaded: LoadedModel, name: str) -> str:
    given = "It was {12} the end." if loaded.tokenizer.kind in TEXTS else "0 1 {6} 2"
    return (
        "```python\n"
        "import sedd\n\n"
        f'model = sedd.load("{name}")\n'
        f'print(model.sample(4), model.infill("{given}"))\n'
        "```\n\n"
        "```sh\n"
        f"hf download {name} --local-dir model\n"
        "sedd sample model -n 4\n"
        f'sedd infill model "{given}"\n'
        "sedd eval model test.txt\n"
        "```"
    )


def _results(results: Sequence[Mapping[str, Any]]) -> str:
    if not results:
        return "Not measured. `sedd eval model test.txt` gives the bound on your text with its standard error."
    head = ["| data | protocol | nats a token | bits a character |", "|---|---|---|---|"]
    rows = [
        f"| {_data(record)} | {record['protocol']} | {_error_bar(record)} | {record.get('bits_per_char') or ''} |"
        for record in results
    ]
    note = "± is the standard error of the estimate. A bound: the model is at least this good."
    return "\n".join([*head, *rows, "", note])


def _data(record: Mapping[str, Any]) -> str:
    """A name, never a path: folders are nobody's business."""
    return str(record.get("dataset") or str(record["data"]).rsplit("/", 1)[-1])


def _error_bar(record: Mapping[str, Any]) -> str:
    if record.get("is_exact"):
        return f"{record['nats_per_token']} (exact)"
    kind = "≤ " if None not in record.get("terms", {}).values() else ""
    return f"{kind}{record['nats_per_token']} ± {record['stderr_nats_per_token']}"


def _training(loaded: LoadedModel, origin: Mapping[str, Any] | None) -> str:
    run = loaded.config
    if origin is not None:
        return f"By the authors of `{origin['source']}`; see there for data and licence."
    sources = ", ".join(run.data.sources) or "not recorded"
    return (
        f"On {sources} ({run.data.packing}), objective `{run.objective}`, {run.optim.name} at a learning rate of "
        f"{run.optim.lr}, batches of {run.train.batch_size} sequences, weights averaged with decay {run.optim.ema_decay}, seed "
        f"{run.seed}. All options are in `config.json`, how far it went in `state.json`."
    )
