"""Merge defaults, a recipe, a file and flags into the configuration of a run."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from sedd import border, checkpoint, data
from sedd.config import BudgetConfig, RunConfig
from sedd.recipes import RECIPES
from sedd.runtime import run_log
from sedd.runtime.launch import find_launch, is_restart
from sedd.training.sources import check_data, find_sources, require_sources

PATHS = {
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
    given_flags: Any = OmegaConf.create({})
    try:
        for name, value in flags.items():
            if value is not None:
                OmegaConf.update(given_flags, PATHS.get(name, name), value)
        layers: list[Any] = [
            OmegaConf.create(stored.as_dict() if stored else {}),
            OmegaConf.create(RECIPES[recipe] if recipe else {}),
            OmegaConf.create(_read_file(file) if file else {}),
            OmegaConf.merge(given_flags, OmegaConf.from_dotlist(_checked(sets))),
        ]
        for layer in layers:
            border.refuse_interpolation(OmegaConf.to_container(layer, resolve=False))
        for i, layer in enumerate(layers):
            if any(later.get("budget") for later in layers[i + 1 :]):
                layer.pop("budget", None)  # --minutes 60 is not cut short by the number of steps of a recipe
        given: Any = OmegaConf.merge(*layers)
        if OmegaConf.select(given, "data.label") is not None:
            given = _fill_in(given, {"data": {"packing": "lines"}})  # packed text has no records to label
    except (OmegaConfBaseException, LookupError, OSError, RecursionError, TypeError, YAMLError) as error:
        raise _misfit(error) from None  # a LookupError: OmegaConf's, at odd keys
    config = _build(given).check_trainable()
    if resume and stored and config.data.sources == stored.data.sources:
        require_sources(config, resume, f"sedd train DATA --out {resume} --resume")
    if config.data.sources:
        check_data(config.data)
    is_sized = not (stored or recipe or file) and _needs_sizing(config, given)
    if is_sized:
        _build(given).resolved()  # raises an error if options contradict each other
        named, others = config.data.sources[:3], len(config.data.sources) - 3
        what = ", ".join(named) + (f" and {others:,} more" if others > 0 else "")
        on_sizing(f"{what}: the network is chosen for this machine, the data and the budget")
        from sedd.training import sizing  # imports torch, which takes seconds: not before an error

        given = _fill_in(given, sizing.choose_tokenizer(config.data, device))
    given = _fit_to_records(given, on_sizing)
    if is_sized:
        given = _fill_in(given, sizing.choose_features(_build(given), device))
        given = _fill_in(given, sizing.choose_sizing(_build(given), given.get("model") or {}, device))
        on_sizing(sizing.describe_sizing(_build(given), device))
    config = _build(given)
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


def _read_file(file: Path) -> Any:
    """Return the settings in a file, without what the config.json of a model has beside those of its run."""
    found = border.read_settings(file) or {}
    if isinstance(found, dict) and "vocab_size" in found:
        return {name: value for name, value in found.items() if name not in checkpoint.DERIVED}
    return found


def _checked(sets: Sequence[str]) -> list[str]:
    """Return assignments whose values, which are YAML, can be parsed safely."""
    for text in sets:
        border.check_yaml(f"the option {text.partition('=')[0]}", text.partition("=")[2])
    return list(sets)


def _fill_in(given: Any, values: Mapping[str, Any]) -> Any:
    """Add values for keys that were not given."""
    return OmegaConf.merge(OmegaConf.create(dict(values)), given)


def _fit_to_records(given: Any, on_sizing: Callable[[str], None]) -> Any:
    """Take packing and padding of prepared data from its index, and the length of records from the longest."""
    sources = _build(given).data.sources
    if len(sources) == 1 and data.is_prepared(sources[0]):
        index, wanted = data.Index.read(Path(sources[0])), (given.get("data") or {}).get("packing", None)
        if wanted not in (None, index.packing):
            raise ValueError(
                f"data.packing is {wanted}, and {sources[0]} was prepared with {index.packing}; prepare the text again "
                f"with --packing {wanted}, or train with --packing {index.packing}"
            )
        given = _fill_in(given, {"data": {"packing": index.packing, **({"pad": index.pad} if index.pad else {})}})
    options = _build(given).data
    if options.packing != "lines" or not sources or "seq_len" in (given.get("model") or {}):
        return given
    lengths = data.scan_record_lengths(
        sources, options.tokenizer, options.column, options.encoding, options.fitted_fraction
    )
    on_sizing(f"{lengths}: sequences have {lengths.longest} tokens{lengths.advice()}")
    return _fill_in(given, {"model": {"seq_len": lengths.longest}})


def _misfit(error: Exception) -> ValueError:
    return ValueError(f"the options do not fit: {(str(error).splitlines() or [type(error).__name__])[0]}")


def _build(given: Any) -> RunConfig:
    """Return the configuration with these keys, and defaults for the rest."""
    try:
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(RunConfig), given))
    except (OmegaConfBaseException, TypeError) as error:
        raise _misfit(error) from None
    assert isinstance(config, RunConfig)
    return config


def _needs_sizing(config: RunConfig, given: Any) -> bool:
    """Whether the network's size is open; several processes could choose differently, so defaults apply."""
    open_keys = {"width", "depth", "seq_len"} - set(given.get("model") or {})
    return bool(open_keys and config.data.sources) and find_launch().world_size == 1


def _stored_config(out: Path) -> RunConfig | None:
    """Return the stored configuration of the run in ``out``, if there is one, with its data where it is now."""
    if not (out / "config.json").is_file():
        return None
    return find_sources(RunConfig.from_dict(checkpoint.load_json(out, "config")), out)
