"""``sedd import``, ``sedd export`` and ``sedd push``: convert published checkpoints, and share models."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from sedd.card_facts import RESULT_TYPES
from sedd.cli import root
from sedd.files import parse_json, read_text
from sedd.models import is_repo_id
from sedd.schema import check_choice, check_fields
from sedd.terminal import warn
from sedd.training import checkpoint
from sedd.training.progress import progress_on_stderr


@root.command("import")
def import_checkpoint(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Folder, weights file, or Hub id (owner/name).")],
    *,
    out: Path,
    tokenizer: str | None = None,
    revision: str | None = None,
    as_json: bool = False,
) -> None:
    """Convert a published SEDD, RADD or MDLM checkpoint into a model folder.

    The format is recognized from the files. Pickles are read without executing code, or refused. A run of SEDD's or
    RADD's own training code (checkpoint.pth and .hydra/config.yaml) is read too. All other commands accept the folder.
    Example:
    - `sedd import owner/name --out model`
    - `sedd sample model`

    Args:
        out: Model folder to write; it must be new or empty.
        tokenizer: gpt2, a tokenizer.json, or a folder with one; by default the one beside SRC.
        revision: Branch, tag or commit of a Hub id.
    """
    checkpoint.require_empty(out)
    local = Path(source)
    if not local.exists() and not is_repo_id(source):
        raise ValueError(f"{source} does not exist; give a folder, a file or a Hub id such as owner/name")
    root.announce(f"{source}: published weights, to {out}")
    from sedd import hub
    from sedd.hub import convert

    with Console(stderr=True).status("reading"):
        found = convert.read_published(local if local.exists() else hub.download(source, revision, pickles=True))
        tokens = hub.find_tokenizer(found, tokenizer)
        folder = convert.save_model_folder(found, tokens, out, hub.source_name(source))
    if tokens is None:
        warn("no tokenizer was found, tokens are shown as integers; name one with --tokenizer")
    record = {
        "model": str(out),
        "layout": found.layout.name,
        "parameters": checkpoint.read_header(out).parameters,
        "entries": len(found.weights["ema"]),
        "vocab_size": found.vocab_size,
        "process": found.config.noise.process,
        "time_conditioning": found.config.time_conditioning,
        "tokenizer": "ints" if tokens is None else tokens.kind,
        "weights": " and ".join(found.weights),
        "bytes": (folder / "ema.safetensors").stat().st_size,
    }
    root.print_record(record, as_json)


@root.command()
def export(
    model: root.ModelFolder,
    *,
    out: Path,
    dtype: str | None = None,
    data: str | None = None,
    draws: int | None = None,
    format: str | None = None,
    device: str | None = None,
    network: list[str] | None = None,
    as_json: bool = False,
) -> None:
    """Write a model in another form: small, for sharing, or in a published format.

    With --dtype, a model folder with EMA weights, configuration, tokenizer and a model card. int8 rounds each row of a
    matrix to the nearest multiples of a scale, a 127th of its largest entry; the weights are float32 again once loaded.
    Without it, config.json and model.safetensors in a published format, for models of the reference architecture.
    Examples:
    - `sedd export run --out small --dtype int8 --eval test.txt`
    - `sedd export run --out theirs --format sedd`

    Args:
        out: Folder to write; it must be new or empty.
        dtype: Write a model folder for all commands, its weights in int8 (a quarter of the size), bfloat16 (half) or
            float32.
        data (--eval): Text on which to measure what --dtype costs, for its model card.
        draws: Monte Carlo draws per sequence for --eval, an even number, by default 8.
        format: Write a published format, sedd, radd or mdlm; by default, without --dtype, what fits.
    """
    checkpoint.require_empty(out)
    if dtype is None:
        if data is not None:
            raise ValueError("eval measures what the dtype of the weights costs; add --dtype, or use sedd eval")
        root.announce(f"weights in {f'the format {format}' if format else 'a published format'}, to {out}", model)
        from sedd.hub import convert

        with Console(stderr=True).status("writing"):
            layout = convert.export_model(model, out, format)
        root.print_record({"checkpoint": str(out), "layout": layout.name}, as_json)
        return
    check_choice("dtype", dtype, checkpoint.WEIGHT_DTYPES)
    if format is not None:
        raise ValueError(f"dtype {dtype} is for model folders, and --format writes a published one; give one of them")
    from sedd import hub
    from sedd.likelihood.variance_reduction import check_draws

    check_draws(draws)
    root.announce(f"weights in {dtype}, to {out}", model, eval=data, draws=draws)
    was = checkpoint.read_header(checkpoint.find_model(model).folder)
    if data is None:
        hub.save_pretrained(model, out, dtype=dtype)
    cost = {} if data is None else _export_and_measure(model, out, dtype, data, draws, device)
    stored = checkpoint.read_header(out)
    if as_json:
        root.print_records([{"model": str(out), **stored._asdict(), "bytes_before": was.bytes, **cost}])
        return
    size = f"{stored.bytes:,} bytes (before {was.bytes:,})"
    root.show(f"{out}: {stored.parameters:,} parameters in {stored.dtype}, {size}")
    if cost:
        result = cost["evaluation"]
        bound = f"{result['nats_per_token']:.6f} ± {result['stderr_nats_per_token']:.6f} nats per token"
        root.show(f"bound on {cost['cost']['data']}: {bound}")
        print(f"cost of {dtype}: {hub.describe_cost(cost['cost'])}, on the same draws")


def _export_and_measure(
    model: Path, out: Path, dtype: str, data: str, draws: int | None, device: str | None
) -> dict[str, Any]:
    """Evaluate both forms of a model on the same draws; add the bound and the difference to the model card."""
    from sedd import evaluation, hub
    from sedd.loading import load_model
    from sedd.runtime import distributed

    protocol = evaluation.get_protocol("strict")
    with distributed.process_group(device) as ranks:
        before = load_model(model, device=str(ranks.device))
        given: Any = (evaluation.read_corpus(data, protocol, before), protocol, ranks)
        hub.save_pretrained(model, out, dtype=dtype)
        after = load_model(out, device=str(ranks.device))
        with progress_on_stderr("evaluating") as on_progress:
            result = evaluation.evaluate(after, *given, draws=draws, on_progress=on_progress)
        with progress_on_stderr("comparing") as on_progress:
            difference = evaluation.evaluate_difference(before, after, *given, draws=draws, on_progress=on_progress)
    cost = {"dtype": dtype, "data": Path(data).name, **difference}
    facts = hub.CardFacts.read(out)
    hub.write_card(out, out.name, replace(facts, results=[*facts.results, result], weights_cost=cost))
    return {"evaluation": result, "cost": cost}


@root.command()
def push(
    model: root.ModelFolder,
    repo: str,
    *,
    result: list[Path] | None = None,
    private: bool = False,
    out: Path | None = None,
    network: list[str] | None = None,
    as_json: bool = False,
) -> None:
    """Upload a model to the Hugging Face Hub: EMA weights, configuration, tokenizer, and a model card with results.

    Args:
        repo: Name on the Hub: owner/name.
        result: Results of sedd eval --out, for the model card. Repeatable.
        private: Make a new repository private.
        out: Folder to write the files to instead of uploading them.
    """
    if not is_repo_id(repo):
        raise ValueError(f"{repo!r} is not the name of a repository; write owner/name")
    results = [record for path in result or [] for record in _records(path)]
    if out is not None:
        checkpoint.require_empty(out)
    root.announce(f"{root.count_of(len(results), 'result')} for its card, to {out or f'{repo} on the Hub'}", model)
    from sedd import hub

    with Console(stderr=True).status("uploading" if out is None else "writing"):
        if out is None:
            address: Path | str = hub.push_to_hub(model, repo, private=private, results=results)
        else:
            address = hub.save_pretrained(model, out, repo, results)
    root.print_record({"model": repo, "address": str(address)}, as_json)


def _records(path: Path) -> list[dict[str, Any]]:
    """Read results for a card: of sedd eval, one record per line."""
    needed = ("nats_per_token", "stderr_nats_per_token", "protocol", "data")
    advice = f"write results with: sedd eval MODEL DATA --out {path}"
    try:
        found = [parse_json(line) for line in read_text(path).splitlines()]
        for number, record in enumerate(found, 1):
            check_fields(f"line {number}", record, RESULT_TYPES, required=needed)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as results: {error}; {advice}") from None
    if not found:
        raise ValueError(f"{path} holds no results; {advice}")
    return found
