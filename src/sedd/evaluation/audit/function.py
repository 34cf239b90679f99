"""Load a loss function from a file of the user, and check what it takes."""

import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

PARAMETERS = ("model", "x_0", "x_t", "t", "process", "schedule", "generator")
"""What a loss function may take, by name."""


def split_name(loss: str) -> tuple[Path, str] | None:
    """Return the file and the function that ``loss`` names as FILE.py:NAME; None if it has another form."""
    path, colon, name = loss.rpartition(":")
    return (Path(path), name) if colon and path.endswith(".py") else None


def load_function(path: Path, name: str) -> Callable[..., Any]:
    """Run a Python file and return one of its functions."""
    if not os.path.isfile(path):  # False, too, for a name that is too long
        raise ValueError(f"{path} does not exist; name a Python file and a function in it: my_loss.py:name")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None  # the suffix is .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # dataclasses look up their module
    sys.path.insert(0, str(path.resolve().parent))  # as for a script
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{path} cannot be run: {describe_error(error, path)}") from error
    functions = {key: value for key, value in vars(module).items() if inspect.isfunction(value)}
    if name not in functions:
        found = f"it defines {', '.join(functions)}" if functions else "it defines none"
        raise ValueError(f"{path} does not define the function {name!r}; {found}")
    return functions[name]


def taken_parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return which of `PARAMETERS` a function takes; reject one that needs others, or both kinds of noise."""
    what, parameters = function.__name__, inspect.signature(function).parameters
    required = [p.name for p in parameters.values() if p.default is p.empty]
    for name in required:
        if name not in PARAMETERS:
            raise ValueError(f"{what} takes {name!r}; a loss is called with some of {', '.join(PARAMETERS)}, by name")
    if "model" not in required:
        raise ValueError(f"{what} does not take 'model'; a bound on −log p of a model depends on the model")
    if "generator" in required and {"x_t", "t"} & {*required}:
        raise ValueError(
            f"{what} takes generator and x_t or t; take x_t and t, over which the audit averages exactly, or generator "
            "to draw all noise by yourself"
        )
    return tuple(name for name in PARAMETERS if name in parameters)


def describe_error(error: BaseException, path: Path | None = None) -> str:
    """Return an error as one line, with the line of the user's file where it arose."""
    frame, line = error.__traceback__, None
    while frame is not None:
        if path is not None and Path(frame.tb_frame.f_code.co_filename) == path:
            line = frame.tb_lineno
        frame = frame.tb_next
    where = "" if line is None else f" (line {line})"
    return f"{type(error).__name__}{where}: {error}"
