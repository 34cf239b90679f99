"""`Diffusion`: a network with its noise and its objective, as one module that trains, samples, infills and bounds.

    diffusion = Diffusion(network, Absorbing(26), length=64)
    diffusion.loss(x).backward()
    samples = diffusion.sample(16, seed=0)
    filled = diffusion.infill(tokens, seed=0)  # −1 marks an open position
    bound = diffusion.bound(x, draws=64)  # .nats and .stderr, one per row

Each method calls one of the layers below it, which work alone too: an objective, a sampler, and `likelihood.bound`.
"""

import inspect
from collections.abc import Iterator
from typing import Any, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from sedd import likelihood, tensors
from sedd.likelihood import LikelihoodEstimate
from sedd.nn.adapter import AdaptedNetwork, adapt
from sedd.objectives import Autoregressive, DenoisingScoreEntropy, LambdaDCE, Objective
from sedd.parameterization import CausalModel, DiscreteModel, MeanModel
from sedd.process import Process
from sedd.registry import PARAMETERIZATIONS
from sedd.samplers import Guided, Prompt, Sampler, State, Steps, Warped, build_sampler
from sedd.schedule import LogLinear, Schedule
from sedd.schema import MAX_SAMPLES, check_count, check_seed


@final
class Diffusion(nn.Module):
    """A discrete diffusion model of token sequences, made of any network.

    Args:
        network: Called as ``network(x, sigma)`` or ``network(x)`` with token ids (b, L) and total noise (b,). It
            returns (b, L, n), one output for each of the ``process.num_states`` states, or an object that has them as
            ``.logits``. Where sequences are padded or labelled it is also given ``valid`` and ``label``.
        process: The noise, such as ``Absorbing(26)`` for 26 tokens.
        schedule: The noise schedule.
        objective: The training objective; None: λ-DCE for a denoiser of masks, else score entropy.
        length: Tokens of a sample.
        parameterization: What the outputs mean: score, signed-score, mean, conditional or causal; None: a denoiser
            (``mean``) under absorbing noise, else a score.
    """

    def __init__(
        self,
        network: nn.Module,
        process: Process,
        schedule: Schedule = LogLinear(),
        objective: Objective | None = None,
        *,
        length: int | None = None,
        parameterization: str | None = None,
    ) -> None:
        super().__init__()
        _check_type("process", process, Process, "Absorbing(26) for 26 tokens")
        _check_type("schedule", schedule, Schedule, "LogLinear()")
        name = parameterization or ("mean" if process.only_masks else "score")
        self._set(PARAMETERIZATIONS.build(name, adapt(network), process, schedule), objective, length)

    @classmethod
    def of(cls, model: DiscreteModel, objective: Objective | None = None, length: int | None = None) -> "Diffusion":
        """Return the module of a parameterized network, such as ``MeanModel(network, process)``."""
        diffusion = cls.__new__(cls)
        nn.Module.__init__(diffusion)
        diffusion._set(model, objective, length)
        return diffusion

    def _set(self, model: DiscreteModel, objective: Objective | None, length: int | None) -> None:
        if objective is None:
            is_mask_denoiser = isinstance(model, MeanModel) and model.process.only_masks
            objective = LambdaDCE() if is_mask_denoiser else DenoisingScoreEntropy()
            objective = Autoregressive() if isinstance(model, CausalModel) else objective
        _check_type("objective", objective, Objective, "LambdaDCE()")
        if length is not None:
            check_count("length", length, most=MAX_SAMPLES)
        self.model, self.objective, self.length = model, objective, length
        self.process, self.schedule = model.process, model.schedule

    @property
    def network(self) -> nn.Module:
        """The network that was passed."""
        network: nn.Module = self.model.network
        return network.module if isinstance(network, AdaptedNetwork) else network

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return next((p.device for p in self.parameters()), torch.device("cpu"))

    def loss(
        self,
        x_0: Int[Tensor, "b L"],
        *,
        valid: Bool[Tensor, "b L"] | None = None,
        label: Int[Tensor, " b"] | None = None,
        generator: torch.Generator | None = None,
    ) -> Float[Tensor, ""]:
        """Return the objective's loss in nats per token.

        Times are stratified over the batch. In expectation λ-DCE is a bound on −log p per token; score entropy is its
        diffusion term, to which `bound` adds the prior and the reconstruction.

        Args:
            x_0: Clean sequences.
            valid: False at padding, which is not counted.
            label: The label of each sequence.
            generator: The source of times and noise; None: torch's own, which ``torch.manual_seed`` seeds.
        """
        if valid is not None:
            if not self.objective.allows_padding:
                raise ValueError(f"{type(self.objective).__name__} counts positions; use LambdaDCE() with padding")
            valid, x_0 = valid.to(self.device), torch.where(valid.to(x_0.device), x_0, 0)
        x_0 = _check_tokens("x_0", x_0, self.process.vocab_size).to(self.device)
        loss = self.objective(self._labelled(label).bind(valid=valid), x_0, generator=generator)
        return loss.mean() if valid is None else loss[valid].mean()

    def forward(self, x_0: Int[Tensor, "b L"], **options: Any) -> Float[Tensor, ""]:
        """Return `loss`, so that DDP and other wrappers of a module train it."""
        return self.loss(x_0, **options)

    def sample(
        self, count: int, length: int | None = None, *, seed: int | None = None, **options: Any
    ) -> Int[Tensor, "b L"]:
        """Draw ``count`` sequences of ``length`` tokens, or ``self.length``. The options are those of `trajectory`."""
        length = self.length if length is None else length
        if length is None:
            raise ValueError("length is not known; pass it here, or as Diffusion(…, length=64)")
        check_count("count", count, most=MAX_SAMPLES)
        check_count("length", length, most=MAX_SAMPLES)
        return self.infill(torch.full((count, length), -1), seed=seed, **options)

    def infill(self, tokens: Int[Tensor, "b L"], *, seed: int | None = None, **options: Any) -> Int[Tensor, "b L"]:
        """Fill the positions that are −1; all others stay as they are. The options are those of `trajectory`.

        Under absorbing noise the result has the distribution of the model given the other tokens.
        """
        *_, last = self.trajectory(tokens, seed=seed, **options)
        return last.x

    def trajectory(
        self,
        tokens: Int[Tensor, "b L"],
        *,
        seed: int | None = None,
        steps: Steps = None,
        sampler: Sampler | None = None,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int | None = None,
        label: int | Int[Tensor, " b"] | None = None,
        guidance: float = 1.0,
        valid: Bool[Tensor, "b L"] | None = None,
    ) -> Iterator[State]:
        """Yield every state from noise to data, as `infill` passes through them.

        Args:
            tokens: Token ids, and −1 at open positions.
            seed: Decides the draws, together with the number of a row; None: a seed from torch's own generator.
            steps: A number of steps, or a grid of times from 1 to 0; None: one token at a time, or as many steps as
                tokens where a sampler needs a grid.
            sampler: The sampler; None: first-hitting for a denoiser of masks, ancestral for other denoisers, else
                Tweedie.
            temperature: Below 1 prefers likely tokens.
            top_p: Draw from the fewest tokens whose probabilities reach this sum.
            top_k: Draw from the k likeliest tokens only.
            label: The label of all rows, or of each.
            guidance: Weight of the label: 1 samples given the label, above 1 strengthens it.
            valid: False at padding.
        """
        tokens = _check_tokens("tokens", tokens, self.process.vocab_size, least=-1)
        prompt = Prompt(tokens, valid).to(self.device)
        sampler = build_sampler(None, self.model) if sampler is None else sampler
        _check_type("sampler", sampler, Sampler, "Tweedie()")
        if steps is None and not sampler.supports_infinite_steps:
            steps = prompt.given.shape[1]
        if label is None and guidance != 1:
            raise ValueError(f"guidance is {guidance}, and there is no label to guide to; pass label=")
        model: Any = self._labelled(label)
        if guidance != 1:
            model = Guided(model, self.model, guidance)
        if (temperature, top_p, top_k) != (1, 1, None):
            model = Warped(model, temperature, top_p, top_k)
        seed = int(torch.randint(2**62, ())) if seed is None else check_seed(seed)
        return sampler.trajectory(model, prompt, seed=seed, steps=steps)

    def bound(
        self,
        x_0: Int[Tensor, "b L"],
        draws: int = 64,
        *,
        seed: int = 0,
        valid: Bool[Tensor, "b L"] | None = None,
        label: int | Int[Tensor, " b"] | None = None,
        batch: int | None = None,
    ) -> LikelihoodEstimate[Tensor]:
        """Bound −log p of each sequence from above, in nats, with its standard error.

        Args:
            x_0: Sequences.
            draws: Monte Carlo draws per sequence; more make the error smaller.
            seed: Decides the draws, together with the number of a row.
            valid: False at padding, which is not counted.
            label: The label of all rows, or of each.
            batch: Draws evaluated at a time; it changes no result.
        """
        return likelihood.bound(self._labelled(label), x_0, draws, seed, valid=valid, batch=batch)

    def _labelled(self, label: int | Tensor | None) -> DiscreteModel:
        return self.model if label is None else self.model.bind(label=torch.as_tensor(label, device=self.device))


def _check_type(name: str, given: object, kind: type, example: str) -> None:
    if not isinstance(given, kind):
        what = f"the class {given.__name__}" if inspect.isclass(given) else repr(given)
        raise ValueError(f"{name} is {what}; pass an instance, such as {example}")


def _check_tokens(name: str, given: Any, vocab_size: int, least: int = 0) -> Tensor:
    """Return token ids; raise ValueError for anything but int64 of shape (b, L) in ``least`` … ``vocab_size`` − 1."""
    if not isinstance(given, Tensor) or given.dtype != torch.long or given.ndim != 2:
        what = f"{given.dtype} of shape {tuple(given.shape)}" if isinstance(given, Tensor) else f"{given!r:.80}"
        raise ValueError(f"{name} is {what}; pass token ids, an int64 tensor of shape (sequences, length)")
    open_positions = ", or −1 at open positions" if least < 0 else ""
    allowed = f"token ids must lie in 0..{vocab_size - 1}{open_positions}"
    tensors.check_range(given, least, vocab_size - 1, name + " holds {}; " + allowed)
    return given
