"""Model cards: what a model is, how to use it, its likelihoods, and how it was trained."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from sedd import files
from sedd.card_facts import FACTS, CardFacts
from sedd.extras import DISTRIBUTION
from sedd.hub.convert import read_origin
from sedd.loading import LoadedModel, load_model
from sedd.models import is_repo_id
from sedd.training import checkpoint

TEXT_TOKENIZERS = ("bytes", "chars", "bpe")
"""Kinds of tokenizers whose tokens are text."""
CONDITIONING = {
    "sigma": "conditioned on the noise level σ",
    "zero": "with a noise-level embedding fixed at σ = 0",
    "none": "not conditioned on the noise level",
}
"""Descriptions of ``time_conditioning``."""
README = "README.md"
"""The model card; it is not in the manifest, as it may be edited."""
SAMPLE_METRICS = (
    *("samples", "steps", "sampler", "temperature", "validity", "uniqueness", "novelty"),
    *("validity_by", "judge", "gen_ppl_by_token", "entropy_nats"),
)
"""Fields of a record of `sedd quality` that a card shows."""


def write_card(folder: Path, name: str, facts: CardFacts) -> Path:
    """Write the card of the model in ``folder``: card.json, and README.md from it and the model; return the latter."""
    # folders of this machine are not published
    results = [
        record | {k: Path(record[k]).name for k in ("data", "model") if record.get(k)} for record in facts.results
    ]
    public = replace(facts, results=results)
    text = model_card(load_model(folder), name, public, read_origin(folder))
    checkpoint.write_json(folder / f"{FACTS}.json", asdict(public))
    with checkpoint.explain_write_errors(folder / README):
        files.write_text(folder / README, text)
    return folder / README


def model_card(loaded: LoadedModel, name: str, facts: CardFacts, origin: Mapping[str, Any] | None) -> str:
    """Return the README.md of a model, with the Hub's metadata.

    Args:
        name: Its name on the Hub or of the bundled model.
        origin: The published checkpoint it was converted from, if any.
    """
    # indented, so that nothing in the texts is markup
    samples = textwrap.indent("\n\n".join(text.strip("\n") for text in facts.samples), "    ")
    parts = [
        f"# {name}",
        *([facts.summary] if facts.summary else []),
        _description(loaded, origin),
        "## Use\n\n" + _usage(loaded, name, facts),
        "## Evaluation\n\n" + _evaluation(facts),
        *(["## Samples\n\nNot selected:\n\n" + samples] if samples else []),
        "## Training\n\n" + _training(loaded, facts, origin),
        *([f"## Limits\n\n{facts.limits}"] if facts.limits else []),
    ]
    return f"---\n{_metadata(loaded, name, facts.results).to_yaml()}\n---\n\n" + "\n\n".join(parts) + "\n"


def _metadata(loaded: LoadedModel, name: str, results: Sequence[Mapping[str, Any]]) -> ModelCardData:
    eval_results = [
        EvalResult(
            task_type="text-generation",
            dataset_type="other",
            dataset_name=_dataset_name(record),
            metric_type="nats_per_token",
            metric_name=("upper bound on " if _is_upper_bound(record) else "") + "nats per token",
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
    run, stored = loaded.config, checkpoint.read_header(loaded.folder)
    network = f"{run.model.architecture}, {run.model.depth} blocks, width {run.model.width}"
    network = run.describe_network() if run.network else network
    lines = [
        "A discrete diffusion model of token sequences, made with `sedd`."
        if origin is None
        else f"A discrete diffusion model of token sequences: the published {origin['layout'].upper()} checkpoint "
        f"`{origin['source']}`, converted with `sedd import`.",
        "",
        "| | |",
        "|---|---|",
        f"| parameters | {stored.parameters:,}, stored in {stored.dtype}: {stored.bytes / 1e6:.2f} MB |",
        f"| network | {network}, {CONDITIONING[run.time_conditioning]} |",
        f"| length | {run.model.seq_len} tokens |",
        f"| tokenizer | {loaded.tokenizer.kind}, {loaded.tokenizer.vocab_size:,} tokens |",
        *([f"| labels | {', '.join(loaded.labels)} |"] if loaded.labels else []),
        f"| noise | {run.noise.process}, {loaded.schedule} |",
        f"| objective | {run.objective}, parameterization {run.model.parameterization} |",
    ]
    return "\n".join(lines)


def _usage(loaded: LoadedModel, name: str, facts: CardFacts) -> str:
    """Return examples, with the temperature and the steps by which the samples of the card were drawn."""
    template, sampled = facts.template, facts.sample_metrics or {}
    template = template or ("It was {12} the end." if loaded.tokenizer.kind in TEXT_TOKENIZERS else "0 1 {6} 2")
    download, folder = (f"hf download {name} --local-dir model\n", "model") if is_repo_id(name) else ("", name)
    argument, option = (", steps=None", " --steps inf") if sampled.get("steps") == "inf" else ("", "")
    if (temperature := facts.temperature) != 1:
        argument, option = f"{argument}, temperature={temperature}", f"{option} --temperature {temperature}"
    return (
        f"Install the library, which is distributed as `{DISTRIBUTION}` and imported as `sedd`: "
        f"`pip install {DISTRIBUTION}`.\n\n"
        "```python\n"
        "import sedd\n\n"
        f'model = sedd.load("{name}")\n'
        f"print(model.sample(4{argument}))\n"
        f'print(model.infill("{template}"{argument}))\n'
        "```\n\n"
        "```sh\n"
        f"{download}sedd sample {folder} -n 4{option}\n"
        f'sedd infill {folder} "{template}"{option}\n'
        f"sedd eval {folder} test.txt\n"
        "```"
    )


def _evaluation(facts: CardFacts) -> str:
    parts = [_likelihoods(facts.results)]
    if cost := facts.weights_cost:
        parts.append(
            f"Storing the weights in {cost['dtype']} costs {describe_cost(cost)}: the model before and after it was "
            f"evaluated on {cost['data']} with the same times and noise."
        )
    if metrics := facts.sample_metrics:
        rows = ["| of samples | |", "|---|---|"]
        for name in SAMPLE_METRICS:
            if metrics.get(name) is not None:
                error = metrics.get(f"stderr_{name}")
                stderr = "" if error is None else f" ± {error}"
                rows.append(f"| {name.replace('_', ' ')} | {metrics[name]}{stderr} |")
        parts.append("\n".join(rows))
    return "\n\n".join(parts)


def describe_cost(cost: Mapping[str, Any]) -> str:
    """Return what the dtype of stored weights costs: nats per token with their standard error, bits per character."""
    error = "" if cost["stderr_nats_per_token"] is None else f" ± {cost['stderr_nats_per_token']:.6f}"
    bits = "" if cost["bits_per_char"] is None else f", {cost['bits_per_char']:.6f} bits per character"
    return f"{cost['nats_per_token']:.6f}{error} nats per token{bits}"


def _likelihoods(results: Sequence[Mapping[str, Any]]) -> str:
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


def _is_upper_bound(record: Mapping[str, Any]) -> bool:
    """Whether the record has every term of the bound; protocols of published numbers leave some out."""
    return not record.get("is_exact") and None not in record.get("terms", {}).values()


def _nats(record: Mapping[str, Any]) -> str:
    if record.get("is_exact"):
        return f"{record['nats_per_token']} (exact)"
    relation = "≤ " if _is_upper_bound(record) else ""
    return f"{relation}{record['nats_per_token']} ± {record['stderr_nats_per_token']}"


def _training(loaded: LoadedModel, facts: CardFacts, origin: Mapping[str, Any] | None) -> str:
    if origin is not None:
        return f"By the authors of `{origin['source']}`; see there for data and licence."
    run = loaded.config
    sources = ", ".join(Path(source).name for source in run.data.sources) or "not recorded"
    parts = [f"{name}: {text}" for name, text in (("Data", facts.data), ("Licence", facts.licence)) if text]
    parts.append(
        f"On {sources} ({run.data.packing}), objective `{run.objective}`, {run.optim.name} with learning rate "
        f"{run.optim.lr}, batches of {run.train.batch_size} sequences, EMA decay {run.optim.ema_decay}, seed "
        f"{run.seed}. All options are in `config.json`; the number of steps is in `state.json`."
    )
    parts += [f"Made with:\n\n```sh\n{facts.command}\n```"] if facts.command else []
    return "\n\n".join(parts)
