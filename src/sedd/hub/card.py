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
README = "README.md"  # the model card; it is not in the manifest, as it may be edited


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
    run, is_text = loaded.config, loaded.tokenizer.kind in TEXT_TOKENIZERS
    evaluated = [
        EvalResult(
            task_type="text-generation",
            dataset_type="other",
            dataset_name=record.get("dataset") or record["data"],
            metric_type="nats_per_token",
            metric_name=("upper bound on " if _is_upper_bound(record) else "") + "nats per token",
            metric_value=record["nats_per_token"],
        )
        for record in facts.results
    ]
    metadata = ModelCardData(
        library_name="sedd",
        pipeline_tag="text-generation" if is_text else None,
        tags=["sedd", "discrete-diffusion", "score-entropy", run.noise.process],
        model_name=name if evaluated else None,
        eval_results=evaluated or None,
    )
    template = jinja2.Template(
        (Path(__file__).parent / "card.md.j2").read_text(encoding="utf-8"),
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
        distribution=DISTRIBUTION,
        folder="model" if is_repo_id(name) else name,
        template=facts.template or ("It was {12} the end." if is_text else "0 1 {6} 2"),
        is_upper_bound=_is_upper_bound,
        cost=facts.weights_cost and describe_cost(facts.weights_cost),
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


def _is_upper_bound(record: Mapping[str, Any]) -> bool:
    """Whether the record has every term of the bound; protocols of published numbers leave some out."""
    return not record.get("is_exact") and None not in record.get("terms", {}).values()
