"""Type what three users would type, and keep what they saw.

python tests/journeys/run.py [FOLDER] [NAME …]     with the `sedd` beside this Python; `make journeys` installs one

Every line of NAME.sh is typed in an empty folder with the data that user has. A line must succeed, or, after "!", be
refused in a sentence; none may print a traceback. What was printed is in FOLDER/NAME/transcript.txt, to be read, beside
the pictures and pages, to be looked at.
"""

import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


def write_book(path: Path) -> None:
    """Write a book: the documentation of this package."""
    pages = sorted((ROOT / "docs").rglob("*.md"))
    path.write_text("\n\n".join(page.read_text() for page in pages))


def random_molecule(rng: random.Random) -> str:
    """Return the SMILES of a chain with branches, a ring and a functional group."""
    chain = ""
    for _ in range(rng.randint(2, 8)):
        chain += rng.choice(["C", "C", "C", "C", "O", "N", "C(C)", "C(=O)", "C(O)", "C(Cl)", "C(N)"])
    ring = rng.choice(["", "", "c1ccccc1", "C1CCCCC1", "c1ccncc1", "C1CC1"])
    return "C" + chain + ring


def write_molecules(path: Path) -> None:
    """Write 3000 molecules with names."""
    rng = random.Random(0)
    path.write_text("".join(f"{random_molecule(rng)} molecule-{i}\n" for i in range(3000)))


def run_line(line: str, folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run one line of a script in a shell that remembers the folder and the variables of the lines before."""
    state = folder / ".state"
    before = f"source {state}; " if state.exists() else ""
    script = f'{before}{line}\ncode=$?; declare -p size > {state} 2>/dev/null; echo "cd $PWD" >> {state}; exit $code'
    return subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def split_lines(script: str) -> list[str]:
    """Return the commands of a script; a loop is one of them."""
    commands: list[str] = []
    for line in script.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        if commands and commands[-1].startswith("for ") and not commands[-1].endswith("done"):
            commands[-1] += "\n" + line
        else:
            commands.append(line)
    return commands


def run_journey(name: str, folder: Path) -> list[str]:
    """Run a script in a new folder; return what went wrong."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_book(folder / "book.txt")
    write_molecules(folder / "molecules.smi")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "SEDD_CACHE": str(folder / ".cache"), "COLUMNS": "100"}
    problems = []
    with (folder / "transcript.txt").open("w") as transcript:
        for line in split_lines((HERE / f"{name}.sh").read_text()):
            start = time.perf_counter()
            refused, command = line.startswith("! "), line.removeprefix("! ")
            done = run_line(command, folder, environment)
            seconds = time.perf_counter() - start
            transcript.write(f"$ {command}\n{done.stdout}\n[exit code {done.returncode}, {seconds:.1f} s]\n\n")
            transcript.flush()
            expected = (1, 2) if refused else (0,)
            is_refused = any(part.startswith("sedd: ") for part in done.stdout.splitlines())
            if done.returncode not in expected or "Traceback" in done.stdout or (refused and not is_refused):
                problems.append(f"{name}: {command!r} ended with code {done.returncode}:\n{done.stdout[-2000:]}")
            print(f"{name}: {seconds:6.1f} s  {command.splitlines()[0][:90]}", flush=True)
    return problems


def main() -> None:
    """Run all journeys, or those that are named."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "build/journeys").absolute()
    names = sys.argv[2:] or sorted(path.stem for path in HERE.glob("*.sh"))
    problems = [problem for name in names for problem in run_journey(name, folder / name)]
    print("\n\n".join(problems) or f"all succeeded; read and look at what is in {folder}")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
