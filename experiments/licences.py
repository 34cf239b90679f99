"""Write the licences of the direct dependencies into docs/security.md, from the metadata of the installed packages."""

import re
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "security.md"
START, END = "<!-- licences: written by experiments/licences.py -->", "<!-- end of licences -->"
NOT_INSTALLED = {"datasets": "Apache-2.0", "trackio": "MIT", "uv": "MIT OR Apache-2.0", "wandb": "MIT"}
"""Licences of optional packages that the development environment does not have."""
NAMES = {
    "Apache Software License": "Apache-2.0",
    "Apache License 2.0": "Apache-2.0",
    "Apache 2.0": "Apache-2.0",
    "Apache": "Apache-2.0",
    "Apache 2.0 License": "Apache-2.0",
    "BSD License": "BSD",
    "BSD 2-Clause License": "BSD-2-Clause",
    "MIT License": "MIT",
}
"""Common names as SPDX identifiers."""


def direct_dependencies() -> Iterator[tuple[str, str]]:
    """Yield the package and the extra, or an empty one, of every requirement in pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra, requirements in {"": project["dependencies"], **project["optional-dependencies"]}.items():
        for requirement in requirements:
            package = re.match(r"[\w-]+", requirement)[0]  # type: ignore[index]
            if package != project["name"]:
                yield package, extra


def licence(package: str) -> str:
    """Return the licence that a package states, as an SPDX identifier where it has one."""
    try:
        found = metadata.metadata(package)
    except metadata.PackageNotFoundError:
        return NOT_INSTALLED[package]
    classifiers = [name.rpartition(" :: ")[2] for name in found.get_all("Classifier", []) if "License ::" in name]
    text = (found.get("License") or "").strip()
    stated = found.get("License-Expression") or (text if text and "\n" not in text else " and ".join(classifiers))
    return NAMES.get(stated, stated)


def table() -> str:
    """Return the table, one row per package."""
    extras: dict[str, list[str]] = {}
    for package, extra in direct_dependencies():
        extras.setdefault(package, []).append(extra or "always")
    rows = [f"| {package} | {', '.join(used)} | {licence(package)} |" for package, used in sorted(extras.items())]
    return "\n".join(["| package | installed with | licence |", "|---|---|---|", *rows])


def main() -> None:
    """Replace the table between its marks."""
    before, _, rest = PAGE.read_text().partition(START)
    PAGE.write_text(f"{before}{START}\n\n{table()}\n\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
