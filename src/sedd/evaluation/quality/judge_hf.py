"""Hugging Face causal language models as judges, GGUF files included. The only module that imports transformers.

The judge of published tables is GPT-2 large: Radford et al. 2019, "Language Models are Unsupervised Multitask
Learners".
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import ArrayLike
from torch import Tensor

from sedd.evaluation.quality.judge import Judge
from sedd.extras import install_hint
from sedd.hub import client
from sedd.tokenizer import Ids


@final
class HuggingFaceJudge(Judge):
    """A causal language model and its tokenizer, as loaded by transformers.

    Args:
        skips_first_token: Whether the first token of a text is not counted; else the text begins after a start token.
    """

    def __init__(self, model: Any, tokenizer: Any, name: str, skips_first_token: bool = True) -> None:
        self.model, self.tokenizer = model.eval().requires_grad_(False), tokenizer
        self.name, self.skips_first_token = name, skips_first_token
        config = model.config.get_text_config()
        self.precision = str(next(model.parameters()).dtype).removeprefix("torch.")
        self.vocab_size, self.context_length = config.vocab_size, _context_length(config)
        self.sha256 = _sha256(model, tokenizer)
        start = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        if not skips_first_token and start is None:
            raise ValueError(f"judge {name} has no token that starts a text; use --first-token skipped")
        self._start = [] if skips_first_token else [start]

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Encode each text without the special tokens its tokenizer would add."""
        encoded = self.tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        return [np.asarray(ids, dtype=np.int64) for ids in encoded]

    def decode(self, ids: ArrayLike) -> str:
        """Decode tokens, leaving out special ones."""
        text: str = self.tokenizer.decode(
            np.asarray(ids).tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def token_nll(self, x: Int[Tensor, "b L"], valid: Bool[Tensor, "b L"]) -> Float[Tensor, "b L"]:
        """Return −log p of each token; logits are converted to float32 one row at a time to save memory."""
        ids, mask = self._prepend_start(x, valid)
        logits = self.model(input_ids=ids[:, :-1], attention_mask=mask[:, :-1].long(), use_cache=False).logits
        nll = [
            torch.nn.functional.cross_entropy(row.float(), y, reduction="none")
            for row, y in zip(logits, ids[:, 1:], strict=True)
        ]
        return torch.nn.functional.pad(torch.stack(nll), (1 - len(self._start), 0)).cpu()

    def features(self, x: Int[Tensor, "b L"], valid: Bool[Tensor, "b L"]) -> Float[Tensor, "b h"]:
        """Return the last layer's hidden state at the last token."""
        ids, mask = self._prepend_start(x, valid)
        output = self.model(input_ids=ids, attention_mask=mask.long(), use_cache=False, output_hidden_states=True)
        hidden: Tensor = output.hidden_states[-1]
        return hidden[torch.arange(len(ids), device=hidden.device), mask.sum(-1) - 1]

    def _prepend_start(self, x: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Return ids and attention mask on the judge's device, after the beginning-of-text token if it is used."""
        start = x.new_tensor([self._start] * len(x))
        ids = torch.cat([start.view(len(x), -1).long(), x], -1)
        mask = torch.cat([torch.ones_like(ids[:, : len(self._start)], dtype=torch.bool), valid], -1)
        return ids.to(self.model.device), mask.to(self.model.device)


def load_hf_judge(source: str, *, skips_first_token: bool, precision: str, device: str) -> HuggingFaceJudge:
    """Load a folder, a ``.gguf`` file, or a model on the Hub, which is downloaded if it is not in the cache.

    Args:
        source: A folder, a ``.gguf`` file, or a name on the Hub.
        skips_first_token: As for `HuggingFaceJudge`.
        precision: The dtype of the weights, such as float32.
    """
    transformers, path = _import_transformers(), Path(source)
    location, options = (str(path.parent), {"gguf_file": path.name}) if path.suffix == ".gguf" else (source, {})
    with _loading_errors(source):
        location = location if path.exists() or options else str(client.download(source))
        tokenizer = transformers.AutoTokenizer.from_pretrained(location, **options)
        model = transformers.AutoModelForCausalLM.from_pretrained(location, dtype=getattr(torch, precision), **options)
    return HuggingFaceJudge(model.to(device), tokenizer, source, skips_first_token)


def _import_transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise ValueError(
            f"this judge is not a sedd run and needs transformers; install it: {install_hint('judge')}"
        ) from None
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


@contextmanager
def _loading_errors(source: str) -> Iterator[None]:
    """Turn the errors of transformers for missing or unsupported models into one sentence."""
    try:
        yield
    except (OSError, ValueError, ImportError, KeyError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"judge {source} cannot be loaded; name the folder of a run, a Hugging Face folder, a .gguf file or a "
            f"model on the Hub. Error of transformers: {reason}"
        ) from None


def _context_length(config: Any) -> int | None:
    """Return the context length of a configuration; one read from a GGUF file may have it in ``n_ctx`` only."""
    found = [getattr(config, name, None) for name in ("max_position_embeddings", "n_ctx")]
    return min((length for length in found if length), default=None)


def _sha256(model: Any, tokenizer: Any) -> str:
    """Hash the weights in the precision in which they are used, and the vocabulary."""
    digest = hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode())
    for name, weights in sorted(model.named_parameters()):
        digest.update(name.encode())
        digest.update(weights.detach().cpu().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
