"""A network on a GPU without the host: its launches are recorded once for a size of batch, and replayed.

A forward pass of a small batch is a hundred short kernels, and to launch them takes longer than to run them. Batches
are filled up to the next size of a ladder, so that few recordings serve all.
"""

from typing import Any, NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (its name everywhere)

from sedd.diffusion.parameterization import Backbone
from sedd.runtime.cuda_graphs import aside

MOST = 2**17
"""Tokens; with more of them there is nothing to gain."""


def rung(rows: int) -> int:
    """The least of 1, 2, 3, 4, 6, 8, 12, 16 … that is not below ``rows``: at most half as many again are wasted."""
    size = 1
    while size < rows:
        size = size * 3 // 2 if size & (size - 1) == 0 and size > 1 else 1 << size.bit_length()
    return size


def _aligned(head: Any) -> tuple[Tensor, Tensor | None]:
    """Weight and bias with as many rows as matrix units like: 50,257 of them take several times longer."""
    missing = -len(head.weight) % 128
    weight = F.pad(head.weight.detach(), (0, 0, 0, missing))
    return weight, None if head.bias is None else F.pad(head.bias.detach(), (0, missing))


class Recording(NamedTuple):
    """What is replayed, where it reads and where it writes."""

    graph: Any
    x: Tensor
    sigma: Tensor
    valid: Tensor | None
    hidden: Tensor


@final
class Replayed(nn.Module):
    """A network whose hidden states come from recordings; in everything else the network itself. Not for training."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        if not isinstance(network, Backbone):
            raise ValueError(f"{type(network).__name__} is not a network in two parts; there is nothing to record")
        self.network: Any = network
        self._head = _aligned(network.head) if hasattr(network.head, "weight") else None
        self._recordings: dict[tuple[int, int, bool], Recording] = {}

    @property
    def timed(self) -> bool:
        """Whether it is told σ."""
        timed: bool = self.network.timed
        return timed

    @property
    def head(self) -> nn.Module:
        """The last matrix."""
        head: nn.Module = self.network.head
        return head

    def said(self, hidden: Float[Tensor, "k h"]) -> Float[Tensor, "k m"]:
        """What the head says, and behind it what means nothing."""
        said: Tensor = self.head(hidden) if self._head is None else F.linear(hidden, *self._head)
        return said

    def forward(self, *told: Any, **named: Any) -> Any:
        """What the network says."""
        return self.network(*told, **named)

    @torch.no_grad()
    def hidden(
        self, x: Int[Tensor, "b L"], sigma: Float[Tensor, " b"], valid: Bool[Tensor, "b L"] | None = None
    ) -> Float[Tensor, "b L h"]:
        """What the head reads."""
        rows, length = x.shape
        if not x.is_cuda or rung(rows) * length > MOST:
            hidden: Tensor = self.network.hidden(x, sigma, valid)
            return hidden
        key = rung(rows), length, valid is not None
        if key not in self._recordings:
            self._recordings[key] = self._record(*key, x.device)
        recording = self._recordings[key]
        recording.x[:rows].copy_(x)
        recording.sigma[:rows].copy_(sigma)
        if recording.valid is not None and valid is not None:
            recording.valid[:rows].copy_(valid)
        recording.graph.replay()
        return recording.hidden[:rows].clone()  # the next replay writes here

    def _record(self, rows: int, length: int, padded: bool, device: torch.device) -> Recording:
        x = torch.zeros(rows, length, dtype=torch.long, device=device)
        sigma = torch.ones(rows, device=device)
        valid = torch.ones(rows, length, dtype=torch.bool, device=device) if padded else None
        graph = torch.cuda.CUDAGraph()
        pool = next((r.graph.pool() for r in self._recordings.values()), None)  # one replays at a time
        with aside(device) as stream:
            with torch.cuda.stream(stream):  # libraries make their plans in the first calls, which cannot be recorded
                for _ in range(2):
                    self.network.hidden(x, sigma, valid)
            with torch.cuda.graph(graph, pool, stream, "thread_local"):  # another thread may be sampling
                hidden = self.network.hidden(x, sigma, valid)
        return Recording(graph, x, sigma, valid, hidden)
