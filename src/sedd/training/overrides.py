"""Merge defaults, a recipe, a file and flags into the configuration of a run."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from sedd import data
from sedd.runtime import run_log
from sedd.runtime.launch import find_launch, is_restart
from sedd.schema import check_choice
from sedd.training import checkpoint, networks
from sedd.training.config import ModelConfig, RunConfig
from sedd.training.datasets import check_data, find_sources, require_sources
from sedd.training.recipes import RECIPES
from sedd.yaml_file import parse_yaml, read_settings

_FLAGS = {
    "noise": "process",
    "model": "parameterization seq_len",
    "data": "tokenizer packing label column encoding sources",
    "train": "batch_size save_every compile fsdp on_nonfinite",
    "optim": "lr",
    "budget": "steps minutes",
}
PATHS = {name: f"{section}.{name}" for section, names in _FLAGS.items() for name in names.split()}
PATHS |= {name: name for name in ("network", "objective", "seed")}
"""The configuration key that each flag of ``sedd train`` sets."""


def decide_resume(out: Path, resume: bool) -> bool:
    """Return whether to continue the run in ``out``: if ``resume`` is given, or torchrun has restarted this process.

    Reject a run that would be overwritten, a folder without one to continue, and one whose checkpoints are lost.
    """
    holds_run, root = (out / checkpoint.CONFIG).is_file(), out / checkpoint.CHECKPOINTS
    if holds_run and (resume or is_restart()):
        is_lost = not any(root.glob("*step-*"))  # also one that was not completely written
        for record in run_log.read_log(out) if is_lost and (out / run_log.LOG).is_file() else ():
            if record.get("save_seconds", 0) > 0:
                lost = f"the run {out} has no checkpoint, and by step {record['step']} it had saved one"
                raise ValueError(f"{lost}; restore {root}, or start anew with another --out")
    if is_restart():
        return holds_run
    if resume and not holds_run:
        why = "it has no config.json" if out.is_dir() else "it does not exist"
        raise ValueError(f"{out} holds no run to resume: {why}; check --out, or leave --resume out to start a run")
    if not resume and checkpoint.list_checkpoints(root):
        raise ValueError(f"{out} holds a run already; add --resume to continue it, or choose another --out")
    return resume


def merge_config(
    flags: Mapping[str, Any],
    *,
    resume: Path | None = None,
    recipe: str | None = None,
    file: Path | None = None,
    sets: Sequence[str] = (),
    on_sizing: Callable[[str], None] = lambda text: None,
    device: str | None = None,
) -> RunConfig:
    """Merge defaults, the configuration of a run that is resumed, a recipe, a file, flags and ``sets``; later ones win.

    With neither a run to resume nor a recipe nor a file, what decides size and speed is chosen for the machine,
    the data and the budget (`sizing.choose_sizing`), unless width, depth and length of the network are all given;
    ``on_sizing`` is called with lines that say what was chosen.

    A flag is a key of `PATHS`, a configuration key, or a section with a mapping, and is left out if it is None.
    ``file`` is YAML or JSON, or the config.json of a run or a model; ``sets`` are assignments as in ``optim.lr=1e-4``.
    """
    if recipe is not None:
        check_choice("recipe", recipe, RECIPES)
    stored = find_sources(checkpoint.read_run_config(resume), resume) if resume else None
    given_flags = {PATHS.get(name, name): value for name, value in flags.items() if value is not None}
    if "network" in given_flags:
        given_flags["network"] = networks.named(given_flags["network"])
    in_file = read_settings(file) if file else {}
    derived = checkpoint.DERIVED if "vocab_size" in in_file else ()  # a model's config.json is more than its run's
    layers = [
        stored.as_dict() if stored else {},
        RECIPES[recipe] if recipe else {},
        {name: value for name, value in in_file.items() if name not in derived},
        _merge(*(_nested(key, value) for key, value in given_flags.items()), *map(_assignment, sets)),
    ]
    budgets = [layer["budget"] for layer in layers if layer.get("budget")]
    given = _merge(*layers) | {"budget": budgets[-1] if budgets else {}}  # --minutes 60 removes a recipe's steps
    if _section(given, "data").get("label") is not None:
        given = _merge({"data": {"packing": "lines"}}, given)  # packed text has no records to label
    config = RunConfig.from_dict(given).check_trainable()
    sources = config.data.sources
    _allow_network(layers, resume, file)
    if config.network:
        networks.import_class(config.network)  # an error comes before any work
    if resume and stored and sources == stored.data.sources:
        require_sources(config, resume, f"sedd train DATA --out {resume} --resume")
    if sources:
        check_data(config.data)
    is_open = bool({"width", "depth", "seq_len"} - _section(given, "model").keys())
    # several processes could choose differently, so defaults apply
    is_sized = bool(is_open and sources and not (stored or recipe or file) and find_launch().world_size == 1)
    choices: list[Callable[..., dict[str, Any]]] = [_read_packing, partial(_fit_length, on_sizing)]
    if is_sized:
        RunConfig.from_dict(given).resolved()  # raises an error if options contradict each other
        what = ", ".join(sources[:3]) + (f" and {len(sources) - 3:,} more" if len(sources) > 3 else "")
        on_sizing(f"{what}: the network is chosen for this machine, the data and the budget")
        from sedd.training import sizing  # imports torch, which takes seconds: not before an error

        choices = [sizing.choose_tokenizer, *choices, sizing.choose_features, sizing.choose_sizing]
    for choose in choices:
        given = _merge(choose(RunConfig.from_dict(given), given, device), given)
    config = RunConfig.from_dict(given)
    if is_sized:
        on_sizing(sizing.describe_sizing(config, device))
    if config.model.width % config.model.heads:
        raise ValueError(f"model.width {config.model.width} is not a multiple of model.heads {config.model.heads}")
    config = config.resolved()
    if resume and stored and config.budget != stored.budget:
        _check_budget_left(config, resume)
    if sources and not is_sized:
        origins = {"recipe": recipe, "run": resume, "settings of": file}
        origin = next((f"{kind} {name}" for kind, name in origins.items() if name), "as given")
        on_sizing(f"{origin}: {config.describe_sizes()}, {config.budget.describe()}")
    return config


def _allow_network(layers: Sequence[Mapping[str, Any]], resume: Path | None, file: Path | None) -> None:
    """Allow the network of a resumed run, a settings file and flags; that of a config.json if the user trained it."""
    stored, _, in_file, given = (_section(layer, "network") for layer in layers)
    if resume and stored:
        networks.allow_own(resume, stored)
    if file and in_file.get("class") and file.name == checkpoint.CONFIG:
        networks.allow_own(checkpoint.run_folder(file.absolute().parent), in_file)
    elif in_file:
        networks.named(in_file)
    networks.named(given)
    sizes = {f.name for f in fields(ModelConfig)} - {"seq_len", "parameterization", "time_conditioning"}
    if (stored or in_file or given) and (unused := sorted(sizes & _section(layers[-1], "model").keys())):
        own = "you train a network of your own; set options of its constructor as in --set network.width=64"
        raise ValueError(f"model.{unused[0]} is an option of sedd's own transformer, and {own}")


def _check_budget_left(config: RunConfig, run: Path) -> None:
    """Reject a budget that the run has used up; a damaged checkpoint is reported when the run is resumed."""
    try:
        state = checkpoint.read_state(checkpoint.list_checkpoints(run / checkpoint.CHECKPOINTS)[0])
    except (IndexError, ValueError):
        return
    progress = state["step"] or 0, state["tokens"] or 0, state.get("seconds") or 0.0
    if config.budget.spent(*progress) >= 1:
        raise ValueError(f"{run} cannot be resumed: {config.budget.describe_spent(*progress)}")


def _merge(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Merge mappings, and mappings in them; later values win."""
    merged: dict[str, Any] = {}
    for layer in layers:
        for name, value in layer.items():
            parts = [part for part in (merged.get(name), value) if isinstance(part, Mapping)]
            merged[name] = _merge(*parts) if isinstance(value, Mapping) else value
    return merged


