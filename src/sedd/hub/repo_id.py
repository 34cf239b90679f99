"""Names of repositories on the Hugging Face Hub. No torch here, nor the Hub's client."""

import re


def is_repo_id(name: str) -> bool:
    """Return whether ``name`` has the form of a repository's id, owner/name."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name) is not None
