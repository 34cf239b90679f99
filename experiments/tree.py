"""Write the tree of modules in docs/tour.md from their docstrings; ``--check`` tells whether the page is up to date."""

import argparse
import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "tour.md"
BEGIN = "<!-- tree: written by experiments/tree.py -->"
END = "<!-- end of tree -->"
WIDTH = 33
"""Columns of names."""


def summary(module: Path) -> str:
    """Return the first line of a module's docstring, without its end mark and the sections it cites."""
    docstring = ast.get_docstring(ast.parse(module.read_text())) or ""
    return docstring.split("\n")[0].split("  [")[0].rstrip(".:").replace("``", "")


def entries(folder: Path, depth: int = 0) -> list[tuple[str, str]]:
    """Return the lines of a package, (name with indent, summary): its modules, then its packages with theirs."""
    indent = "  " * depth
    modules = [path for path in sorted(folder.glob("*.py")) if path.stem != "__init__"]
    lines = [(f"{indent}{path.name}", summary(path)) for path in modules]
    for package in sorted(path.parent for path in folder.glob("*/__init__.py")):
        lines += [(f"{indent}{package.name}/", summary(package / "__init__.py")), *entries(package, depth + 1)]
    return lines


def tree() -> str:
    """Return the tree as a code block."""
    lines = [f"{name:<{WIDTH}}{text}".rstrip() for name, text in entries(ROOT / "src" / "sedd", 1)]
    return "\n".join(["```", "src/sedd/", *lines, "```"])


def with_tree(text: str) -> str:
    """Return the page with today's tree between its two marks."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{tree()}\n\n{END}{rest.split(END)[1]}"


def main() -> int:
    """Write the page, or with ``--check`` return 1 if it shows another tree."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if the page is stale")
    text = PAGE.read_text()
    written = with_tree(text)
    if not parser.parse_args().check:
        PAGE.write_text(written)
        return 0
    if written != text:
        print("docs/tour.md shows another tree of modules; run: python experiments/tree.py", file=sys.stderr)
    return int(written != text)


if __name__ == "__main__":
    sys.exit(main())
