"""Networks of the user's own: their names, who may import them, and how they are built.

A network is named by its import path, ``my_package:MyNet``, or by an entry point of the group ``sedd.networks``. To
import it is to run its code, so a file alone never causes an import. sedd imports

- what you name, by ``--network``, ``network=`` or a settings file that you wrote: `allow`;
- the network of a run that you trained here: `remember` and `allow_own`;
- entry points of packages that you installed.
"""

import functools
import hashlib
import importlib
import inspect
import json
import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sedd import files
from sedd.files import read_json
from sedd.registry import Registry
from sedd.terminal import warn

if TYPE_CHECKING:
    from torch import nn

NETWORKS = Registry("network", {}, "sedd.networks")  # networks of other packages, by name
Settings = Mapping[str, Any]  # the section network of a configuration: class, its name, and options of its constructor

_allowed: dict[str, "str | type[nn.Module] | None"] = {}
"""What may be imported in this process: the class, or a folder that is searched after the installed packages."""


def allow(network: "str | type[nn.Module]") -> str:
    """Allow a class, or a name that may be in the working directory, because the user named it; return its name."""
    if isinstance(network, str):
        if network not in NETWORKS.plugins:
            _check_path(network)
            _allowed.setdefault(network, os.getcwd())
        return network
    name = f"{getattr(network, '__module__', '?')}:{getattr(network, '__qualname__', '?')}"
    _allowed[name] = _check_class(name, network)
    return name


def named(network: "str | type[nn.Module] | Settings") -> dict[str, Any]:
    """Return the section ``network`` for a class, a name or a section that the user gave, and allow it."""
    section = dict(network) if isinstance(network, Mapping) else {"class": network}
    if "class" not in section:
        return section  # options alone, for a class that is named elsewhere
    return section | {"class": allow(section["class"])}


def allow_own(folder: Path, network: Settings) -> None:
    """Allow the network of a run or model that `remember` recorded, if it is the same with the same options."""
    if not isinstance(network.get("class"), str) or network["class"] in _allowed:
        return
    with suppress(OSError, ValueError, KeyError, TypeError):
        record = read_json(_record_path(folder))
        if record["folder"] == os.path.realpath(folder) and record["network"] == dict(network):
            _allowed[network["class"]] = record["code"]


def remember(folder: Path, network: Settings) -> None:
    """Record in the user's own settings that the model in ``folder`` was made here, so that it is found again."""
    if not network or network["class"] in NETWORKS.plugins:
        return
    module = sys.modules.get(import_class(network).__module__.partition(".")[0])
    code: str | None = next(iter(getattr(module, "__path__", ())), getattr(module, "__file__", None))
    code = os.path.dirname(os.path.abspath(code)) if code else None  # where the class can be imported from
    record = {"folder": os.path.realpath(folder), "network": dict(network), "code": code}
    path = _record_path(folder)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        files.write_text(path, json.dumps(record, indent=1) + "\n")
    except OSError as error:
        warn(f"{path} could not be written ({error.strerror}); commands on {folder} need --network {network['class']}")


def _record_path(folder: Path) -> Path:
    """Return the file that records who made a model, in the user's settings, where no download writes."""
    settings = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    digest = hashlib.sha256(os.fsencode(os.path.realpath(folder))).hexdigest()[:32]
    return settings / "sedd" / "networks" / f"{digest}.json"


def import_class(network: Settings) -> "type[nn.Module]":
    """Import the class of a network; raise ValueError if it is not allowed, cannot be imported or is no module."""
    name: str = network["class"]
    if name in NETWORKS.plugins:
        return _check_class(name, NETWORKS.load(name))
    if name not in _allowed:
        advice = f"if you trust that code, add --network {name}, or in Python network=MyNet"
        raise ValueError(f"the model names the network {name}, and sedd imports no code that a file names; {advice}")
    found = _allowed[name]
    if found is None or isinstance(found, str):
        found = _allowed[name] = _check_class(name, _import(name, found))
    return found


def _check_path(name: str) -> None:
    """Reject what is neither an import path nor an entry point."""
    if "<locals>" in name:
        raise ValueError(f"network {name} was defined in a function, where it is not found again; move it to a module")
    if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*", name):
        known = f", or one of {', '.join(NETWORKS.names)}" if NETWORKS.names else ""
        raise ValueError(f"network is {name!r}; write the import path of its class, as in my_package:MyNet{known}")


def _import(name: str, folder: str | None) -> Any:
    """Import what an import path names; ``folder`` is searched last, so that it replaces no installed module."""
    _check_path(name)
    advice = "; a class of a script or notebook is not found again: move it to a module" * name.startswith("__main__")
    if folder is not None and folder not in sys.path:
        sys.path.append(folder)
    module, _, attributes = name.partition(":")
    try:
        found = importlib.import_module(module)
    except Exception as error:  # whatever goes wrong while the user's code runs
        if isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}."):
            where = f"the installed packages{f' or {folder}' if folder else ''}; install it, or go to its folder"
            raise ValueError(f"network is {name}, and there is no module {error.name} in {where}") from None
        raise ValueError(f"network {name} cannot be imported: {type(error).__name__}: {error}") from error
    try:
        return functools.reduce(getattr, attributes.split("."), found)
    except AttributeError:
        raise ValueError(f"network is {name}, and module {module} has no {attributes}{advice}") from None


def _check_class(name: str, found: Any) -> "type[nn.Module]":
    from torch import nn

    if not (inspect.isclass(found) and issubclass(found, nn.Module)):
        raise ValueError(f"network {name} is {found!r}; it must be a subclass of torch.nn.Module")
    return found


def build(network: Settings, states: int, length: int, labels: int) -> "nn.Module":
    """Build a network: call its class with the number of states of a token, which is that of logits, and the options.

    ``length``, the tokens per sequence, and ``labels``, their number, are passed if the constructor takes them.
    """
    found, name = import_class(network), network["class"]
    options = {option: value for option, value in network.items() if option != "class"}
    signature = inspect.signature(found)
    if labels and "labels" not in signature.parameters:
        raise ValueError(f"the data has labels, and the constructor of {name} has no argument labels; add it")
    given = {"length": length, "labels": labels}
    given = {option: value for option, value in given.items() if option in signature.parameters} | options
    try:
        signature.bind(states, **given)
    except TypeError as error:
        advice = "it must take the number of states first; set other arguments as in --set network.width=…"
        raise ValueError(f"network {name}{signature} cannot be built: {error}; {advice}") from None
    return found(states, **given)
