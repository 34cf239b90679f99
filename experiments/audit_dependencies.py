"""Look the versions of requirements.lock up in a database of known vulnerabilities, by pip-audit.

Exit code 0: there is none; 1: there is one; 3: no database could be reached, so nothing is known.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PIP_AUDIT = "pip-audit==2.10.1"
SERVICES = ("osv", "pypi")
"""Databases that pip-audit can ask; the first that answers decides."""
NOT_CHECKED = 3
"""Exit code where none answers; Python itself ends with 1 or 2."""


def findings(report: str) -> list[str] | None:
    """Return one line for each vulnerability in a report; None if it is no report of all packages."""
    try:
        found: Any = json.loads(report)
        packages = found["dependencies"]
        if not packages or any("skip_reason" in package for package in packages):
            return None
        return [f"{p['name']} {p['version']}: {v['id']}" for p in packages for v in p["vulns"]]
    except (ValueError, KeyError, TypeError):
        return None


def ask(service: str, folder: Path) -> list[str] | None:
    """Return the vulnerabilities that a database knows of, or None if it did not answer."""
    report = folder / "report.json"
    command = [Path(sys.executable).with_name("uv"), "tool", "run", "--quiet", PIP_AUDIT, "--strict", "--disable-pip"]
    command += ["--requirement", ROOT / "requirements.lock", "--vulnerability-service", service, "--timeout", "15"]
    try:
        subprocess.run(
            [*command, "--format", "json", "--output", report], capture_output=True, timeout=600, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return findings(report.read_text()) if report.is_file() else None


def main() -> int:
    """Print what is known, and return the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        answers = (ask(service, Path(folder)) for service in SERVICES)
        found = next((answer for answer in answers if answer is not None), None)
    if found is None:
        print("NOT CHECKED for known vulnerabilities: no database could be reached", file=sys.stderr)
        return NOT_CHECKED
    print("\n".join(found) or "no known vulnerability in requirements.lock")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
