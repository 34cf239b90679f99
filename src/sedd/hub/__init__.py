"""The Hub: models by their name, from it and to it. The one door to ``huggingface_hub``.

Its caches and its settings hold here too: ``HF_HOME``, ``HF_HUB_OFFLINE``, ``HF_TOKEN`` and the rest.
"""

from sedd.hub.card import card
from sedd.hub.client import download, is_id
from sedd.hub.models import fetch, from_pretrained, push_to_hub, save_pretrained, source_name, tokenizer

__all__ = [
    "card",
    "download",
    "fetch",
    "from_pretrained",
    "is_id",
    "push_to_hub",
    "save_pretrained",
    "source_name",
    "tokenizer",
]
