"""Models on the Hugging Face Hub: loading by name, sharing with a model card, and conversion of published checkpoints.

Transfers use ``huggingface_hub``; its caches and settings apply here too (``HF_HOME``, ``HF_HUB_OFFLINE``, ``HF_TOKEN``
and others).
"""

from sedd.card_facts import CardFacts as CardFacts
from sedd.hub.card import describe_cost as describe_cost
from sedd.hub.card import write_card as write_card
from sedd.hub.client import download as download
from sedd.hub.models import fetch as fetch
from sedd.hub.models import find_tokenizer as find_tokenizer
from sedd.hub.models import from_pretrained as from_pretrained
from sedd.hub.models import push_to_hub as push_to_hub
from sedd.hub.models import save_pretrained as save_pretrained
from sedd.hub.models import source_name as source_name