def _section(given: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the keys of a section that were given."""
    section = given.get(name)
    return section if isinstance(section, Mapping) else {}


def _nested(key: str, value: Any) -> dict[str, Any]:
    """Return the mapping that sets a dotted key alone."""
    for name in reversed(key.split(".")):
        value = {name: value}
    return dict(value)


def _assignment(text: str) -> dict[str, Any]:
    """Read ``KEY=VALUE``: a list, a mapping or quoted text is YAML, null or nothing is None, all else is text."""
    key, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--set is {text!r}; write KEY=VALUE, as in optim.lr=1e-4")
    value = value.strip()
    if value.startswith(("[", "{", '"', "'")):
        return _nested(key, parse_yaml(f"the value of {key}", value))
    if key.startswith("network."):  # no schema states the types of these: a number, true, false or null, else text
        with suppress(ValueError):
            return _nested(key, json.loads(value.lower() if value.lower() in ("true", "false") else value))
        return _nested(key, value)
    return _nested(key, None if value.lower() in ("", "null", "~") else value)


def _read_packing(config: RunConfig, given: Mapping[str, Any], device: str | None) -> dict[str, Any]:
    """Take packing and padding of prepared data from its index."""
    sources = config.data.sources
    if len(sources) != 1 or not data.is_prepared(sources[0]):
        return {}
    index, wanted = data.Index.read(Path(sources[0])), _section(given, "data").get("packing")
    if wanted not in (None, index.packing):
        advice = f"prepare the text again with --packing {wanted}, or train with --packing {index.packing}"
        raise ValueError(f"data.packing is {wanted}, and {sources[0]} was prepared with {index.packing}; {advice}")
    return {"data": {"packing": index.packing, **({"pad": index.pad} if index.pad else {})}}


def _fit_length(
    on_sizing: Callable[[str], None], config: RunConfig, given: Mapping[str, Any], device: str | None
) -> dict[str, Any]:
    """Take the length of sequences from the longest record, unless it is given."""
    options = config.data
    if options.packing != "lines" or not options.sources or "seq_len" in _section(given, "model"):
        return {}
    lengths = data.scan_record_lengths(
        options.sources, options.tokenizer, options.column, options.encoding, options.fitted_fraction
    )
    on_sizing(f"{lengths}: sequences have {lengths.longest} tokens{lengths.advice()}")
    return {"model": {"seq_len": lengths.longest}}
