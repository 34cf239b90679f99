"""The security page agrees with the code, and the locked environment with the tested one."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/security.md").read_text()


def load_licences() -> ModuleType:
    spec = importlib.util.spec_from_file_location("licences", ROOT / "experiments/licences.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["licences"] = module
    spec.loader.exec_module(module)
    return module


def test_every_promise_names_tests_that_exist() -> None:
    _, _, rest = PAGE.partition("<!-- promises -->")
    rows = rest.partition("<!-- end of promises -->")[0].strip().splitlines()[2:]
    assert len(rows) > 10
    for row in rows:
        _, fault, outcome, tests, _ = (cell.strip() for cell in row.split("|"))
        assert fault
        assert outcome
        named = re.findall(r"`(\S+\.py)::(\w+)`", tests)
        assert named, row
        for file, name in named:
            assert f"\ndef {name}(" in (ROOT / "tests" / file).read_text(), f"{file}::{name}"


def test_the_licences_are_listed() -> None:
    """Of every direct dependency; ``make lock`` writes them."""
    licences = load_licences()
    assert licences.table() in PAGE
    assert {package for package, _ in licences.direct_dependencies()} >= {"torch", "wandb", "hypothesis"}
    assert not re.search(r"\|\s*\|$", licences.table(), re.MULTILINE)  # each states one


def test_the_locked_environment_is_the_tested_one() -> None:
    """Every version is that of constraints.txt and has hashes; no host and no path is named."""
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    lock = (ROOT / "requirements.lock").read_text()
    locked = re.findall(
        r"^([\w.-]+)==([^\s;]+)[^\n]*\\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", lock, re.MULTILINE
    )
    elsewhere = {"httpx2-jsfetch", "tzdata"}  # of platforms on which nothing was tested
    others = [name for name, version, _ in locked if pinned.get(name) != version and name not in elsewhere]
    assert [name for name in others if not name.startswith(("nvidia-", "cuda-"))] == []  # torch pins those itself
    assert len(locked) == len(re.findall(r"^[\w.-]+==", lock, re.MULTILINE)) > 100
    assert not re.search(r"https?://|file:|index-url|find-links", lock)
    direct = {
        package.lower().replace("_", "-") for package, extra in load_licences().direct_dependencies() if not extra
    }
    assert direct <= {name for name, _, _ in locked}
