"""Read whole files up to a limit; write files and folders atomically, one process at a time.

`.writing-NAME` belongs to the process that holds its lock, which alone renames or removes it. A killed process leaves
it unlocked; the next writer of NAME overwrites it.
"""

import errno
import fcntl
import hashlib
import json
import os
import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sedd.terminal import warn

MAX_TEXT = 2**30  # bytes of a file that is read as a whole: templates, samples, results, tokenizers
MAX_RECORD = 2**24  # bytes of a JSON file that describes a model, a run or data; ours have some thousands
PARTIAL_PREFIX = ".writing-"  # starts the name of a file or folder that is not completely written
LOCK = ".lock"  # the file in a folder whose lock the process that writes to the folder holds
_ATTEMPTS = 100  # times that other processes may remove a new folder before its lock is in it
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)  # errors of file systems that have no locks


def read_text(path: Path, most: int | None = None) -> str:
    """Read a UTF-8 file as a whole; raise ValueError if that fails, or if it has more than ``most`` bytes."""
    try:
        content = read_bytes(path, MAX_TEXT if most is None else most)
        return content.decode().replace("\r\n", "\n").replace("\r", "\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} could not be read as text: {error}") from None


def read_bytes(path: Path, most: int) -> bytes:
    """Read a file as a whole; raise ValueError if it has more than ``most`` bytes, as devices have that do not end."""
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"{path} has more than {most:,} bytes, too many to be read as a whole; split it")
    return content


def read_json(path: Path) -> Any:
    """Read a JSON file that describes a model, a run or data; raise ValueError if it is too large, or a device."""
    if path.exists() and not path.is_file():
        raise ValueError("it is not a regular file")
    return parse_json(read_bytes(path, MAX_RECORD).decode())


def parse_json(text: str | bytes) -> Any:
    """Parse JSON; raise a ValueError for everything that is not, or that is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply to be read") from None


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
        handle = _open_locked(temporary, 0o666 if mode is None else mode)
    except BlockingIOError:
        raise ValueError(f"{path} is being written by another process; wait for it, or choose another name") from None
    try:
        os.ftruncate(handle, 0)  # what a killed process has left
        if mode is not None:
            os.fchmod(handle, mode)
        yield temporary
        fsync(temporary)
        temporary.rename(target)
        fsync(target.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:  # once it is renamed, a file of its name is another writer's
        os.close(handle)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a folder to write to; it becomes ``path`` at the end, and is removed after an error.

    If nothing is written to it, ``path`` stays as it is; otherwise ``path`` must be missing or empty at the end. Raises
    ValueError if another process is writing the same folder.
    """
    is_name = path.name not in ("", "..") and not path.is_symlink()
    target = path if is_name else Path(os.path.realpath(path))  # a link is kept, and what it names is replaced
    folder = target.with_name(f"{PARTIAL_PREFIX}{target.name}")
    try:
        with locked_folder(folder, path):
            _clear(folder)  # what a killed process has left
            try:
                yield folder
                if [file.name for file in folder.iterdir()] == [LOCK]:
                    return
                try:
                    folder.rename(target)  # replaces an empty folder
                except OSError as error:
                    raise ValueError(f"{path} could not be written: {error.strerror}; choose another --out") from None
            except BaseException:
                with suppress(OSError):
                    _clear(folder)
                raise
            (target / LOCK).unlink()
            fsync(target.parent)
    finally:
        with suppress(OSError):
            folder.rmdir()  # where a killed process had left it


def _clear(folder: Path) -> None:
    """Remove what a folder holds, but not its lock."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != LOCK:
            path.unlink()


def require_empty_folder(folder: Path) -> None:
    """Raise ValueError if a folder to write exists and is not an empty folder."""
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not an empty folder; choose another --out")


def check_utf8(out: Path) -> None:
    """Raise ValueError for the path of a model that is not UTF-8, which safetensors cannot open."""
    try:
        str(out).encode()
    except UnicodeEncodeError:
        raise ValueError(f"{out} is not UTF-8, and files of weights need such a path; choose another --out") from None


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically, in UTF-8; what has no encoding, as in names that are not UTF-8, is escaped."""
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")


def sha256(path: Path) -> str:
    """Return the SHA-256 hash of a file."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:  # no damage that another checkpoint could make up for
        raise ValueError(f"{path} cannot be read: {error.strerror}; check who may read it, and its disk") from None


def fsync(path: Path) -> None:
    """Flush to the disk: after a power failure a rename may otherwise name a file whose content was lost."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _open_locked(path: Path, mode: int = 0o666, waiting: str = "") -> int:
    """Open a file, which is created if it is missing, and lock it; the system unlocks it when the process ends.

    If another process has locked it, raise BlockingIOError, or wait for it and say that ``waiting`` is written by it.
    """
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not waiting:
                    raise
                warn(f"{waiting} is being written by {_holder(path)}; waiting for it")
                fcntl.flock(handle, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
            if _is_at(handle, path):  # else it was removed or renamed meanwhile
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _is_at(handle: int, path: Path) -> bool:
    """Whether an open file is the one at a path."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


@contextmanager
def locked_folder(folder: Path, shown: Path | str | None = None, wait: bool = False) -> Iterator[None]:
    """Create ``folder`` and hold its lock; raise ValueError if another process holds it, or it cannot be written to.

    Folders that were missing are removed again if they are empty at the end. ``shown`` is what messages call it; with
    ``wait``, another process that holds the lock is waited for.
    """
    lock = folder / LOCK
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        handle = _lock(folder, str(shown or folder), wait)
        try:
            yield
        finally:
            try:
                if _is_at(handle, lock):  # else the folder was renamed, and a file of that name is another's
                    lock.unlink()
            finally:
                os.close(handle)
    finally:
        with suppress(OSError):
            for path in missing:
                path.rmdir()


def _lock(folder: Path, shown: str, wait: bool) -> int:
    """Create a folder and return the open file of its lock, which names this process."""
    for left in reversed(range(_ATTEMPTS)):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            handle = _open_locked(folder / LOCK, waiting=shown if wait else "")
            break
        except BlockingIOError:
            raise ValueError(
                f"{shown} is in use by {_holder(folder / LOCK)}; wait until that ends, stop it, or choose another --out"
            ) from None
        except OSError as error:
            # a missing file: another process, which had created the folder, has removed it
            if not (left and isinstance(error, FileNotFoundError)):
                raise ValueError(f"{shown} cannot be written to ({error.strerror}); choose another --out") from None
    with suppress(OSError):  # a full disk can be locked
        os.ftruncate(handle, 0)
        os.write(handle, f"process {os.getpid()} on {platform.node()}".encode())
    return handle


def _holder(lock: Path) -> str:
    """Return who holds a lock, as it says itself."""
    with suppress(OSError):
        return lock.read_text(errors="replace") or "another process"
    return "another process"
