"""Install this package into the environment of the Python that runs this, by the hashes of requirements.lock.

    python install_locked.py '.[serve]'
    python install_locked.py --editable '.[dev,docs]'

uv, which is locked too, verifies every file. Of torch there are builds that no lock can list, such as those for a CPU:
where pip is configured to find one (find-links, or PIP_EXTRA_INDEX_URL), it is taken by its version, and that is said.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent
LOCK = ROOT / "requirements.lock"
TORCH = re.compile(r"torch==|nvidia-|cuda-")
"""What a build of torch brings with it."""


def entries(lock: str) -> list[str]:
    """Return the packages of a lock, each with its lines of hashes."""
    return re.findall(r"^\S.*\n(?:[ ]+--hash=.*\n)*", lock, re.MULTILINE)


def without_torch(lock: str) -> str:
    """Return the lock with the version of torch alone, without hashes and what that build needs."""
    kept = [entry for entry in entries(lock) if not TORCH.match(entry)]
    return "".join(kept) + "".join(re.findall(r"^torch==[^\s;]+", lock, re.MULTILINE)) + "\n"


def find_links() -> list[str]:
    """Return the folders and pages in which pip is configured to find packages."""
    command = [sys.executable, "-m", "pip", "config", "get", "global.find-links"]
    configured = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return list(dict.fromkeys([*os.environ.get("PIP_FIND_LINKS", "").split(), *configured.split()]))


def offers_torch(links: list[str], version: str) -> bool:
    """Whether one of these folders has a build of this version of torch, or one is a page, which may have it."""
    return any(not Path(place).is_dir() or [*Path(place).glob(f"torch-{version}*.whl")] for place in links)


def install(words: list[str]) -> None:
    """Install what the words name; raise CalledProcessError if that fails."""
    lock, links, index = LOCK.read_text(), find_links(), os.environ.get("PIP_EXTRA_INDEX_URL", "")
    pip = [sys.executable, "-m", "pip", "install", "--quiet"]
    [version] = re.findall(r"^torch==([^\s;]+)", lock, re.MULTILINE)
    [uv] = [entry for entry in entries(lock) if entry.startswith("uv==")]
    with tempfile.TemporaryDirectory() as folder:
        (own := Path(folder) / "uv.lock").write_text(uv)
        if subprocess.run([*pip, "--require-hashes", "--requirement", str(own)], check=False).returncode:
            print("uv could not be installed: pip installs the locked versions without their hashes", file=sys.stderr)
            constraints = str(ROOT / "constraints.txt")
            subprocess.run([*pip, *words], check=True, cwd=ROOT, env={**os.environ, "PIP_CONSTRAINT": constraints})
            return
        constraints = str(Path(folder) / "constraints.lock")
        is_other = bool(index) or offers_torch(links, version)
        Path(constraints).write_text(without_torch(lock) if is_other else lock)
        if is_other:
            print(f"torch {version} is not checked: pip is configured to find it elsewhere", file=sys.stderr)
        command = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", sys.executable]
        command += ["--compile-bytecode", "--constraint", constraints, "--build-constraint", constraints]
        command += ["--extra-index-url", index, "--index-strategy", "unsafe-best-match"] if index else []
        subprocess.run([*command, *words], check=True, cwd=ROOT, env={**os.environ, "UV_FIND_LINKS": ",".join(links)})


if __name__ == "__main__":
    try:
        install(sys.argv[1:])
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)
