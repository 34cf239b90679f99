"""The commands of the ``sh`` blocks of a page; continued lines, quotes and here-documents are kept whole."""

import re
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
HERE_DOCUMENT = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")


def pages() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@cache
def is_complete(text: str) -> bool:
    """Return whether a shell would run ``text`` now, rather than wait for another line."""
    if text.endswith("\\"):
        return False
    if found := HERE_DOCUMENT.search(text.split("\n")[0]):
        return text.split("\n")[-1].strip() == found[2]
    return subprocess.run(["bash", "-n", "-c", text], capture_output=True, check=False).returncode == 0


def split(block: str) -> list[str]:
    """Return the commands of a block; comments and empty lines are left out."""
    commands, text = [], ""
    for line in block.splitlines():
        if not text and (not line.strip() or line.lstrip().startswith("#")):
            continue
        text = f"{text}\n{line}" if text else line
        if is_complete(text):
            commands.append(text)
            text = ""
    if text:
        raise ValueError(f"the shell cannot read this block; an unclosed quote or loop?\n{text}")
    return commands


def commands(page: Path) -> list[str]:
    """Return the commands of the ``sh`` blocks of a page, in order."""
    found = [(indent, text) for indent, kind, text in BLOCK.findall(page.read_text()) if kind == "sh"]
    blocks = ["\n".join(line.removeprefix(indent) for line in text.splitlines()) for indent, text in found]
    return [command for block in blocks for command in split(block)]


def without_comment(command: str) -> str:
    """Return a command for messages and patterns: on one line, without the comment at its end."""
    joined = re.sub(r"\s*\\\n\s*", " ", command)
    return re.sub(r"\s+#\s.*$", "", joined, flags=re.MULTILINE).strip()
