"""``sedd push``: upload a model to the Hugging Face Hub."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from sedd.cli.root import AsJson, ModelFolder, Networks, announce, app, count_of, model_name, print_record
from sedd.files import parse_json, read_text
from sedd.models import is_repo_id
from sedd.schema import check_fields


@app.command()
def push(
    model: ModelFolder,
    repo: Annotated[str, typer.Argument(help="Name on the Hub: owner/name.")],
    result: Annotated[
        list[Path] | None, typer.Option(help="Results of sedd eval --out, for the model card. Repeatable.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder to write the files to instead of uploading them.")] = None,
    network: Networks = None,
    as_json: AsJson = False,
) -> None:
    """Upload a model to the Hugging Face Hub: EMA weights, configuration, tokenizer, and a model card with results."""
    from sedd.training import checkpoint

    if not is_repo_id(repo):
        raise ValueError(f"{repo!r} is not the name of a repository; write owner/name")
    results = [record for path in result or [] for record in _records(path)]
    if out is not None:
        checkpoint.require_empty(out)
    announce(f"{model_name(model)}: {count_of(len(results), 'result')} for its card, to {out or f'{repo} on the Hub'}")
    from sedd import hub

    with Console(stderr=True).status("uploading" if out is None else "writing"):
        if out is not None:
            address = str(hub.save_pretrained(model, out, repo, results))
        else:
            address = hub.push_to_hub(model, repo, private=private, results=results)
    print_record({"model": repo, "address": address}, as_json)


def _records(path: Path) -> list[dict[str, Any]]:
    from sedd.card_facts import RESULT_TYPES

    needed = ("nats_per_token", "stderr_nats_per_token", "protocol", "data")
    try:
        found = [parse_json(line) for line in read_text(path).splitlines()]
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as results: {error}") from None
    if not found or not all(isinstance(record, dict) and set(needed) <= record.keys() for record in found):
        raise ValueError(f"{path} holds no results; write them with: sedd eval MODEL DATA --out {path}")
    for number, record in enumerate(found, 1):
        check_fields(f"line {number} of {path}", record, RESULT_TYPES, required=needed)
    return found
