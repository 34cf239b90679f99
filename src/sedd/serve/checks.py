"""What must be there before a server starts: its packages, and API keys. No torch here."""

import importlib.util
from pathlib import Path

from sedd.border import read_text, warn
from sedd.extras import install_hint

PACKAGES = ("fastapi", "uvicorn", "prometheus_client")
"""What the extra `serve` installs."""


def check_installed() -> None:
    """Refuse to go on without the packages that a server needs."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"a server needs {', '.join(missing)}; install with: {install_hint('serve')}")


def read_keys(file: Path | None) -> frozenset[str]:
    """Return the API keys of a file, one per line; none if there is no file."""
    if file is None:
        return frozenset()
    try:
        is_open = file.stat().st_mode & 0o077
    except OSError as error:
        raise ValueError(f"{file} could not be read: {error}") from None
    keys = frozenset(line.strip() for line in read_text(file).splitlines() if line.strip())
    if is_open:
        warn(f"other users can read or change the keys in {file}; allow them to you alone: chmod 600 {file}")
    if not keys:
        raise ValueError(f"{file} holds no key; write one per line, or leave --api-key-file out")
    return keys
