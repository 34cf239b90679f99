"""Models on the Hugging Face Hub: loading by name, sharing with a model card, and conversion of published checkpoints.

Transfers use ``huggingface_hub``; its caches and settings apply here too (``HF_HOME``, ``HF_HUB_OFFLINE``, ``HF_TOKEN``
and others).
"""

from typing import TYPE_CHECKING

from sedd.lazy import lazy_names

if TYPE_CHECKING:
    from sedd.hub.card import describe_cost, model_card, write_card
    from sedd.hub.card_facts import CardFacts
    from sedd.hub.client import download
    from sedd.hub.models import fetch, find_tokenizer, from_pretrained, push_to_hub, save_pretrained, source_name
    from sedd.hub.repo_id import is_repo_id

__all__ = [
    "CardFacts",
    "describe_cost",
    "download",
    "fetch",
    "find_tokenizer",
    "from_pretrained",
    "is_repo_id",
    "model_card",
    "push_to_hub",
    "save_pretrained",
    "source_name",
    "write_card",
]

__getattr__ = lazy_names(
    __name__,
    {
        "card": ["describe_cost", "model_card", "write_card"],
        "card_facts": ["CardFacts"],
        "client": ["download"],
        "models": ["fetch", "find_tokenizer", "from_pretrained", "push_to_hub", "save_pretrained", "source_name"],
        "repo_id": ["is_repo_id"],
    },
)
