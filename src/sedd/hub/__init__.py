"""Models on the Hugging Face Hub: loading by name, sharing with a model card, and conversion of published checkpoints.

Transfers use ``huggingface_hub``; its caches and settings apply here too (``HF_HOME``, ``HF_HUB_OFFLINE``, ``HF_TOKEN``
and others).
"""

from sedd.card_facts import CardFacts
from sedd.hub.card import describe_cost, model_card, write_card
from sedd.hub.client import download
from sedd.hub.models import fetch, find_tokenizer, from_pretrained, push_to_hub, save_pretrained, source_name

__all__ = [
    "CardFacts",
    "describe_cost",
    "download",
    "fetch",
    "find_tokenizer",
    "from_pretrained",
    "model_card",
    "push_to_hub",
    "save_pretrained",
    "source_name",
    "write_card",
]
