"""Models by their name: a folder here, a folder in a published layout, or a repository on the Hub."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sedd import checkpoint, factory
from sedd import tokenizer as tokenizers
from sedd.hub import client, convert
from sedd.hub.card import card
from sedd.hub.convert import files
from sedd.hub.convert.convert import RECORD, free
from sedd.runtime import run_log
from sedd.tokenizer import BPE, Tokenizer

GPT2 = ("openai-community/gpt2", "gpt2")
GPT2_TOKENS = 50257


def fetch(name: str | Path, revision: str | None = None) -> Path:
    """A folder that `build.load` reads, of a model by its name.

    A published layout is converted once, into the cache (``SEDD_CACHE``), if it is safetensors; pickles are read by
    `sedd import` alone.
    """
    if Path(name).exists():
        folder = Path(name)
    elif client.is_id(str(name)):
        folder = client.download(str(name), revision)
    else:
        raise ValueError(f"{name} is neither a folder nor the name of a model on the Hub, owner/name")
    weights = [file for file in files.NAMES if (folder / file).is_file()]
    if (folder / "checkpoints").is_dir() or (folder / "ema.safetensors").is_file() or not weights:
        return folder  # ours, or nobody's, of which `build.load` says so
    if ".safetensors" not in weights[0]:
        raise ValueError(
            f"{name} holds no safetensors of a model; a published checkpoint becomes a model folder by: "
            f"sedd import {name} --out MODEL"
        )
    return _converted(folder, str(name))


def _converted(folder: Path, name: str) -> Path:
    """The cached model folder of a published one, made where it is missing or of other files."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.suffix in (".json", ".safetensors")):
        real = path.resolve()  # in the Hub's cache, a file called by its content
        digest.update(f"{real} {real.stat().st_size} {real.stat().st_mtime_ns}\n".encode())
    cache = Path(os.environ.get("SEDD_CACHE", Path.home() / ".cache" / "sedd")) / "models"
    place = cache / digest.hexdigest()[:32]
    if not place.exists():
        found = convert.read(folder)
        convert.save(found, tokenizer(found), place, source_name(name))
    return place


def source_name(name: str) -> str:
    """How a source is called in records: as on the Hub, or by its last folder alone."""
    return name if client.is_id(name) and not Path(name).exists() else Path(name).resolve().name


def tokenizer(found: convert.Published, given: str | None = None) -> Tokenizer | None:
    """The tokenizer of a published checkpoint: ``given``, what lies beside it, or GPT-2's; None where there is none."""
    if given is not None:
        if given == "gpt2":
            return _gpt2()
        return factory.build_tokenizer(given, _no_texts)
    if (tokens := _beside(found.folder)) is not None:
        return tokens
    if found.vocab_size != GPT2_TOKENS:
        return None
    try:
        return _gpt2()
    except ValueError:
        return None  # the model works without: its tokens are then integers, which the caller says


def _no_texts() -> Iterator[str]:
    raise ValueError("a tokenizer that is fitted to texts is none of a published checkpoint; give gpt2 or a path")


def _beside(folder: Path) -> Tokenizer | None:
    definition, config = folder / tokenizers.DEFINITION, folder / tokenizers.CONFIG
    if config.is_file() and (definition.is_file() or "kind" in checkpoint.load_json(folder, config.stem)):
        return tokenizers.load_tokenizer(folder)
    if definition.is_file():
        return BPE.read(definition)
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        return BPE.gpt2(folder / "vocab.json", folder / "merges.txt")
    return None


def _gpt2() -> Tokenizer:
    """GPT-2's, where it was put by hand, or from the Hub."""
    try:
        return factory.build_tokenizer("gpt2", _no_texts)
    except ValueError:
        return BPE.read(client.file(GPT2, tokenizers.DEFINITION))


def from_pretrained(
    name: str | Path, revision: str | None = None, *, weights: str = "ema", device: str = "cpu"
) -> factory.LoadedModel:
    """A model by its name: a folder, or a repository on the Hub, ours or published."""
    return factory.load(fetch(name, revision), weights, device)


def save_pretrained(
    model: str | Path, out: Path, name: str | None = None, results: Sequence[Mapping[str, Any]] = ()
) -> Path:
    """Write what is shared of a model: averaged weights, configuration, tokenizer, and a card that says what it is.

    ``model`` is the folder of a run or of a model. Names of data stay, the folders they lay in do not.
    """
    out, loaded = free(out), factory.load(model)
    config = {**loaded.config.as_dict(), "vocab_size": loaded.process.vocab_size, "labels": loaded.labels}
    config["data"]["sources"] = loaded.config.data.sources = [Path(s).name for s in loaded.config.data.sources]
    known = (loaded.folder / f"{RECORD}.json").is_file()
    origin = checkpoint.load_json(loaded.folder, RECORD) if known else None
    state = checkpoint.load_json(loaded.folder, "state")
    records = {"config": config, "state": state} | ({RECORD: origin} if known else {})
    text = card(loaded, name or out.name, [*_held_out(Path(model), state), *results], origin)
    tensors = {"ema": checkpoint.load_tensors(loaded.folder, "ema")}
    checkpoint.save(out.parent, out.name, tensors, records, extra=loaded.tokenizer.save)
    with checkpoint.explain_write_errors(
        out / "README.md"
    ):  # not in the manifest: people edit it where it is published
        (out / "README.md").write_text(text, encoding="utf-8")
    return out


def _held_out(folder: Path, state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The bound that a run measured on its held-out data at the step that is saved, with its error."""
    if not (folder / "log.jsonl").is_file():
        return []
    found = [r for r in run_log.read_log(folder) if r["step"] == state["step"] and "bound_stderr" in r]
    return [
        {
            "data": "held-out part of its data",
            "protocol": "held-out",
            "nats_per_token": round(record["bound"], 5),
            "stderr_nats_per_token": round(record["bound_stderr"], 5),
            "bits_per_char": round(record["bound_bits_per_char"], 5),
        }
        for record in found[-1:]
    ]


def push_to_hub(
    model: str | Path, name: str, *, private: bool = False, results: Sequence[Mapping[str, Any]] = ()
) -> str:
    """Put a model on the Hub as ``name``, with its card; its address."""
    if not client.is_id(name):
        raise ValueError(f"{name!r} is no name of a repository; write owner/name")
    temporary = Path(tempfile.mkdtemp(prefix="sedd-"))
    try:
        folder = save_pretrained(model, temporary / "model", name, results)
        return client.upload(folder, name, private, f"Model and card of {name}")
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
