"""Files and folders that are written: each is complete or as it was before, and one process writes it at a time.

A killed process leaves at most a hidden file `.writing-NAME`, which the next writer of NAME overwrites.
"""

import errno
import fcntl
import glob
import hashlib
import os
import platform
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PARTIAL_PREFIX = ".writing-"
"""Starts the name of a file or folder that is not completely written."""
LOCK = ".lock"
"""The file in a folder whose lock the process that writes to the folder holds."""
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)
"""Errors of file systems that have no locks."""


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a path beside ``path`` to write to; the file replaces ``path`` at the end, and is removed after an error.

    A file that exists keeps its permissions, a new one has those of the process's umask. Devices and pipes, such as
    /dev/stdout, are written to directly. Raises ValueError if another process is writing the same file.
    """
    if path.is_relative_to("/dev") or (path.exists() and not path.is_file()):
        yield path
        return
    target = Path(os.path.realpath(path))  # a link is kept, and what it names is replaced
    temporary = target.with_name(f"{PARTIAL_PREFIX}{target.name}")
    mode = target.stat().st_mode & 0o777 if target.exists() else None
    try:
        handle = open_locked(temporary, 0o666 if mode is None else mode)
    except BlockingIOError:
        raise ValueError(f"{path} is being written by another process; wait for it, or choose another name") from None
    try:
        os.ftruncate(handle, 0)  # what a killed process has left
        if mode is not None:
            os.fchmod(handle, mode)
        yield temporary
        fsync(temporary)
        temporary.rename(target)
    finally:
        temporary.unlink(missing_ok=True)
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically, in UTF-8."""
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def sha256(path: Path) -> str:
    """Return the SHA-256 hash of a file."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(1 << 22):
                digest.update(chunk)
    except OSError as error:  # no damage that another checkpoint could make up for
        raise ValueError(f"{path} cannot be read: {error.strerror}; check who may read it, and its disk") from None
    return digest.hexdigest()


def fsync(path: Path) -> None:
    """Flush to the disk: after a power failure a rename may otherwise name a file whose content was lost."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def open_locked(path: Path, mode: int = 0o666) -> int:
    """Open a file, which is created if it is missing, and lock it; the system unlocks it when the process ends.

    Raises:
        BlockingIOError: Another process has locked it.
    """
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
        try:
            with _lock_if_supported():
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(handle), os.stat(path)):  # else it was removed or renamed meanwhile
                    return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


@contextmanager
def _lock_if_supported() -> Iterator[None]:
    """Ignore the error of a file system without locks."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Create ``folder`` and hold its lock; raise ValueError if another process holds it, or it cannot be written to.

    Folders that were created here are removed again if they are empty at the end.
    """
    created: list[Path] = []
    try:
        handle = _lock_folder(folder, created)
        try:
            yield
        finally:
            (folder / LOCK).unlink(missing_ok=True)
            os.close(handle)
    finally:
        with suppress(OSError):
            for path in created:
                path.rmdir()


def _lock_folder(folder: Path, created: list[Path]) -> int:
    """Create a folder, list what was created in ``created``, and return the open file of its lock."""
    lock = folder / LOCK
    try:
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        created += missing
        handle = open_locked(lock)
        os.ftruncate(handle, 0)
        os.write(handle, f"process {os.getpid()} on {platform.node()}".encode())
    except BlockingIOError:
        holder = lock.read_text() or "another process"
        raise ValueError(
            f"{folder} is in use by {holder}; wait until that ends, stop it, or choose another --out"
        ) from None
    except OSError as error:
        raise ValueError(f"{folder} cannot be written to ({error.strerror}); choose another --out") from None
    return handle


@contextmanager
def temporary_folder(parent: Path, prefix: str, mode: int = 0o777) -> Iterator[Path]:
    """Create a locked folder in ``parent``, after removing those of that prefix that killed processes have left.

    The folder is removed at the end, unless it was renamed.
    """
    parent.mkdir(parents=True, exist_ok=True)
    for stale in parent.glob(f"{glob.escape(prefix)}*"):
        with suppress(OSError), _locked(stale):
            if stale.stat().st_uid == os.getuid():
                shutil.rmtree(stale)
    name = secrets.token_hex(8)
    unlocked, folder = parent / f".new-{name}", parent / f"{prefix}{name}"
    try:
        unlocked.mkdir(mode)
        with _locked(unlocked):  # before it gets the name that other processes clean up
            unlocked.rename(folder)
            yield folder
    finally:
        shutil.rmtree(unlocked, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which the system releases when the process ends; OSError if it is taken."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)
