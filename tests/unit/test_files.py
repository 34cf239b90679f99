"""Files: a killed or failed write leaves what was there, one process writes at a time, permissions are kept."""

import errno
import os
import re
import signal
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

import sedd
from sedd import files

Refuses = Callable[..., None]


def in_fork(function: Callable[[], object]) -> int:
    """Run a function in a forked process and return its exit code, negative for a signal."""
    if (child := os.fork()) == 0:
        try:
            function()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_killed_write_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    """At every point of it; and the next write leaves nothing beside it."""
    path = tmp_path / "texts.txt"

    def write_half() -> None:
        with files.atomic_write(path) as temporary, temporary.open("w") as file:
            file.write("half")
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)

    for before in (None, "whole"):
        if before:
            path.write_text(before)
        assert in_fork(write_half) == -signal.SIGKILL
        assert (path.read_text() if path.exists() else None) == before
    files.write_text(path, "new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "texts.txt"
    path.write_text("whole")

    def fail() -> None:
        with files.atomic_write(path) as temporary:
            temporary.write_text("half")
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        fail()
    assert path.read_text() == "whole"
    assert list(tmp_path.iterdir()) == [path]


def test_two_writers_of_one_file(tmp_path: Path, refuses: Refuses) -> None:
    path = tmp_path / "texts.txt"
    with files.atomic_write(path) as temporary:
        temporary.write_text("first")
        refuses(lambda: files.write_text(path, "second"), "texts.txt is being written by another process")
    assert path.read_text() == "first"


def test_permissions_and_links_are_kept(tmp_path: Path) -> None:
    """A private file stays private, also while it is written; a new one has what the umask allows."""
    private, link, new = tmp_path / "private", tmp_path / "link", tmp_path / "new"
    private.touch(0o600)
    (tmp_path / ".writing-private").touch(0o644)  # left by a killed process
    link.symlink_to(private)
    with files.atomic_write(link) as temporary:
        assert stat.S_IMODE(temporary.stat().st_mode) == 0o600
        temporary.write_text("secret")
    assert link.is_symlink()
    assert private.read_text() == "secret"
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    before = os.umask(0o027)
    try:
        files.write_text(new, "text")
    finally:
        os.umask(before)
    assert stat.S_IMODE(new.stat().st_mode) == 0o640
    victim = tmp_path / "victim"
    victim.write_text("theirs")
    (tmp_path / ".writing-new").symlink_to(victim)  # as another user of the folder could place it
    with pytest.raises(OSError, match="symbolic links"):
        files.write_text(new, "again")
    assert victim.read_text() == "theirs"


def test_devices_and_pipes_are_written_to_directly(tmp_path: Path) -> None:
    files.write_text(Path("/dev/null"), "nothing")
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    files.write_text(pipe, "text")
    assert os.read(reader, 10) == b"text"
    os.close(reader)


def test_a_folder_is_locked_by_one_process(tmp_path: Path, refuses: Refuses) -> None:
    """Folders that were made for the lock go with it; a killed process releases it."""
    folder = tmp_path / "a" / "run"

    def lock() -> None:
        with files.locked_folder(folder):
            pass

    def die() -> None:
        with files.locked_folder(folder):
            os.kill(os.getpid(), signal.SIGKILL)

    with files.locked_folder(folder):
        refuses(lock, f"{folder} is in use by process {os.getpid()} on ", "choose another --out")
    assert list(tmp_path.iterdir()) == []
    assert in_fork(die) == -signal.SIGKILL
    lock()
    with files.locked_folder(folder):
        (folder / "log").touch()
    assert [path.name for path in folder.iterdir()] == ["log"]


def test_what_killed_processes_left_is_removed(tmp_path: Path) -> None:
    """But not what a running one uses, nor what only looks like it."""
    (tmp_path / "theirs").mkdir()
    (tmp_path / "ours-link").symlink_to(tmp_path / "theirs")

    def die() -> None:
        with files.temporary_folder(tmp_path, "ours-", mode=0o700) as folder:
            (folder / "weights").write_text("large")
            os.kill(os.getpid(), signal.SIGKILL)

    assert in_fork(die) == -signal.SIGKILL
    (left,) = tmp_path.glob("ours-*[0-9a-f]")
    assert stat.S_IMODE(left.stat().st_mode) == 0o700
    with files.temporary_folder(tmp_path, "ours-") as busy, files.temporary_folder(tmp_path, "ours-") as other:
        assert {busy.name, other.name, "theirs", "ours-link"} == {path.name for path in tmp_path.iterdir()}
    assert {"theirs", "ours-link"} == {path.name for path in tmp_path.iterdir()}


WRITES = re.compile(r"""\.write_text\(|\.write_bytes\(|open\(["'][wx]|save_file\(|savefig\(|np\.save|json\.dump\(""")
IN_UNFINISHED_FOLDERS = {"checkpoint.py", "data/index.py", "data/shards.py", "tokenizer/base.py", "training/dry_run.py"}
"""Modules that write into a folder that gets its name when it is complete, or is removed."""


def test_every_output_is_written_by_one_function() -> None:
    """`atomic_write`, whose path is called ``temporary``, or `write_text`, which calls it."""
    root, found = Path(sedd.__file__).parent, []
    for path in root.rglob("*.py"):
        name = str(path.relative_to(root))
        lines = [line for line in path.read_text().splitlines() if WRITES.search(line)]
        if name not in {*IN_UNFINISHED_FOLDERS, "files.py"}:
            found += [(name, line) for line in lines if "files.write_text(" not in line and "temporary" not in line]
    found = [(name, line) for name, line in found if 'format="svg"' not in line]  # to memory
    assert found == []
