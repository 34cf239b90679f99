"""Autoregressive runs of sedd as judges; −log p of a text is exact, as in `sedd score`."""

import hashlib
from collections.abc import Sequence
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import ArrayLike
from torch import Tensor
from torch.nn.functional import pad

from sedd.evaluation.quality.judge import Judge
from sedd.loading import LoadedModel
from sedd.parameterization import CausalModel
from sedd.process import at_token
from sedd.tokenizer import Ids


@final
class SeddJudge(Judge):
    """A run with the autoregressive objective. It has its own beginning-of-text token, so all tokens can be counted."""

    def __init__(self, loaded: LoadedModel, name: str, skips_first_token: bool = False) -> None:
        if not isinstance(loaded.model, CausalModel):
            raise ValueError(
                f"judge {name} was trained with objective {loaded.config.objective}, which gives no likelihood of a "
                "token given the preceding ones; as a judge, a sedd run needs --objective autoregressive"
            )
        self.model, self.tokenizer = loaded.model, loaded.tokenizer
        self._device = loaded.device
        self.name, self.skips_first_token = name, skips_first_token
        self.precision = loaded.precision
        self.vocab_size, self._length = loaded.tokenizer.vocab_size, loaded.config.model.seq_len
        self.context_length = self._length
        weights, tokens = loaded.sha256, loaded.tokenizer.fingerprint()
        self.sha256 = hashlib.sha256(f"{weights} {tokens}".encode()).hexdigest()
        self._pad = loaded.learned_pad

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Encode each text."""
        return self.tokenizer.encode_batch(texts)

    def decode(self, ids: ArrayLike) -> str:
        """Decode tokens."""
        return self.tokenizer.decode(ids)

    def token_nll(self, x: Int[Tensor, "b L"], valid: Bool[Tensor, "b L"]) -> Float[Tensor, "b L"]:
        """Return −log p of each token."""
        nll = self._nll(x) if self._pad is None else self._record_nll(x, valid, self._pad)
        if self.skips_first_token:
            nll[:, 0] = 0
        return nll

    def features(self, x: Int[Tensor, "b L"], valid: Bool[Tensor, "b L"]) -> Float[Tensor, "b h"]:
        """Return the hidden state from which the token after the last one is predicted."""
        x = pad(x, (0, 1)).to(self._device)
        hidden = self.model.hidden(x, torch.zeros(len(x), device=self._device))
        return hidden[torch.arange(len(x)), valid.sum(-1)]

    def _nll(self, x: Tensor) -> Tensor:
        x = x.to(self._device)
        return -at_token(self.model.log_next(x), x).cpu()

    def _record_nll(self, x: Tensor, valid: Tensor, padding: int) -> Tensor:
        """Add −log p of a record's padding, which is part of the record's likelihood, to its last token."""
        extra = (0, self._length - x.shape[-1])
        nll = self._nll(pad(torch.where(valid, x, padding), extra, value=padding))
        padding_nll = torch.where(pad(valid, extra), 0, nll).sum(-1, keepdim=True)
        return nll.scatter_add(-1, valid.sum(-1, keepdim=True) - 1, padding_nll)[:, : x.shape[-1]]
