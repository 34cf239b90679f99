"""Samplers that go down a grid of times."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sedd import exact
from sedd.diffusion import categorical
from sedd.diffusion.categorical import AffineWeights
from sedd.diffusion.parameterization import HiddenStateDenoiser, HiddenStateModel
from sedd.diffusion.process import Absorbing, Uniform, at_token
from sedd.diffusion.reverse import analytic, denoised, into, law_of
from sedd.diffusion.rng import CounterRNG
from sedd.diffusion.schedule import lost
from sedd.sampling import enumeration
from sedd.sampling.base import (
    MIDDLE,
    SITE,
    STEP,
    Product,
    Prompt,
    Sampler,
    Scored,
    State,
    StepContext,
    Stepper,
    reveal,
    walk,
)
from sedd.sampling.caching import Asked, per_position


@final
@dataclass(frozen=True)
class Tweedie(Scored):
    """The analytic step: each position as if the others stood still. Exact for a sequence of one token."""

    assumes: ClassVar[str] = "nothing; masks are revealed at the pace of the score"

    def weights(
        self, said: Float[Tensor, "k n"], x: Int[Tensor, " k"], t: Float[Tensor, " k"], s: Float[Tensor, " k"]
    ) -> Float[Tensor, "k n"]:
        """[exp(−Δσ Q) s]_y · P_Δσ(x, y)."""
        sigma_t, sigma_s = self.schedule.sigma(t), self.schedule.sigma(s)
        return analytic(self.process, said[:, None], x[:, None], sigma_t, sigma_s)[:, 0]

    def affine(self, t: Float[Tensor, " k"], s: Float[Tensor, " k"]) -> AffineWeights:
        """The same law."""
        return self.process.analytic_law(self.schedule.sigma(t) - self.schedule.sigma(s))


@final
@dataclass(frozen=True)
class Euler(Scored):
    """The first-order step: each position moves at the rate it has at time t."""

    assumes: ClassVar[str] = "nothing; steps so short that no position moves with probability above 1"

    def weights(
        self, said: Float[Tensor, "k n"], x: Int[Tensor, " k"], t: Float[Tensor, " k"], s: Float[Tensor, " k"]
    ) -> Float[Tensor, "k n"]:
        """P(x → y) = (t − s)·σ'(t)·Q(x, y)·s_y; stay with the rest."""
        pace = ((t - s) * self.schedule.rate(t) * self.process.into_rate).to(said.dtype)
        score = said[:, : self.process.vocab_size].exp()  # no mask is moved to
        go = torch.nn.functional.pad(pace[:, None] * score, (0, self.process.num_states - self.process.vocab_size))
        go = go.scatter(-1, x[:, None], 0)
        return go.scatter(-1, x[:, None], 1 - go.sum(-1, keepdim=True))

    def affine(self, t: Float[Tensor, " k"], s: Float[Tensor, " k"]) -> AffineWeights:
        """The same law."""
        pace = (t - s) * self.schedule.rate(t) * self.process.into_rate
        return AffineWeights(pace, torch.ones_like(pace), -pace)


