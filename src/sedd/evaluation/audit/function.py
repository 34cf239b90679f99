"""Loss functions in files of a user: checked without running them, then imported."""

import ast
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

PARAMETERS = ("model", "x_0", "x_t", "t", "process", "schedule", "generator")
"""What a loss function may take, by name."""


def split_name(loss: str) -> tuple[Path, str] | None:
    """Return the file and the function that ``loss`` names as FILE.py:NAME; None if it has another form."""
    path, colon, name = loss.rpartition(":")
    return (Path(path), name) if colon and path.endswith(".py") else None


def check_parameters(what: str, required: Iterable[str]) -> None:
    """Refuse a function that needs a parameter which is not passed, or both kinds of noise."""
    names = list(required)
    for name in names:
        if name not in PARAMETERS:
            raise ValueError(f"{what} takes {name!r}; a loss is called with some of {', '.join(PARAMETERS)}, by name")
    if "model" not in names:
        raise ValueError(f"{what} does not take 'model'; a bound on −log p of a model depends on the model")
    if "generator" in names and {"x_t", "t"} & {*names}:
        raise ValueError(
            f"{what} takes generator and x_t or t; take x_t and t, over which the audit averages exactly, or generator "
            "to draw all noise by yourself"
        )


def check_file(path: Path, name: str) -> None:
    """Refuse a file that cannot be read or does not define the function, without running it."""
    if not os.path.isfile(path):  # False, too, for a name that is too long
        raise ValueError(f"{path} does not exist; name a Python file and a function in it: my_loss.py:name")
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not Python: {error}") from None
    functions = {node.name: node.args for node in tree.body if isinstance(node, ast.FunctionDef)}
    if name not in functions:
        found = f"it defines {', '.join(functions)}" if functions else "it defines none"
        raise ValueError(f"{path} does not define the function {name!r}; {found}")
    arguments = functions[name]
    positional = [*arguments.posonlyargs, *arguments.args]
    required = [a.arg for a in positional[: len(positional) - len(arguments.defaults)]]
    required += [a.arg for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if not default]
    check_parameters(f"{path}:{name}", required)


def load_function(path: Path, name: str) -> Callable[..., Any]:
    """Run a Python file and return one of its functions."""
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
    function: Callable[..., Any] = getattr(module, name)
    return function


def taken_parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names among `PARAMETERS` that a function takes; refuse one that needs others."""
    parameters = inspect.signature(function).parameters
    check_parameters(function.__name__, [p.name for p in parameters.values() if p.default is p.empty])
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
