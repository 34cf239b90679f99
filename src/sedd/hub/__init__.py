"""Models on the Hugging Face Hub: loading by name, sharing with a model card, and conversion of published checkpoints.

Transfers use ``huggingface_hub``; its caches and settings apply here too (``HF_HOME``, ``HF_HUB_OFFLINE``, ``HF_TOKEN``
and others).
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from sedd import files
from sedd import tokenizer as tokenizers
from sedd.cache import cache_folder
from sedd.card_facts import CardFacts as CardFacts
from sedd.hub import client, convert
from sedd.hub.card import describe_cost as describe_cost
from sedd.hub.card import write_card as write_card
from sedd.hub.client import download as download
from sedd.hub.convert.files import WEIGHT_FILES, read_object
from sedd.loading import LoadedModel, load_model
from sedd.models import is_repo_id
from sedd.runtime import run_log
from sedd.terminal import warn
from sedd.tokenizer import BPE, Tokenizer, build_tokenizer
from sedd.training import checkpoint, networks

GPT2_REPOS = ("openai-community/gpt2", "gpt2")
GPT2_VOCAB_SIZE = 50257
TOKENIZER_FILES = (tokenizers.CONFIG, tokenizers.DEFINITION, "vocab.json", "merges.txt")


def fetch(name: str | Path, revision: str | None = None) -> Path:
    """Return a folder that `load_model` reads, for a name: of a folder here, a bundled model, or one on the Hub.

    A published checkpoint in safetensors is converted once and cached (``SEDD_CACHE``); `sedd import` reads pickles.
    """
    folder = checkpoint.locate_model(name) or Path(name)
    if not folder.exists() and is_repo_id(str(name)):
        try:
            folder = client.download(str(name), revision)
        except ValueError as error:
            raise ValueError(f"there is no folder {name} here, and on the Hub: {error}") from None
    weights = [file for file in WEIGHT_FILES if (folder / file).is_file()]
    if (folder / checkpoint.CHECKPOINTS).is_dir() or (folder / "ema.safetensors").is_file() or not weights:
        return folder  # a run or a model folder; `load_model` raises the error if it is neither
    if ".safetensors" not in weights[0]:
        advice = f"convert a published checkpoint with: sedd import {name} --out MODEL"
        raise ValueError(f"{name} holds no safetensors of a model; {advice}")
    return _convert_cached(folder, str(name))


def _convert_cached(folder: Path, name: str) -> Path:
    """Convert a published checkpoint, unless the cache holds the conversion of these files."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.suffix in (".json", ".safetensors")):
        real = path.resolve()  # the Hub's cache names files by their content
        digest.update(os.fsencode(f"{real} {real.stat().st_size} {real.stat().st_mtime_ns}\n"))
    target = cache_folder() / "models" / digest.hexdigest()[:32]
    if checkpoint.corruption(target, checkpoint.MODEL_FILES) is None:
        return target
    with files.locked_folder(target.with_name(f".making-{target.name}"), f"the cache {target.parent}", wait=True):
        if target.exists() and (reason := checkpoint.corruption(target, checkpoint.MODEL_FILES)):
            warn(f"the cached conversion of {name} is damaged ({reason}); converting it again")
            shutil.rmtree(target, ignore_errors=True)
        if not target.exists():
            imported = convert.read_published(folder)
            convert.save_model_folder(imported, find_tokenizer(imported), target, source_name(name))
    return target


def source_name(name: str) -> str:
    """Return the name under which a source is recorded: its id on the Hub, or the last part of its path."""
    return name if is_repo_id(name) and not Path(name).exists() else Path(name).resolve().name


def find_tokenizer(imported: convert.ImportedCheckpoint, name: str | None = None) -> Tokenizer | None:
    """Return the tokenizer of a published checkpoint, or None if there is none: its tokens are then integers.

    Args:
        name: ``gpt2``, or a path; by default the tokenizer in the folder, or GPT-2's if the vocabulary has its size.
    """
    if name is None:
        folder = imported.folder
        config, definition, vocab, merges = map(folder.joinpath, TOKENIZER_FILES)
        if config.is_file() and "kind" in read_object(config):
            return tokenizers.load_tokenizer(folder)
        if definition.is_file():
            return BPE.read(definition)
        if vocab.is_file() and merges.is_file():
            return BPE.gpt2(vocab, merges)
        if imported.vocab_size != GPT2_VOCAB_SIZE:
            return None
    elif name != "gpt2":
        return build_tokenizer(name, _no_texts)
    with suppress(ValueError):
        return build_tokenizer("gpt2", _no_texts)  # from ``SEDD_GPT2``
    try:
        return BPE.read(client.download_file(GPT2_REPOS, tokenizers.DEFINITION))
    except ValueError:
        if name is not None:
            raise
        return None


