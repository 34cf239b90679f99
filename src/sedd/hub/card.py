"""Model cards: what a model is, how to use it, its likelihoods, and how it was trained."""

from collections.abc import Mapping, Sequence
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from sedd.extras import DISTRIBUTION
from sedd.factory import LoadedModel

TEXT_TOKENIZERS = ("bytes", "chars", "bpe")
"""Kinds of tokenizers whose tokens are text."""
CONDITIONING = {
    "sigma": "conditioned on the noise level σ",
    "zero": "with a noise-level embedding fixed at σ = 0",
    "none": "not conditioned on the noise level",
}
"""Descriptions of ``time_conditioning``."""


def model_card(
    loaded: LoadedModel, name: str, results: Sequence[Mapping[str, Any]], origin: Mapping[str, Any] | None
) -> str:
    """Return the README.md of a model, with the Hub's metadata.

    Args:
        loaded: The model.
        name: Its name on the Hub.
        results: Records of `sedd eval`, or the validation bound of the run.
        origin: The published checkpoint it was converted from, if any.
    """
    parts = [
        f"# {name}",
        _description(loaded, origin),
        "## Use\n\n" + _usage(loaded, name),
        "## Evaluation\n\n" + _evaluation(results),
        "## Training\n\n" + _training(loaded, origin),
    ]
    return f"---\n{_metadata(loaded, name, results).to_yaml()}\n---\n\n" + "\n\n".join(parts) + "\n"


def _metadata(loaded: LoadedModel, name: str, results: Sequence[Mapping[str, Any]]) -> ModelCardData:
    eval_results = [
        EvalResult(
            task_type="text-generation",
            dataset_type="other",
            dataset_name=_dataset_name(record),
            metric_type="nats_per_token",
            metric_name="upper bound on nats per token",
            metric_value=record["nats_per_token"],
        )
        for record in results
    ]
    return ModelCardData(
        library_name="sedd",
        pipeline_tag="text-generation" if loaded.tokenizer.kind in TEXT_TOKENIZERS else None,
        tags=["sedd", "discrete-diffusion", "score-entropy", loaded.config.noise.process],
        model_name=name if eval_results else None,
        eval_results=eval_results or None,
    )


def _description(loaded: LoadedModel, origin: Mapping[str, Any] | None) -> str:
    run, parameters = loaded.config, sum(p.numel() for p in loaded.network.parameters())
    network = f"{run.model.architecture}, {run.model.depth} blocks, width {run.model.width}"
    lines = [
        "A discrete diffusion model of token sequences, made with `sedd`."
        if origin is None
        else f"A discrete diffusion model of token sequences: the published {origin['layout'].upper()} checkpoint "
        f"`{origin['source']}`, converted with `sedd import`.",
        "",
        "| | |",
        "|---|---|",
        f"| parameters | {parameters:,} |",
        f"| network | {network}, {CONDITIONING[run.time_conditioning]} |",
        f"| length | {run.model.seq_len} tokens |",
        f"| tokenizer | {loaded.tokenizer.kind}, {loaded.tokenizer.vocab_size:,} tokens |",
        *([f"| labels | {', '.join(loaded.labels)} |"] if loaded.labels else []),
        f"| noise | {run.noise.process}, {loaded.schedule} |",
        f"| objective | {run.objective}, parameterization {run.model.parameterization} |",
    ]
    return "\n".join(lines)


def _usage(loaded: LoadedModel, name: str) -> str:
    template = "It was {12} the end." if loaded.tokenizer.kind in TEXT_TOKENIZERS else "0 1 {6} 2"
    return (
        f"Install the library, which is distributed as `{DISTRIBUTION}` and imported as `sedd`: "
        f"`pip install {DISTRIBUTION}`.\n\n"
        "```python\n"
        "import sedd\n\n"
        f'model = sedd.load("{name}")\n'
        f'print(model.sample(4), model.infill("{template}"))\n'
        "```\n\n"
        "```sh\n"
        f"hf download {name} --local-dir model\n"
        "sedd sample model -n 4\n"
        f'sedd infill model "{template}"\n'
        "sedd eval model test.txt\n"
        "```"
    )


def _evaluation(results: Sequence[Mapping[str, Any]]) -> str:
    if not results:
        return "Not measured. `sedd eval model test.txt` prints the bound on your text with its standard error."
    header = ["| data | protocol | nats per token | bits per character |", "|---|---|---|---|"]
    rows = [
        f"| {_dataset_name(record)} | {record['protocol']} | {_nats(record)} | {record.get('bits_per_char') or ''} |"
        for record in results
    ]
    note = "± is the standard error of the estimate. ≤ marks an upper bound on the negative log-likelihood."
    return "\n".join([*header, *rows, "", note])


def _dataset_name(record: Mapping[str, Any]) -> str:
    """Return the name of the data without its folder: local paths are not published."""
    return str(record.get("dataset") or str(record["data"]).rsplit("/", 1)[-1])


def _nats(record: Mapping[str, Any]) -> str:
    if record.get("is_exact"):
        return f"{record['nats_per_token']} (exact)"
    relation = "≤ " if None not in record.get("terms", {}).values() else ""
    return f"{relation}{record['nats_per_token']} ± {record['stderr_nats_per_token']}"


def _training(loaded: LoadedModel, origin: Mapping[str, Any] | None) -> str:
    run = loaded.config
    if origin is not None:
        return f"By the authors of `{origin['source']}`; see there for data and licence."
    sources = ", ".join(run.data.sources) or "not recorded"
    return (
        f"On {sources} ({run.data.packing}), objective `{run.objective}`, {run.optim.name} with learning rate "
        f"{run.optim.lr}, batches of {run.train.batch_size} sequences, EMA decay {run.optim.ema_decay}, seed "
        f"{run.seed}. All options are in `config.json`; the number of steps is in `state.json`."
    )
