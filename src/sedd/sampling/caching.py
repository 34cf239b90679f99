"""A model that is asked: about rows that changed, at positions that matter; and tokens drawn of what it says."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sedd.diffusion import categorical
from sedd.diffusion.categorical import AffineWeights
from sedd.diffusion.parameterization import HiddenStateDenoiser, HiddenStateModel, LogitsModel
from sedd.diffusion.process import Process
from sedd.diffusion.reverse import denoised
from sedd.ops.categorical import HeadLogits, sample_categorical, samples_from_logits
from sedd.sampling.guidance import passes


class Asked:
    """A model with a memory: it counts what it is asked, and is asked again only about rows that have changed.

    Of a model that is not told the noise, a row that has not changed has the answer it had; ``cached=False`` asks
    nevertheless. ``swift`` is whether tokens are drawn from the head's output without a table of laws; None: on a GPU.
    """

    def __init__(self, model: HiddenStateModel, cached: bool = True, swift: bool | None = None) -> None:
        self.model, self.cached, self.swift = model, cached and not model.depends_on_sigma, swift
        self.passes = passes(model)
        self.calls = 0
        """How often the network ran, on however many rows."""
        self.rows = 0
        """On how many rows it ran in all."""
        self.clamped: Tensor | int = 0
        """Laws that had to be made laws: an entry below 0, or more than 1 in all."""
        self._x: Tensor | None = None
        self._hidden: Tensor | None = None

    def hidden(self, x: Tensor, sigma: Tensor, valid: Tensor | None = None) -> Tensor:
        """What the head reads."""
        if not self.cached or self._hidden is None or self._x is None:
            self._x, self._hidden = x, self.fresh(x, sigma, valid)
        elif (changed := (x != self._x).any(-1)).any():
            fresh = self.fresh(x[changed], sigma[changed], None if valid is None else valid[changed])
            self._x, self._hidden = x, self._hidden.index_put((changed,), fresh)
        return self._hidden

    def fresh(self, x: Tensor, sigma: Tensor, valid: Tensor | None = None) -> Tensor:
        """What the head reads, asked without a look at the memory."""
        self.calls, self.rows = self.calls + self.passes, self.rows + self.passes * len(x)
        return self.model.hidden(x, sigma, valid)

    def pieces(self, where: Bool[Tensor, "b L"], entries: int) -> Iterator[Int[Tensor, " k"]]:
        """The flat indices of ``where``, so many at a time that a table of ``entries`` a position stays small."""
        at = where.flatten().nonzero().squeeze(-1)
        yield from at.split(self.at_once(at.device, entries)) if len(at) else ()

    def at_once(self, device: torch.device, entries: int) -> int:
        """How many positions that is."""
        most = 2**22 if device.type == "cpu" else 2**29 if self.speaker(device) else 2**26
        return max(1, most // entries)

    def speaker(self, device: torch.device) -> LogitsModel | None:
        """The model, where tokens are drawn from what its head says, without a table of laws."""
        swift = samples_from_logits(device.type) if self.swift is None else self.swift
        return self.model if swift and isinstance(self.model, LogitsModel) else None

    def pick(self, hidden: Float[Tensor, "k h"], at: "Sites", vocab_size: int) -> Int[Tensor, " k"]:
        """The next token at some positions, where the head reads ``hidden``."""
        assert isinstance(self.model, LogitsModel)
        assert at.spoken is not None
        said = HeadLogits(self.model.logits(hidden), vocab_size, at.spoken.scale, self.model.logits_are_scores)
        drawn = sample_categorical(said, at.x, at.spoken.law, at.u)
        self.clamped = self.clamped + drawn.clamped_count
        return drawn.tokens

    def clean(self, hidden: Tensor, x: Tensor, sigma: Tensor, process: Process) -> Float[Tensor, "k N"]:
        """p(x_0 | x) at some positions: as a denoiser says it, or as a score implies it."""
        if isinstance(self.model, HiddenStateDenoiser):
            return self.model.log_mean_at(hidden, x, sigma).exp()
        return denoised(process, self.model.log_score_at(hidden, x, sigma)[:, None], x[:, None], sigma)[:, 0]

    def law(self, raw: Float[Tensor, "k n"]) -> Float[Tensor, "k n"]:
        """``raw`` without what is below 0; rounding aside, how often there was something is counted."""
        total = raw.sum(-1)
        self.clamped = self.clamped + (raw.amin(-1) < -1e-5 * total.abs().clamp_min(1e-30)).sum()
        return raw.clamp_min(0)


class Spoken(NamedTuple):
    """How a speaker's words are to be taken."""

    law: AffineWeights
    scale: Float[Tensor, " k"]


class Sites(NamedTuple):
    """Positions at which something is to be drawn."""

    x: Int[Tensor, " k"]
    sigma: Float[Tensor, " k"]
    """What the network is told there."""
    u: Float[Tensor, "k 2"]
    spoken: Spoken | None
    """None: the model does not speak, and is to be read in full."""

    def part(self, some: slice) -> "Sites":
        """Some of them."""
        spoken = self.spoken
        if spoken is not None:
            law = AffineWeights._make(None if a is None else a[some] for a in spoken.law)
            spoken = Spoken(law, spoken.scale[some])
        return Sites(self.x[some], self.sigma[some], self.u[some], spoken)


def per_position(rows: Float[Tensor, " b"], length: int, at: Int[Tensor, " k"]) -> Float[Tensor, " k"]:
    """The value of the row that each flat index lies in."""
    return rows[at // length]


def to_show(
    process: Process, x: Int[Tensor, " k"], sigma: Float[Tensor, " k"], u: Float[Tensor, "k 2"], asked: Asked
) -> Sites:
    """Positions that are to be drawn from p(x_0 | x)."""
    speaker = asked.speaker(x.device)
    if speaker is None:
        return Sites(x, sigma, u, None)
    law = process.last_law(sigma) if speaker.logits_are_scores else _plain(sigma)
    return Sites(x, sigma, u, Spoken(law, speaker.logit_shift(sigma).float()))


def show(process: Process, hidden: Float[Tensor, "k h"], at: Sites, asked: Asked) -> Int[Tensor, " k"]:
    """A draw from p(x_0 | x) at such positions."""
    if at.spoken is not None:
        return asked.pick(hidden, at, process.vocab_size)
    p = asked.clean(hidden, at.x, at.sigma, process)
    return categorical.step(at.x, torch.nn.functional.pad(p, (0, process.num_states - process.vocab_size)), at.u)


def _plain(sigma: Float[Tensor, " k"]) -> AffineWeights:
    """The law that is said, x itself among the rest."""
    ones = torch.ones_like(sigma)
    return AffineWeights(ones, ones, torch.zeros_like(sigma))
