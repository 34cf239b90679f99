"""Model cards: what a model is, how to use it, its likelihoods, and how it was trained; the text is in card.md.j2."""

import textwrap
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jinja2
from huggingface_hub import EvalResult, ModelCardData

from sedd import files
from sedd.card_facts import FACTS, CardFacts
from sedd.extras import DISTRIBUTION
from sedd.hub.convert import read_origin
from sedd.loading import LoadedModel, load_model
from sedd.models import is_repo_id
from sedd.training import checkpoint

TEXT_TOKENIZERS = ("bytes", "chars", "bpe")  # kinds of tokenizers whose tokens are text
CONDITIONING = {
    "sigma": "conditioned on the noise level σ",
    "zero": "with a noise-level embedding fixed at σ = 0",
    "none": "not conditioned on the noise level",
}
"""Descriptions of ``time_conditioning``."""
TEMPLATE = "card.md.j2"
README = "README.md"  # the model card; it is not in the manifest, as it may be edited
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
    run, sampled, results = loaded.config, facts.sample_metrics or {}, facts.results
    is_text = loaded.tokenizer.kind in TEXT_TOKENIZERS
    network = f"{run.model.architecture}, {run.model.depth} blocks, width {run.model.width}"
    # the examples have the temperature and the steps by which the samples of the card were drawn
    arguments, options = (", steps=None", " --steps inf") if sampled.get("steps") == "inf" else ("", "")
    if (temperature := facts.temperature) != 1:
        arguments, options = f"{arguments}, temperature={temperature}", f"{options} --temperature {temperature}"
    evaluated = [
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
    metadata = ModelCardData(
        library_name="sedd",
        pipeline_tag="text-generation" if is_text else None,
        tags=["sedd", "discrete-diffusion", "score-entropy", run.noise.process],
        model_name=name if evaluated else None,
        eval_results=evaluated or None,
    )
    template = jinja2.Template(
        (Path(__file__).parent / TEMPLATE).read_text(encoding="utf-8"),
        trim_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    card: str = template.render(
        metadata=metadata.to_yaml(),
        name=name,
        facts=facts,
        origin=origin,
        loaded=loaded,
        run=run,
        stored=checkpoint.read_header(loaded.folder),
        network=run.describe_network() if run.network else network,
        conditioning=CONDITIONING[run.time_conditioning],
        distribution=DISTRIBUTION,
        folder="model" if is_repo_id(name) else name,
        template=facts.template or ("It was {12} the end." if is_text else "0 1 {6} 2"),
        arguments=arguments,
        options=options,
        results=[(_dataset_name(r), r["protocol"], _nats(r), r.get("bits_per_char") or "") for r in results],
        cost=facts.weights_cost and describe_cost(facts.weights_cost),
        metrics=[(name, sampled[name], sampled.get(f"stderr_{name}")) for name in SAMPLE_METRICS if name in sampled],
        # indented, so that nothing in the texts is markup
        samples=textwrap.indent("\n\n".join(text.strip("\n") for text in facts.samples), "    "),
        sources=", ".join(Path(source).name for source in run.data.sources) or "not recorded",
    )
    return card


def describe_cost(cost: Mapping[str, Any]) -> str:
    """Return what the dtype of stored weights costs: nats per token with their standard error, bits per character."""
    error = "" if cost["stderr_nats_per_token"] is None else f" ± {cost['stderr_nats_per_token']:.6f}"
    bits = "" if cost["bits_per_char"] is None else f", {cost['bits_per_char']:.6f} bits per character"
    return f"{cost['nats_per_token']:.6f}{error} nats per token{bits}"


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
