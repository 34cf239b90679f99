"""What is asked of the Hub, and what its refusals mean."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import huggingface_hub
from huggingface_hub import constants, errors

SAFE = ("*.json", "*.safetensors", "merges.txt")
"""Files that can hold nothing but data."""
PICKLES = ("*.bin", "*.ckpt", "*.pt", "*.pth")
HTTP: tuple[type[Exception], ...] = (OSError, errors.HTTPError)  # type: ignore[attr-defined]
"""Whatever the library's own client raises, which was another in each of its major versions."""


def is_id(name: str) -> bool:
    """Whether it could be the name of a repository: owner/name."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name) is not None


def download(name: str, revision: str | None = None, pickles: bool = False) -> Path:
    """The files of a model in the Hub's cache, brought there first; pickles only where asked, for want of better."""
    folder = _snapshot(name, revision, SAFE)
    if pickles and not any(folder.glob("*.safetensors")):
        folder = _snapshot(name, revision, (*SAFE, *PICKLES))
    return folder


def file(names: tuple[str, ...], path: str) -> Path:
    """One file of the first of these repositories that is in the cache, else of the first."""
    for name in names:
        if isinstance(found := huggingface_hub.try_to_load_from_cache(name, path), str):
            return Path(found)
    return _snapshot(names[0], None, (path,)) / path  # a single download is tried for half a minute when offline


def upload(folder: Path, name: str, private: bool, message: str) -> str:
    """Everything in ``folder`` as the repository ``name``, which is made where it is missing; its address."""
    with understood(name):
        api = huggingface_hub.HfApi()
        address = str(api.create_repo(name, private=private, exist_ok=True))
        api.upload_folder(repo_id=name, folder_path=folder, commit_message=message)
    return address


def _snapshot(name: str, revision: str | None, patterns: tuple[str, ...]) -> Path:
    with understood(name):
        found = huggingface_hub.snapshot_download(
            name,
            revision=revision,
            allow_patterns=list(patterns),
            local_files_only=constants.HF_HUB_OFFLINE,  # or older versions ask for a commit's files all the same
        )
        return Path(found)


@contextmanager
def understood(name: str) -> Iterator[None]:
    """What keeps the Hub from answering, as a sentence."""
    try:
        yield
    except errors.GatedRepoError:
        raise ValueError(f"{name} is gated: ask for access on its page, then log in with: hf auth login") from None
    except errors.RepositoryNotFoundError:
        raise ValueError(
            f"{name} is not on the Hub, or it is private and you are not logged in (hf auth login); is it spelt right?"
        ) from None
    except errors.RevisionNotFoundError:
        raise ValueError(f"{name} has no such revision; name a branch, a tag or a commit that it has") from None
    except errors.LocalEntryNotFoundError as error:
        raise ValueError(f"{name} is not in the cache at {_cache()}, and {_why(error)}") from None
    except errors.HFValidationError as error:
        raise ValueError(f"{name} is no name of a repository: {error}") from None
    except HTTP as error:
        raise ValueError(f"the Hub was asked for {name}, and {_why(error)}") from None


def _cache() -> str:
    return str(constants.HF_HUB_CACHE)


def _why(error: Exception) -> str:
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set: unset it, or copy the files there"
    said = str(error).strip().split("\n")[0].removeprefix("Got: ")
    return f"{constants.ENDPOINT} did not answer ({said}): try again online, or use files you have"
