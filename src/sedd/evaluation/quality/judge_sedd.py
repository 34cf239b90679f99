"""An autoregressive model of ours as a judge: the cost of a text is exact, as `likelihood` has it."""

import hashlib
from collections.abc import Sequence
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import ArrayLike
from torch import Tensor
from torch.nn.functional import pad

from sedd import checkpoint
from sedd.diffusion.parameterization import Causal
from sedd.diffusion.process import at_token
from sedd.evaluation.quality.judge import Judge
from sedd.factory import LoadedModel
from sedd.tokenizer import Ids


@final
class Own(Judge):
    """A run whose objective was autoregressive. It starts a text with a token of its own, so all are counted."""

    def __init__(self, loaded: LoadedModel, name: str, skips_first: bool = False) -> None:
        if not isinstance(loaded.model, Causal):
            raise ValueError(
                f"judge {name} was trained with objective {loaded.config.objective}, which tells no cost of a token "
                "given those before it; a judge of ours is a run with --objective autoregressive"
            )
        self.model, self.tokenizer = loaded.model, loaded.tokenizer
        self._device = next(loaded.network.parameters()).device
        self.name, self.skips_first, self.precision = name, skips_first, "float32"
        self.vocab_size, self.length = loaded.tokenizer.vocab_size, loaded.config.model.seq_len
        self.context = self.length
        weights, tokens = checkpoint.sha256(loaded.folder / "ema.safetensors"), loaded.tokenizer.fingerprint()
        self.sha256 = hashlib.sha256(f"{weights} {tokens}".encode()).hexdigest()
        records = loaded.config.data
        self._pad = loaded.tokenizer.pad if records.packing == "lines" and records.pad == "model" else None

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """The tokens of the run."""
        return self.tokenizer.encode_batch(texts)

    def decode(self, ids: ArrayLike) -> str:
        """The text of the run's tokens."""
        return self.tokenizer.decode(ids)

    def costs(self, x: Int[Tensor, "b L"], valid: Bool[Tensor, "b L"]) -> Float[Tensor, "b L"]:
        """−log p of each token."""
        costs = self._costs(x) if self._pad is None else self._of_records(x, valid, self._pad)
        if self.skips_first:
            costs[:, 0] = 0
        return costs

    def features(self, x: Int[Tensor, "b L"], valid: Bool[Tensor, "b L"]) -> Float[Tensor, "b h"]:
        """What the head would read for the token after the last."""
        x = pad(x, (0, 1)).to(self._device)
        hidden = self.model.hidden(x, torch.zeros(len(x), device=self._device))
        return hidden[torch.arange(len(x)), valid.sum(-1)]

    def _costs(self, x: Tensor) -> Tensor:
        x = x.to(self._device)
        return -at_token(self.model.log_next(x), x).cpu()  # what fills a row up comes after it, and is not seen

    def _of_records(self, x: Tensor, valid: Tensor, padding: int) -> Tensor:
        """A record is as long as the model, and −log p of its padding is part of its cost: the last token pays it."""
        more = (0, self.length - x.shape[-1])
        costs = self._costs(pad(torch.where(valid, x, padding), more, value=padding))
        rest = torch.where(pad(valid, more), 0, costs).sum(-1, keepdim=True)
        return costs.scatter_add(-1, valid.sum(-1, keepdim=True) - 1, rest)[:, : x.shape[-1]]
