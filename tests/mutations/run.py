"""Make each of the mistakes in a copy of the package and run the test that must catch it; print one table.

    python tests/mutations/run.py                    all of them, two at a time
    python tests/mutations/run.py --only EMA         those with this in their name

The exit code is 1 if a mistake survives its test, if a record no longer applies, or if a test fails without any
mistake. Every mistake is made in a fork of a process that has imported what tests import, but nothing of the package.
"""

import argparse
import os
import re
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from mistakes import MISTAKES, PACKAGE, ROOT, Mistake, problem

PRELOADED = ("numpy", "scipy.stats", "torch._dynamo", "torch.distributed.checkpoint.state_dict")
FAILED = 1
"""Exit code of pytest if tests were run and some failed."""


class Outcome(NamedTuple):
    """What the tests of a mistake showed."""

    code: int
    caught_by: str
    """The first test that failed."""
    seconds: float
    output: str

    @property
    def is_caught(self) -> bool:
        return self.code == FAILED and bool(self.caught_by)


def run_tests(folder: Path, mistake: Mistake | None, tests: Sequence[str]) -> int:
    """In this process, a fork: run tests on a copy of the package with a mistake; return pytest's exit code."""
    source = folder / "src"
    shutil.copytree(PACKAGE, source / "sedd", ignore=shutil.ignore_patterns("__pycache__"))
    if mistake is not None:
        changed = source / "sedd" / mistake.file
        changed.write_text(changed.read_text().replace(mistake.old, mistake.new))
    sys.path.insert(0, str(source))
    os.environ["PYTHONPATH"] = str(source)
    os.environ["SEDD_TEST_DATA"] = os.environ.get("SEDD_TEST_DATA", str(folder / "none"))
    os.chdir(ROOT)
    import pytest

    options = ["-q", "-x", "--no-header", "--tb=short", "-p", "no:cacheprovider", "-m", "not verify and not gpu"]
    options += ["--rootdir", str(ROOT), "--basetemp", str(folder / "temporary"), *(f"tests/{test}" for test in tests)]
    code = int(pytest.main(options))
    import sedd

    assert Path(sedd.__file__).is_relative_to(source), sedd.__file__
    return code


class Trial:
    """A fork in which the tests of one mistake run."""

    def __init__(self, mistake: Mistake | None, tests: Sequence[str]) -> None:
        self.mistake, self.folder, self.start = mistake, Path(tempfile.mkdtemp(prefix="mutation-")), time.monotonic()
        self.process = os.fork()
        if self.process == 0:
            code = 70
            try:
                with (self.folder / "output").open("w") as output:
                    for stream in (1, 2):
                        os.dup2(output.fileno(), stream)
                code = run_tests(self.folder, mistake, tests)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)

    def outcome(self, status: int) -> Outcome:
        output = (self.folder / "output").read_text(errors="replace")
        shutil.rmtree(self.folder, ignore_errors=True)
        failed = re.search(r"^FAILED tests/(\S+(?: [^-\s]\S*)*)", output, re.MULTILINE)
        name = failed[1] if failed else ""
        return Outcome(os.waitstatus_to_exitcode(status), name, time.monotonic() - self.start, output)


def run_all(mistakes: Sequence[Mistake | None], workers: int) -> dict[Mistake | None, Outcome]:
    """Run the tests of each mistake, and print a line for each as it ends."""
    waiting, running, found = list(mistakes), dict[int, Trial](), dict[Mistake | None, Outcome]()
    while waiting or running:
        while waiting and len(running) < workers:
            mistake = waiting.pop(0)
            tests = [mistake.test] if mistake else sorted({other.test for other in mistakes if other})
            trial = Trial(mistake, tests)
            running[trial.process] = trial
        process, status = os.wait()
        if process in running:
            trial = running.pop(process)
            outcome = found[trial.mistake] = trial.outcome(status)
            print(line(trial.mistake, outcome), flush=True)
    return found


def line(mistake: Mistake | None, outcome: Outcome) -> str:
    if mistake is None:
        name, verdict = "(no mistake)", "all pass" if outcome.code == 0 else f"FAILS: {outcome.caught_by}"
    else:
        verdict = outcome.caught_by if outcome.is_caught else "SURVIVES" if outcome.code == 0 else "TESTS DID NOT RUN"
        name = mistake.name
    return f"{name:60s} {outcome.seconds:6.1f} s  {verdict}"


def main() -> int:
    """Run the mistakes and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="part of the names of the mistakes to make")
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    chosen = [mistake for mistake in MISTAKES if arguments.only in mistake.name]
    if not chosen:
        parser.error(f"no mistake has {arguments.only!r} in its name")
    broken = {mistake: reason for mistake in chosen if (reason := problem(mistake))}
    for mistake, reason in broken.items():
        print(f"{mistake.name:60s} DOES NOT APPLY: {reason}")
    for module in PRELOADED:
        __import__(module)
    assert "sedd" not in sys.modules
    found = run_all([None, *(mistake for mistake in chosen if mistake not in broken)], arguments.workers)
    bad = [outcome for mistake, outcome in found.items() if not (outcome.is_caught if mistake else outcome.code == 0)]
    for outcome in bad:
        if outcome.code:
            print(outcome.output[-4000:])
    made = len(found) - 1
    print(f"{made} mistakes made, {made - len([m for m in found if m and not found[m].is_caught])} caught")
    return 1 if bad or broken else 0


if __name__ == "__main__":
    sys.exit(main())