def _no_texts() -> Iterator[str]:
    raise ValueError("a published checkpoint has no texts to fit a tokenizer to; give gpt2 or a path")


def from_pretrained(name: str | Path, revision: str | None = None, **options: Any) -> LoadedModel:
    """Load what `fetch` returns for a name, and for a branch, tag or commit on the Hub, as `load_model` does."""
    return load_model(fetch(name, revision), **options)


def save_pretrained(
    model: str | Path,
    out: Path,
    name: str | None = None,
    results: Sequence[Mapping[str, Any]] = (),
    dtype: str | None = None,
    network: str | None = None,
    *,
    remember: bool = True,
) -> Path:
    """Write a model folder for sharing: EMA weights, configuration, tokenizer and a model card.

    The names of data files are kept; the folders they were in are left out.

    Args:
        model: The folder of a run or of a model.
        name: The model's name in its card; by default the name of ``out``.
        results: Records of `sedd eval` for the card.
        dtype: int8 (matrices, with a scale per row), bfloat16 or float32; by default as the weights are in ``model``.
        network: As for `load_model`.
        remember: Whether the model folder's own network may be imported when it is loaded here again.
    """
    with files.atomic_folder(out) as folder:
        checkpoint.require_empty(out)
        loaded = load_model(model, network=network)
        config = {**loaded.config.as_dict(), "vocab_size": loaded.process.vocab_size, "labels": loaded.labels}
        if (counts := checkpoint.read_stored_model(loaded.folder).token_counts) is not None:
            config["token_counts"] = counts
        config["data"]["sources"] = [Path(source).name for source in loaded.config.data.sources]
        config["data"]["tokenizer"], config["out"] = Path(loaded.config.data.tokenizer).name, None
        records = {"config": config, "state": checkpoint.read_state(loaded.folder)}
        if (origin := convert.read_origin(loaded.folder)) is not None:
            records[convert.ORIGIN] = origin
        if dtype is None:
            weights = checkpoint.load_tensors(loaded.folder, "ema")
        else:
            weights = checkpoint.pack_weights(checkpoint.load_weights(loaded.folder, "ema")[0], dtype)
        checkpoint.write(folder, {"ema": weights}, records, loaded.tokenizer.files())
        facts = CardFacts.read(loaded.folder)
        if dtype in (None, checkpoint.read_header(loaded.folder).dtype):
            measured = [*_validation_result(loaded.folder, records["state"]), *facts.results]
        else:  # what was measured before is not of these weights
            facts, measured = replace(facts, weights_cost=None, sample_metrics=None, samples=[]), []
        write_card(folder, name or out.absolute().name, replace(facts, results=[*measured, *map(dict, results)]))
    if remember:
        networks.remember(out.absolute(), config["network"])
    return out.absolute()


def _validation_result(folder: Path, state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the validation bound that a run logged at the saved step of a checkpoint, if it did."""
    run = checkpoint.run_folder(folder.resolve())
    logged = run_log.read_log(run) if (run / run_log.LOG).is_file() else []
    found = [record for record in logged if record["step"] == state["step"] and "bound_stderr" in record]
    return [
        {
            "data": "validation split of its data",
            "protocol": "held-out",
            "nats_per_token": round(record["bound"], 5),
            "stderr_nats_per_token": round(record["bound_stderr"], 5),
            "bits_per_char": round(bits, 5) if (bits := record.get("bound_bits_per_char")) else None,
        }
        for record in found[-1:]
    ]


def push_to_hub(
    model: str | Path,
    name: str,
    *,
    private: bool = False,
    results: Sequence[Mapping[str, Any]] = (),
    network: str | None = None,
) -> str:
    """Upload a model with its card to the Hub as ``name`` and return its address; arguments as `save_pretrained`'s."""
    if not is_repo_id(name):
        raise ValueError(f"{name!r} is not the name of a repository; write owner/name")
    with tempfile.TemporaryDirectory(prefix="sedd-push-") as temporary:
        out = Path(temporary) / "model"
        folder = save_pretrained(model, out, name, results, network=network, remember=False)
        return client.upload(folder, name, private, f"Model and card of {name}")