@final
@dataclass(frozen=True)
class Ancestral(Product):
    """The step of a denoiser: q(x_s | x_t, x_0) averaged over p(x_0 | x_t).

    The same law as Tweedie's on the denoiser's score; but the score is never formed, which under much uniform noise is
    1 to all digits of float32.
    """

    assumes: ClassVar[str] = "a denoiser (parameterization mean)"
    relative: ClassVar[bool] = False

    def look(self, x: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"]) -> Float[Tensor, "*b L N"]:
        """log p(x_0 | x)."""
        log_mean: Tensor = self.model.log_mean(x, sigma)  # type: ignore[attr-defined]
        return log_mean

    def read(
        self, model: HiddenStateModel, hidden: Float[Tensor, "k h"], x: Int[Tensor, " k"], sigma: Float[Tensor, " k"]
    ) -> Float[Tensor, "k N"]:
        """log p(x_0 | x)."""
        if not isinstance(model, HiddenStateDenoiser):
            raise ValueError("sampler ancestral needs a denoiser (parameterization mean); use tweedie for a score")
        return model.log_mean_at(hidden, x, sigma)

    def weights(
        self, said: Float[Tensor, "k N"], x: Int[Tensor, " k"], t: Float[Tensor, " k"], s: Float[Tensor, " k"]
    ) -> Float[Tensor, "k n"]:
        """Σ_{x_0} q(y | x, x_0)·p(x_0 | x)."""
        sigma_s, sigma_t = self.schedule.sigma(s), self.schedule.sigma(t)
        return self.process.log_posterior(said[:, None], x[:, None], sigma_s, sigma_t)[:, 0].exp()

    def affine(self, t: Float[Tensor, " k"], s: Float[Tensor, " k"]) -> AffineWeights:
        """The same law."""
        return self.process.posterior_law(self.schedule.sigma(s), self.schedule.sigma(t))


@final
@dataclass(frozen=True)
class Theta(Stepper):
    """The second-order step: half way first, then the rest with what the half way has taught.

    A first analytic step to ρ = t − θ(t − s) moves some positions. The second, from ρ to s, is the law
    α₁·(what the model says at ρ) − α₂·(what it said at t), with α₁ = 1/(2θ(1−θ)) and α₂ = α₁ − 1: two positions that
    move in one step then have their joint law, which a single step gives as a product. Where the difference falls
    below 0, because a law changed by more than a factor of about two, it is clamped and counted, and the order is lost.
    Under uniform noise that happens near the data whatever the law: of two tokens that look out of place, the second
    looks well once the first is mended.
    """

    assumes: ClassVar[str] = "conditionals that change by less than a factor of two within a step"
    theta: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.theta < 1:
            raise ValueError(f"theta is {self.theta}; it must lie between 0 and 1")

    @property
    def order(self) -> float:
        """The second; under uniform noise the first, with a fraction of Tweedie's error at as many calls."""
        return 2.0 if isinstance(self.process, Absorbing) else 1.0

    @property
    def stages(self) -> int:
        """Two: at t and at ρ."""
        return 2

    def middle(self, t: Float[Tensor, "*b"], s: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        """ρ."""
        return t - self.theta * (t - s)

    def first(
        self, log_score: Float[Tensor, "*b L n"], x: Int[Tensor, "*b L"], t: Float[Tensor, "*b"], s: Float[Tensor, "*b"]
    ) -> Float[Tensor, "*b L n"]:
        """The step to ρ, unnormalised."""
        sigma_t, sigma_m = self.schedule.sigma(t), self.schedule.sigma(self.middle(t, s))
        return analytic(self.process, log_score, x, sigma_t, sigma_m)

    def second(
        self,
        before: Float[Tensor, "*b L n"],
        now: Float[Tensor, "*b L n"],
        middle: Int[Tensor, "*b L"],
        t: Float[Tensor, "*b"],
        s: Float[Tensor, "*b"],
    ) -> Float[Tensor, "*b L n"]:
        """The step from ρ to s, given the log-scores at t and at ρ: α₁·(now) − α₂·(before), entries below 0 kept."""
        sigma_t, sigma_m, sigma_s = (self.schedule.sigma(a) for a in (t, self.middle(t, s), s))
        alpha = 1 / (2 * self.theta * (1 - self.theta))
        dtype = now.dtype
        into_middle = into(self.process, middle, sigma_m - sigma_s, dtype)
        expected = self.process.staggered_score(before.exp(), (sigma_t - sigma_s).to(dtype)) * into_middle
        learnt = analytic(self.process, now, middle, sigma_m, sigma_s)
        return alpha * law_of(learnt) - (alpha - 1) * law_of(expected)

    def after(
        self, law: Float[Tensor, " n"], blank: Bool[Tensor, " L"], t: Float[Tensor, " n"], s: Float[Tensor, " n"]
    ) -> Float[Tensor, " n"]:
        """Every start, every middle: the second step depends on both."""
        x = enumeration.everything(self.process, law, len(blank))
        free = blank & self.process.unknown(x)
        before = self.model(x, self.schedule.sigma(t))
        now = self.model(x, self.schedule.sigma(self.middle(t, s)))
        stays = torch.nn.functional.one_hot(x, before.shape[-1]).to(before.dtype)
        first = torch.where(free[..., None], law_of(self.first(before, x, t, s)), stays)
        start, middle = (a.flatten() for a in torch.meshgrid(torch.arange(len(x)), torch.arange(len(x)), indexing="ij"))
        weight = law[start] * at_token(first[start], x[middle]).prod(-1)
        second = law_of(self.second(before[start], now[middle], x[middle], t[start], s[start]))
        return exact.propagate(weight, torch.where(free[middle, :, None], second, stays[middle]))

    def draw(
        self, x: Int[Tensor, "b L"], t: Float[Tensor, " b"], s: Float[Tensor, " b"], context: StepContext
    ) -> Tensor:
        """Two draws: to ρ, and on to s."""
        asked, length, n = context.asked, x.shape[-1], self.process.num_states
        sigma_t, sigma_m = self.schedule.sigma(t), self.schedule.sigma(self.middle(t, s))
        start, y = x.flatten(), x.flatten().clone()
        before = asked.hidden(x, sigma_t, context.valid).flatten(0, 1)
        u = [context.chance(length, context.step, half).flatten(0, 1) for half in (MIDDLE, STEP)]
        for at in asked.pieces(context.free & self.process.unknown(x), n):
            told, a, b = (per_position(v, length, at) for v in (sigma_t, t, s))
            log_score = asked.model.log_score_at(before[at], start[at], told)
            raw = self.first(log_score[:, None], start[at, None], a, b)[:, 0]
            y[at] = categorical.step(start[at], asked.law(raw), u[0][at])
        middle = y.clone()
        now = asked.hidden(middle.view_as(x), sigma_m, context.valid).flatten(0, 1)
        for at in asked.pieces(context.free & self.process.unknown(middle.view_as(x)), n):
            told_t, told_m, a, b = (per_position(v, length, at) for v in (sigma_t, sigma_m, t, s))
            said = (
                asked.model.log_score_at(before[at], start[at], told_t)[:, None],
                asked.model.log_score_at(now[at], middle[at], told_m)[:, None],
            )
            raw = self.second(*said, middle[at, None], a, b)[:, 0]
            y[at] = categorical.step(middle[at], asked.law(raw), u[1][at])
        return y.view_as(x)


@final
@dataclass(frozen=True)
class Gibbs(Stepper):
    """Tweedie's step, then corrections: a random position is drawn anew given all others, ``sites`` times.

    Under uniform noise the score at a position is its law given the others up to a factor, whatever stands there:
    p_s(y | x_−i) = s_y / Σ s. Drawing from it leaves p_s as it is, so corrections only remove error.
    """

    assumes: ClassVar[str] = "uniform noise"
    sites: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.process, Uniform):
            raise ValueError("sampler gibbs corrects under uniform noise; the model's noise is absorbing: use remask")
        if self.sites < 1:
            raise ValueError(f"sites is {self.sites}; there must be at least 1 correction a step")

    @property
    def order(self) -> float:
        """The first, as the step that is corrected."""
        return 1.0

    @property
    def stages(self) -> int:
        """The step and its corrections."""
        return 1 + self.sites

    @property
    def step(self) -> Tweedie:
        """The step that is corrected."""
        return Tweedie(self.model, self.process, self.schedule)

    def after(
        self, law: Float[Tensor, " n"], blank: Bool[Tensor, " L"], t: Float[Tensor, " n"], s: Float[Tensor, " n"]
    ) -> Float[Tensor, " n"]:
        """The step's law, then the mean over sites, ``sites`` times."""
        law, x = self.step.after(law, blank, t, s), enumeration.everything(self.process, law, len(blank))
        table = law_of(self.model(x, self.schedule.sigma(s)).exp())
        site = torch.eye(len(blank), dtype=torch.bool)[blank]
        for _ in range(self.sites if blank.any() else 0):
            law = torch.stack([enumeration.step(law, table, x, one.expand(x.shape)) for one in site]).mean(0)
        return law

    def draw(
        self, x: Int[Tensor, "b L"], t: Float[Tensor, " b"], s: Float[Tensor, " b"], context: StepContext
    ) -> Tensor:
        """The step and its corrections."""
        x = self.step.draw(x, t, s, context)
        sigma, rows = self.schedule.sigma(s), torch.arange(len(x), device=x.device)
        for k in range(self.sites):
            u = context.chance(x.shape[-1], context.step * self.sites + k, SITE)
            keys = torch.where(context.free, u[..., 0], -1.0)
            site = keys.argmax(-1)  # the free position with the largest of independent uniforms is a random one
            hidden = context.asked.hidden(x, sigma, context.valid)[rows, site]
            score = context.asked.model.log_score_at(hidden, x[rows, site], sigma).exp()
            fresh = categorical.invert(score, u[rows, site, 1])
            x = x.index_put((rows, site), torch.where(context.free[rows, site], fresh, x[rows, site]))
        return x


@final
@dataclass(frozen=True)
class Remask(Sampler):
    """Steps that may also take tokens back (ReMDM): a token is masked again with probability r, masks make up for it.

    With α = e^−σ the share of tokens, r is at most (1 − α_s)/α_t, so that the share of tokens at s is still α_s.
    ``cap`` takes r = min(η, most) and ``rescale`` r = η·most. ``loop`` makes the usual steps down to t_on, stands still
    there until t_off while tokens are exchanged with r = η, and makes the rest of the way in the steps that are left.
    """

    assumes: ClassVar[str] = "absorbing noise; a score's law of a mask is normalised"
    strategy: str = "cap"
    eta: float = 0.02
    t_on: float = 0.55
    t_off: float = 0.05

    def __post_init__(self) -> None:
        if not isinstance(self.process, Absorbing):
            raise ValueError("sampler remask masks tokens again; the model's noise is uniform: use gibbs")
        if self.strategy not in ("cap", "rescale", "loop"):
            raise ValueError(f"strategy is {self.strategy!r}; choose one of cap, rescale, loop")
        if not 0 <= self.eta <= 1:
            raise ValueError(f"eta is {self.eta}; it must lie in [0, 1]")
        if not 0 <= self.t_off < self.t_on <= 1:
            raise ValueError(f"t_on is {self.t_on} and t_off is {self.t_off}; they must satisfy 0 ≤ t_off < t_on ≤ 1")

    @property
    def order(self) -> float:
        """The first, if η shrinks like 1/steps; less, if it does not."""
        return 1.0

    def clock(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        """The time that the noise is read at."""
        if self.strategy != "loop":
            return t
        rest = t / self.t_off * self.t_on if self.t_off > 0 else t
        return torch.where(t > self.t_on, t, torch.where(t > self.t_off, self.t_on, rest))

    def rates(self, t: Float[Tensor, "*b"], s: Float[Tensor, "*b"]) -> tuple[Float[Tensor, "*b"], Float[Tensor, "*b"]]:
        """P(a token is masked) and P(a mask is revealed) in the step from t to s."""
        sigma_t, sigma_s = self.schedule.sigma(t), self.schedule.sigma(s)
        kept_t, kept_s = torch.exp(-sigma_t), torch.exp(-sigma_s)
        most = (lost(sigma_s) / kept_t).clamp_max(1)
        match self.strategy:
            case "cap":
                masked = most.clamp_max(self.eta)
            case "rescale":
                masked = self.eta * most
            case _:
                masked = torch.where(t == s, most.clamp_max(self.eta), 0)
        return masked, (kept_s - (1 - masked) * kept_t) / lost(sigma_t)

    def table(self, x: Int[Tensor, "*b L"], t: Float[Tensor, "*b"], s: Float[Tensor, "*b"]) -> Float[Tensor, "*b L n"]:
        """The step as a law of every position; t and s are times of the noise."""
        masked, revealed = (a[..., None, None] for a in self.rates(t, s))
        sigma = self.schedule.sigma(t)
        clean = denoised(self.process, self.model(x, sigma), x, sigma)
        mask = torch.nn.functional.one_hot(self.process.limit(x.double()), self.process.num_states)
        token = torch.nn.functional.one_hot(x, self.process.num_states)
        shown = revealed * torch.nn.functional.pad(clean, (0, 1)) + (1 - revealed) * mask
        return torch.where(self.process.unknown(x)[..., None], shown, (1 - masked) * token + masked * mask)

    def draw(
        self, x: Int[Tensor, "b L"], t: Float[Tensor, " b"], s: Float[Tensor, " b"], context: StepContext
    ) -> Tensor:
        """Mask some tokens, reveal some masks."""
        masked, revealed = self.rates(t, s)
        u, hidden = context.chance(x.shape[-1], context.step, STEP)[..., 0], self.process.unknown(x)
        chosen = context.free & hidden & (u < revealed[:, None])
        taken = context.free & ~hidden & (u < masked[:, None])
        shown = reveal(self.process, x, self.schedule.sigma(t), chosen, context)
        return torch.where(taken, self.process.limit(u), shown)

    def run(self, prompt: Prompt, times: Float[Tensor, " n"], chance: CounterRNG, asked: Asked) -> Iterator[State]:
        """A state for every time of the grid."""
        yield from walk(self, self.draw, prompt, self.clock(times), chance, asked)

    def law(self, given: Int[Tensor, " L"], times: Float[Tensor, " n"]) -> Float[Tensor, " states"]:
        """The law of the samples."""

        def after(law: Tensor, blank: Tensor, t: Tensor, s: Tensor) -> Tensor:
            x = enumeration.everything(self.process, law, len(blank))
            return enumeration.step(law, self.table(x, t, s), x, blank.expand(x.shape))

        return enumeration.walk(self.model, self.process, self.schedule, after, given, self.clock(times))

    def expected_calls(self, times: Float[Tensor, " n"], blanks: int) -> float:
        """At most one a step."""
        return float(len(times) - 1) if blanks else 0.0
