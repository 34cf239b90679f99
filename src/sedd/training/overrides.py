"""Merge defaults, a recipe, a file and flags into the configuration of a run."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from sedd import data
from sedd.runtime import run_log
from sedd.runtime.launch import find_launch, is_restart
from sedd.training import checkpoint, networks
from sedd.training.config import BudgetConfig, ModelConfig, RunConfig
from sedd.training.datasets import check_data, find_sources, require_sources
from sedd.training.recipes import RECIPES
from sedd.yaml_file import parse_yaml, read_settings

PATHS = {
    "network": "network",
    "process": "noise.process",
    "parameterization": "model.parameterization",
    "objective": "objective",
    "tokenizer": "data.tokenizer",
    "packing": "data.packing",
    "label": "data.label",
    "column": "data.column",
    "encoding": "data.encoding",
    "seq_len": "model.seq_len",
    "batch_size": "train.batch_size",
    "lr": "optim.lr",
    "steps": "budget.steps",
    "minutes": "budget.minutes",
    "save_every": "train.save_every",
    "seed": "seed",
    "compile": "train.compile",
    "fsdp": "train.fsdp",
    "on_nonfinite": "train.on_nonfinite",
    "sources": "data.sources",
}
"""The configuration key that each flag of ``sedd train`` sets."""


def decide_resume(out: Path, resume: bool) -> bool:
    """Return whether to continue the run in ``out``: if ``resume`` is given, or torchrun has restarted this process.

    A run that would be overwritten is refused, and so is a folder without a run to continue, or with one whose
    checkpoints are lost.
    """
    holds_run = (out / "config.json").is_file()
    if holds_run and (resume or is_restart()):
        _check_checkpoints(out)
    if is_restart():
        return holds_run
    if resume and not holds_run:
        why = "it has no config.json" if out.is_dir() else "it does not exist"
        raise ValueError(f"{out} holds no run to resume: {why}; check --out, or leave --resume out to start a run")
    if not resume and checkpoint.list_checkpoints(out / checkpoint.CHECKPOINTS):
        raise ValueError(f"{out} holds a run already; add --resume to continue it, or choose another --out")
    return resume


def _check_checkpoints(out: Path) -> None:
    """Raise an error for a run without checkpoints whose log shows that it had saved one."""
    root = out / checkpoint.CHECKPOINTS
    if any(root.glob("*step-*")) or not (out / run_log.LOG).is_file():  # also one that was not completely written
        return
    for record in run_log.read_log(out):
        if record.get("save_seconds", 0) > 0:
            raise ValueError(
                f"the run {out} has no checkpoint, and its log shows that it had saved one by step {record['step']}; "
                f"restore {root}, or start anew with another --out"
            )


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

    A budget replaces all of an earlier one: one in minutes removes a limit of steps.

    With neither a run to resume nor a recipe nor a file, what decides size and speed is chosen for the machine,
    the data and the budget (`sizing.choose_sizing`), unless width, depth and length of the network are all given.

    Args:
        flags: Values by name: a key of `PATHS`, a configuration key, or a section with a mapping; None is left out.
        resume: The folder of the run that is resumed.
        recipe: A name in `recipes.RECIPES`.
        file: A YAML or JSON file, which may be the config.json of a run or of a model.
        sets: Assignments as in ``optim.lr=1e-4``.
        on_sizing: Called with lines that say what is trained, and what was chosen for the machine and the data.
        device: The device that size and speed are chosen for; None: the default.
    """
    if recipe is not None and recipe not in RECIPES:
        raise ValueError(f"recipe is {recipe!r}; choose one of {', '.join(RECIPES)}")
    stored = _stored_config(resume) if resume else None
    given_flags = {name: value for name, value in flags.items() if value is not None}
    if "network" in given_flags:
        given_flags["network"] = networks.named(given_flags["network"])
    flag_layers = [_nested(PATHS.get(name, name), value) for name, value in given_flags.items()]
    layers: list[Mapping[str, Any]] = [
        stored.as_dict() if stored else {},
        RECIPES[recipe] if recipe else {},
        _read_file(file) if file else {},
        _merge(*flag_layers, *map(_assignment, sets)),
    ]
    for i, layer in enumerate(layers):
        if any(later.get("budget") for later in layers[i + 1 :]):
            layers[i] = {**layer, "budget": {}}  # --minutes 60 is not cut short by the number of steps of a recipe
    given = _merge(*layers)
    if _section(given, "data").get("label") is not None:
        given = _merge({"data": {"packing": "lines"}}, given)  # packed text has no records to label
    config = RunConfig.from_dict(given).check_trainable()
    _allow_network(layers, resume, file)
    if config.network:
        networks.import_class(config.network)  # an error comes before any work
    if resume and stored and config.data.sources == stored.data.sources:
        require_sources(config, resume, f"sedd train DATA --out {resume} --resume")
    if config.data.sources:
        check_data(config.data)
    is_sized = not (stored or recipe or file) and _needs_sizing(config, given)
    if is_sized:
        RunConfig.from_dict(given).resolved()  # raises an error if options contradict each other
        named, others = config.data.sources[:3], len(config.data.sources) - 3
        what = ", ".join(named) + (f" and {others:,} more" if others > 0 else "")
        on_sizing(f"{what}: the network is chosen for this machine, the data and the budget")
        from sedd.training import sizing  # imports torch, which takes seconds: not before an error

        given = _merge(sizing.choose_tokenizer(config.data, device), given)
    given = _fit_to_records(given, on_sizing)
    if is_sized:
        given = _merge(sizing.choose_features(RunConfig.from_dict(given), device), given)
        given = _merge(sizing.choose_sizing(RunConfig.from_dict(given), _section(given, "model"), device), given)
        on_sizing(sizing.describe_sizing(RunConfig.from_dict(given), device))
    config = RunConfig.from_dict(given)
    config.model.check_heads()
    config = config.resolved()
    if resume and stored and config.budget != stored.budget:
        _check_budget_left(config.budget, resume)
    if config.data.sources and not is_sized:
        origin = (
            f"recipe {recipe}"
            if recipe
            else f"run {resume}"
            if stored
            else f"settings of {file}"
            if file
            else "as given"
        )
        on_sizing(f"{origin}: {config.describe_sizes()}, {config.budget.describe()}")
    return config


