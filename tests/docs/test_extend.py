"""The guide to extensions does what it says: its files are written and its commands run, in the order of the page.

Files are blocks ``py`` or ``toml`` that begin with their path, commands are blocks ``bash``, and a block ``text`` after
commands is what they print. A file may come twice: the later one replaces it.
"""

import os
import re
import shlex
import subprocess
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest

from sedd import registry, sampling_settings
from sedd.training.config import OBJECTIVES, PROCESSES, SCHEDULES
from sedd.training.networks import NETWORKS

GUIDE = Path(__file__).parents[2] / "docs/guides/extend.md"
PLUGIN = Path(__file__).parents[1] / "plugin"
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
FILES = [re.fullmatch(r"# (\S+)\n(.*)", text, re.DOTALL) for kind, text in BLOCKS if kind in ("py", "toml")]


def environment(folder: Path) -> dict[str, str]:
    """Make an environment that has all of this one's packages, and return the variables of a shell that uses it."""
    venv.create(folder, with_pip=False)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    (site / "parent.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    for program in ("pip", "pytest", "sedd"):
        script = folder / "bin" / program
        script.write_text(f'#!/bin/sh\nexec {shlex.quote(str(folder / "bin/python"))} -m {program} "$@"\n')
        script.chmod(0o755)
    offline = {"PIP_NO_BUILD_ISOLATION": "0", "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    own = {"PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST", "PYTHONPATH"))}
    return {**inherited, **offline, **own, "SEDD_CACHE": str(folder / "cache"), "XDG_CONFIG_HOME": str(folder)}


@pytest.mark.timeout(900)  # under a minute on an idle machine
@pytest.mark.parametrize(
    "steps", [pytest.param("3", id="short"), pytest.param("", id="long", marks=pytest.mark.verify)]
)
def test_the_guide_does_what_it_says(steps: str, tmp_path: Path) -> None:
    """With 3 steps of training in `make test`, and exactly as it stands in `make verify`."""
    variables, folder, printed = environment(tmp_path / "environment"), tmp_path / "empty", ""
    folder.mkdir()
    for kind, text in BLOCKS:
        if kind in ("py", "toml"):
            name, _, content = text.partition("\n")
            (folder / name.removeprefix("# ")).write_text(content)
        elif kind == "bash":
            commands = re.sub(r"--steps \d+", f"--steps {steps}", text) if steps else text
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", commands],
                cwd=folder, env=variables, capture_output=True, text=True, check=False,
            )  # fmt: skip
            assert done.returncode == 0, f"{commands}\n{done.stdout}\n{done.stderr}"
            printed = done.stdout
        elif kind == "text":
            assert printed.endswith(text), f"{printed}\nis not\n{text}"
    assert len(list(folder.glob("my-sedd/tests/test_*.py"))) == 5


def test_the_dense_process_is_the_one_that_the_other_tests_use() -> None:
    written = {match[1]: match[2] for match in FILES if match}
    assert written["my-sedd/my_sedd/dense_process.py"] == (PLUGIN / "dense_process.py").read_text()


def test_every_file_has_its_path() -> None:
    assert all(FILES)
    assert all(not Path(match[1]).is_absolute() and ".." not in match[1] for match in FILES if match)


def test_every_entry_point_of_the_guide_is_written_and_used() -> None:
    written = {match[1]: match[2] for match in FILES if match}
    project = tomllib.loads(written["my-sedd/pyproject.toml"])["project"]
    commands = "".join(text for kind, text in BLOCKS if kind == "bash")
    for names in project["entry-points"].values():
        for name, target in names.items():
            module, _, cls = target.partition(":")
            assert f"class {cls}(" in written[f"my-sedd/{module.replace('.', '/')}.py"]
            assert re.search(rf"--(network|process|objective|sampler) {name}\b", commands), name


def test_the_groups_of_the_table_are_those_of_the_registry() -> None:
    table = re.findall(r"^\| `(sedd\.\w+)` \|", GUIDE.read_text(), re.MULTILINE)
    kinds = (
        SCHEDULES,
        PROCESSES,
        OBJECTIVES,
        sampling_settings.SAMPLERS,
        registry.TOKENIZERS,
    )
    assert table == [kind.group for kind in (*kinds, NETWORKS)]
