"""Optional dependencies: how to install an extra of this distribution, `score-entropy`."""

import importlib.util
import json
import shlex
from importlib import metadata
from pathlib import Path

DISTRIBUTION = "score-entropy"
"""The name on the package index; `sedd` there is an unrelated project."""


def install_hint(extra: str) -> str:
    """Return the command that installs an extra, for this copy of the package.

    From a clone (an editable install, or the source tree on the path): ``pip install -e '/path/to/clone[judge]'``.
    From a wheel: ``pip install 'score-entropy[judge]'``, or the folder or address that it was installed from.
    """
    clone = Path(__file__).resolve().parents[2]
    if (clone / "pyproject.toml").is_file():
        return f"pip install -e {shlex.quote(f'{clone}[{extra}]')}"
    return f"pip install {shlex.quote(_requirement(extra))}"


def _requirement(extra: str) -> str:
    """Return the requirement that reinstalls a non-editable install from its origin, as recorded by PEP 610."""
    try:
        origin = json.loads(metadata.distribution(DISTRIBUTION).read_text("direct_url.json") or "{}")
    except metadata.PackageNotFoundError:
        origin = {}
    match origin:
        case {"url": str(url), "vcs_info": {"vcs": str(vcs), "commit_id": str(commit)}}:
            return f"{DISTRIBUTION}[{extra}] @ {vcs}+{url}@{commit}"
        case {"url": str(url)}:
            return f"{DISTRIBUTION}[{extra}] @ {url}"
    return f"{DISTRIBUTION}[{extra}]"


def require_server() -> None:
    """Reject a machine without the packages that `sedd serve` needs."""
    missing = [name for name in ("fastapi", "uvicorn", "prometheus_client") if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"a server needs {', '.join(missing)}; install with: {install_hint('serve')}")
