"""The client of the Hugging Face Hub: downloads, uploads, and its errors as sentences."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import huggingface_hub
from huggingface_hub import constants, errors

DATA_FILES = ("*.json", "*.safetensors", "merges.txt")  # files that hold data only
PICKLE_FILES = ("*.bin", "*.ckpt", "*.pt", "*.pth")
SENTENCES: tuple[tuple[type[Exception], str], ...] = (
    (errors.GatedRepoError, "{name} is gated: request access on its page, then log in with: hf auth login"),
    (
        errors.RepositoryNotFoundError,
        "{name} is not on the Hub, or it is private and you are not logged in (hf auth login); check its spelling",
    ),
    (errors.RevisionNotFoundError, "{name} has no such revision; name a branch, a tag or a commit that it has"),
    (errors.LocalEntryNotFoundError, "{name} is not in the cache at {cache}, and {reason}"),
    (errors.HFValidationError, "{name} is not a valid name of a repository: {error}"),
    (OSError, "the request to the Hub for {name} failed: {reason}"),
    (errors.HTTPError, "the request to the Hub for {name} failed: {reason}"),  # type: ignore[attr-defined]
)
"""What each error of the library means, the more special ones first."""


def download(name: str, revision: str | None = None, pickles: bool = False) -> Path:
    """Return the folder of a model's files in the Hub's cache, downloading what is missing.

    Args:
        pickles: Download pickled weights too if there are no safetensors.
    """
    folder = _snapshot(name, revision, DATA_FILES)
    if pickles and not any(folder.glob("*.safetensors")):
        folder = _snapshot(name, revision, (*DATA_FILES, *PICKLE_FILES))
    return folder


def download_file(names: tuple[str, ...], path: str) -> Path:
    """Return a file of the first of these repositories that has it in the cache, else download it from the first."""
    for name in names:
        if isinstance(found := huggingface_hub.try_to_load_from_cache(name, path), str):
            return Path(found)
    return _snapshot(names[0], None, (path,)) / path  # the library's single-file download retries 30 s when offline


def upload(folder: Path, name: str, private: bool, message: str) -> str:
    """Upload ``folder`` as the repository ``name``, created if missing, and return its address."""
    with _translate_errors(name):
        api = huggingface_hub.HfApi()
        address = str(api.create_repo(name, private=private, exist_ok=True))
        api.upload_folder(repo_id=name, folder_path=folder, commit_message=message)
    return address


def _snapshot(name: str, revision: str | None, patterns: tuple[str, ...]) -> Path:
    with _translate_errors(name):
        found = huggingface_hub.snapshot_download(
            name,
            revision=revision,
            allow_patterns=list(patterns),
            local_files_only=constants.HF_HUB_OFFLINE,  # older versions send a request for the commit even when offline
        )
        return Path(found)


@contextmanager
def _translate_errors(name: str) -> Iterator[None]:
    """Turn the errors of the Hub's client into one sentence each."""
    try:
        yield
    except tuple(kind for kind, _ in SENTENCES) as error:
        message = str(error).strip().split("\n")[0].removeprefix("Got: ")
        reason = f"{constants.ENDPOINT} did not answer ({message}): try again online, or use files you have"
        if constants.HF_HUB_OFFLINE:
            reason = "HF_HUB_OFFLINE is set: unset it, or copy the files there"
        sentence = next(sentence for kind, sentence in SENTENCES if isinstance(error, kind))
        cache = constants.HF_HUB_CACHE
        raise ValueError(sentence.format(name=name, cache=cache, reason=reason, error=error)) from None
