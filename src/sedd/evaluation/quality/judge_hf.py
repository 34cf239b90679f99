"""The one door to transformers: any causal language model of Hugging Face as a judge, GGUF files too."""

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
class HuggingFace(Judge):
    """A causal language model with its tokenizer, as transformers loads them."""

    def __init__(self, model: Any, tokenizer: Any, name: str, skips_first: bool = True) -> None:
        self.model, self.tokenizer = model.eval().requires_grad_(False), tokenizer
        self.name, self.skips_first = name, skips_first
        config = model.config.get_text_config()
        self.precision = str(next(model.parameters()).dtype).removeprefix("torch.")
        self.vocab_size, self.context = config.vocab_size, _context(config)
        self.sha256 = _sha256(model, tokenizer)
        start = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        if not skips_first and start is None:
            raise ValueError(f"judge {name} has no token that starts a text; use --first-token skipped")
        self._start = [] if skips_first else [start]

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """The judge's tokens, without those that its tokenizer would put around them."""
        found = self.tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        return [np.asarray(ids, dtype=np.int64) for ids in found]

    def decode(self, ids: ArrayLike) -> str:
        """The text; specials have none."""
        text: str = self.tokenizer.decode(
            np.asarray(ids).tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def costs(self, x: Int[Tensor, "b L"], valid: Bool[Tensor, "b L"]) -> Float[Tensor, "b L"]:
        """−log p of each token; logits are taken to float32 a row at a time."""
        read, seen = self._started(x, valid)
        logits = self.model(input_ids=read[:, :-1], attention_mask=seen[:, :-1].long(), use_cache=False).logits
        costs = [
            torch.nn.functional.cross_entropy(row.float(), y, reduction="none")
            for row, y in zip(logits, read[:, 1:], strict=True)
        ]
        return torch.nn.functional.pad(torch.stack(costs), (1 - len(self._start), 0)).cpu()

    def features(self, x: Int[Tensor, "b L"], valid: Bool[Tensor, "b L"]) -> Float[Tensor, "b h"]:
        """The last layer at the last token."""
        read, seen = self._started(x, valid)
        said = self.model(input_ids=read, attention_mask=seen.long(), use_cache=False, output_hidden_states=True)
        hidden: Tensor = said.hidden_states[-1]
        return hidden[torch.arange(len(read), device=hidden.device), seen.sum(-1) - 1]

    def _started(self, x: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """The rows on the judge's device, behind its starting token where there is one."""
        start = x.new_tensor([self._start] * len(x))
        rows = torch.cat([start.view(len(x), -1).long(), x], -1)
        seen = torch.cat([torch.ones_like(rows[:, : len(self._start)], dtype=torch.bool), valid], -1)
        return rows.to(self.model.device), seen.to(self.model.device)


def load(place: str, *, skips_first: bool, precision: str, device: str) -> HuggingFace:
    """A folder, a ``.gguf`` file, or a name on the Hub, which is fetched once if it is not in the cache."""
    transformers, path = _transformers(), Path(place)
    where, options = (str(path.parent), {"gguf_file": path.name}) if path.suffix == ".gguf" else (place, {})
    with _in_a_sentence(place):
        where = where if path.exists() or options else str(client.download(place))
        tokenizer = transformers.AutoTokenizer.from_pretrained(where, **options)
        model = transformers.AutoModelForCausalLM.from_pretrained(where, dtype=getattr(torch, precision), **options)
    return HuggingFace(model.to(device), tokenizer, place, skips_first)


def _transformers() -> Any:
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
def _in_a_sentence(place: str) -> Iterator[None]:
    """What transformers raises at a model that is missing, of another kind, or in need of another package."""
    try:
        yield
    except (OSError, ValueError, ImportError, KeyError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"judge {place} cannot be loaded; name the folder of a run, a Hugging Face folder, a .gguf file or a model "
            f"on the Hub. transformers says: {reason}"
        ) from None


def _context(config: Any) -> int | None:
    """What a configuration says of its positions; read from a GGUF file, it says so in ``n_ctx`` alone."""
    found = [getattr(config, name, None) for name in ("max_position_embeddings", "n_ctx")]
    return min((length for length in found if length), default=None)


def _sha256(model: Any, tokenizer: Any) -> str:
    """Of the weights as they are used, and of the vocabulary."""
    digest = hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode())
    for name, weights in sorted(model.named_parameters()):
        digest.update(name.encode())
        digest.update(weights.detach().cpu().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
