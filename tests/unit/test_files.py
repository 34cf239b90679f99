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


@pytest.mark.parametrize("failed", [False, True])
def test_the_end_of_one_write_leaves_the_next_writer_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failed: bool
) -> None:
    """It begins right after the first has renamed or removed its file, before the first has ended."""
    path = tmp_path / "texts.txt"
    second = files.atomic_write(path)
    rename, close = Path.rename, os.close

    def start_second(*given: object) -> None:
        monkeypatch.undo()
        second.__enter__().write_text("second")

    def rename_first(temporary: Path, target: Path) -> None:
        rename(temporary, target)
        start_second()

    def close_first(handle: int) -> None:
        start_second()
        close(handle)

    def write_first() -> None:
        with files.atomic_write(path) as temporary:
            temporary.write_text("first")
            if failed:
                monkeypatch.setattr(os, "close", close_first)
                raise KeyboardInterrupt
            monkeypatch.setattr(Path, "rename", rename_first)

    if failed:
        with pytest.raises(KeyboardInterrupt):
            write_first()
    else:
        write_first()
        assert path.read_text() == "first"
    second.__exit__(None, None, None)
    assert path.read_text() == "second"
    assert list(tmp_path.iterdir()) == [path]


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


def write_folder(path: Path, text: str, then: Callable[[], object] = lambda: None) -> None:
    with files.atomic_folder(path) as folder:
        files.require_empty_folder(path)
        (folder / "a").write_text(text)
        then()
        (folder / "b").write_text(text)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_is_whole_or_absent_and_has_one_writer(tmp_path: Path, refuses: Refuses) -> None:
    out, above = tmp_path / "new" / "out", tmp_path / "new"

    def fail() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_folder(out, "first", then=fail)
    assert list(tmp_path.iterdir()) == []
    assert in_fork(lambda: write_folder(out, "killed", then=lambda: os.kill(os.getpid(), signal.SIGKILL))) < 0
    assert names(above) == [".writing-out"]  # unlocked, so it is in nobody's way
    busy = f"{out} is in use by process {os.getpid()} on "
    write_folder(out, "first", then=lambda: refuses(lambda: write_folder(out, "second"), busy, "--out"))
    refuses(lambda: write_folder(out, "second"), "is not an empty folder", "--out")
    assert names(above) == ["out"]
    assert names(out) == ["a", "b"]
    assert (out / "a").read_text() == (out / "b").read_text() == "first"
    with files.atomic_folder(out):  # nothing is written
        pass
    assert names(out) == ["a", "b"]
    link = tmp_path / "link"
    (tmp_path / "empty").mkdir()
    link.symlink_to(tmp_path / "empty")
    write_folder(link, "third")
    assert names(tmp_path / "empty") == ["a", "b"]
    assert link.is_symlink()


@pytest.mark.parametrize("failed", [False, True])
def test_the_end_of_one_folder_leaves_the_next_writer_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuses: Refuses, failed: bool
) -> None:
    """It begins when the first has renamed its folder or removed its lock, before the first has ended."""
    out = tmp_path / "out"
    second = files.atomic_folder(out)
    started: list[Path] = []
    event = "unlink" if failed else "rename"
    operation = getattr(Path, event)

    def then_start_second(path: Path, *given: object, **more: object) -> None:
        operation(path, *given, **more)
        if path.name in (files.LOCK, ".writing-out"):
            monkeypatch.undo()
            started.append(second.__enter__())

    def patch() -> None:
        monkeypatch.setattr(Path, event, then_start_second)
        if failed:
            raise KeyboardInterrupt

    if failed:
        with pytest.raises(KeyboardInterrupt):
            write_folder(out, "first", then=patch)
    else:
        write_folder(out, "first", then=patch)
        assert names(out) == ["a", "b"]
    assert names(tmp_path) == [".writing-out", *["out"] * (not failed)]
    refuses(lambda: write_folder(out, "third"), "in use by")
    (started[0] / "c").write_text("second")
    if failed:
        second.__exit__(None, None, None)
        assert names(out) == ["c"]
    else:
        refuses(lambda: second.__exit__(None, None, None), f"{out} could not be written", "--out")
        assert names(out) == ["a", "b"]
    assert names(tmp_path) == ["out"]


def test_a_folder_that_another_process_removes_before_it_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one does that has created it and ends."""
    run, opens = tmp_path / "run", files._open_locked

    def remove(path: Path, **given: str) -> int:
        monkeypatch.undo()
        path.parent.rmdir()
        return opens(path, **given)

    monkeypatch.setattr(files, "_open_locked", remove)
    with files.locked_folder(run):
        assert names(run) == [files.LOCK]
    assert list(tmp_path.iterdir()) == []


def test_a_lock_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where that is asked for, in a line that says for whom."""
    folder, (is_held, hold), (go_on, end) = tmp_path / "entry", os.pipe(), os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.close(end)
            with files.locked_folder(folder):
                os.write(hold, b"1")
                os.read(go_on, 1)  # until the parent closes the other end
        finally:
            os._exit(0)
    os.read(is_held, 1)
    warn = files.warn
    monkeypatch.setattr(files, "warn", lambda text: (warn(text), os.close(end)))
    with files.locked_folder(folder, "the cache", wait=True):
        assert (folder / files.LOCK).read_text().startswith(f"process {os.getpid()} ")
    assert f"the cache is being written by process {child} on " in capsys.readouterr().err
    os.waitpid(child, 0)


WRITES = re.compile(r"""\.write_text\(|\.write_bytes\(|open\(["'][wx]|save_file\(|savefig\(|np\.save|json\.dump\(""")
IN_UNFINISHED_FOLDERS = {
    "data/shards.py",
    "tokenizer/base.py",
    "training/checkpoint.py",
    "training/dry_run.py",
}
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
