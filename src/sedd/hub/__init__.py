"""Models on the Hugging Face Hub: loading by name, sharing with a model card, and conversion of published checkpoints.

Transfers use ``huggingface_hub``; its caches and settings apply here too (``HF_HOME``, ``HF_HUB_OFFLINE``, ``HF_TOKEN``
and others).
"""

from typing import TYPE_CHECKING

from sedd.lazy import lazy_names

if TYPE_CHECKING:
    from sedd.hub.card import model_card
    from sedd.hub.client import download, is_repo_id
    from sedd.hub.models import fetch, find_tokenizer, from_pretrained, push_to_hub, save_pretrained, source_name

__all__ = [
    "download",
    "fetch",
    "find_tokenizer",
    "from_pretrained",
    "is_repo_id",
    "model_card",
    "push_to_hub",
    "save_pretrained",
    "source_name",
]

__getattr__ = lazy_names(
    __name__,
    {
        "card": ["model_card"],
        "client": ["download", "is_repo_id"],
        "models": ["fetch", "find_tokenizer", "from_pretrained", "push_to_hub", "save_pretrained", "source_name"],
    },
)