def _allow_network(layers: Sequence[Mapping[str, Any]], resume: Path | None, file: Path | None) -> None:
    """Allow the network of a run that is resumed, of a settings file and of flags.

    A config.json is no settings file that the user wrote: its network must be that of a run of the user's own.
    """
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
        raise ValueError(
            f"model.{unused[0]} is an option of sedd's own transformer, and you train a network of your own; set "
            "options of its constructor as in --set network.width=64"
        )


def _check_budget_left(budget: BudgetConfig, run: Path) -> None:
    """Refuse to resume a run with a budget that it has used up already."""
    saved = checkpoint.list_checkpoints(run / checkpoint.CHECKPOINTS)
    if not saved:
        return
    try:
        state = checkpoint.read_state(saved[0])
    except ValueError:  # a damaged checkpoint is reported when the run is resumed
        return
    progress = state["step"] or 0, state["tokens"] or 0, state.get("seconds") or 0.0
    if budget.spent(*progress) >= 1:
        raise ValueError(f"{run} cannot be resumed: {budget.describe_spent(*progress)}")


def _read_file(file: Path) -> dict[str, Any]:
    """Return the settings in a file, without what the config.json of a model has beside those of its run."""
    found = read_settings(file)
    derived = checkpoint.DERIVED if "vocab_size" in found else ()
    return {name: value for name, value in found.items() if name not in derived}


def _merge(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Merge mappings, and mappings in them; later values win."""
    merged: dict[str, Any] = {}
    for layer in layers:
        for name, value in layer.items():
            parts = [part for part in (merged.get(name), value) if isinstance(part, Mapping)]
            merged[name] = _merge(*parts) if isinstance(value, Mapping) else value
    return merged


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
    if key.startswith("network."):  # whose types no schema states
        return _nested(key, _number(value))
    return _nested(key, None if value.lower() in ("", "null", "~") else value)


def _number(text: str) -> Any:
    """Return the number, truth value or null that a text is in JSON, or the text."""
    try:
        return json.loads(text.lower() if text.lower() in ("true", "false") else text)
    except ValueError:
        return text


def _section(given: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the keys of a section that were given."""
    section = given.get(name)
    return section if isinstance(section, Mapping) else {}


def _fit_to_records(given: dict[str, Any], on_sizing: Callable[[str], None]) -> dict[str, Any]:
    """Take packing and padding of prepared data from its index, and the length of records from the longest."""
    sources = RunConfig.from_dict(given).data.sources
    if len(sources) == 1 and data.is_prepared(sources[0]):
        index, wanted = data.Index.read(Path(sources[0])), _section(given, "data").get("packing")
        if wanted not in (None, index.packing):
            raise ValueError(
                f"data.packing is {wanted}, and {sources[0]} was prepared with {index.packing}; prepare the text again "
                f"with --packing {wanted}, or train with --packing {index.packing}"
            )
        given = _merge({"data": {"packing": index.packing, **({"pad": index.pad} if index.pad else {})}}, given)
    options = RunConfig.from_dict(given).data
    if options.packing != "lines" or not sources or "seq_len" in _section(given, "model"):
        return given
    lengths = data.scan_record_lengths(
        sources, options.tokenizer, options.column, options.encoding, options.fitted_fraction
    )
    on_sizing(f"{lengths}: sequences have {lengths.longest} tokens{lengths.advice()}")
    return _merge({"model": {"seq_len": lengths.longest}}, given)


def _needs_sizing(config: RunConfig, given: Mapping[str, Any]) -> bool:
    """Whether the network's size is open; several processes could choose differently, so defaults apply."""
    open_keys = {"width", "depth", "seq_len"} - _section(given, "model").keys()
    return bool(open_keys and config.data.sources) and find_launch().world_size == 1


def _stored_config(out: Path) -> RunConfig | None:
    """Return the stored configuration of the run in ``out``, if there is one, with its data where it is now."""
    if not (out / "config.json").is_file():
        return None
    return find_sources(checkpoint.read_run_config(out), out)
