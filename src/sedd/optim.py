"""Optimizers: which weights move by which rule, and how fast at which time."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from sedd.config import Optim


def _is_hidden(name: str, weight: Tensor) -> bool:
    """A matrix between hidden states: not an embedding, a head, or what the noise level modulates."""
    outside = ("embed", "head", "output", "linear", "adaLN", "modulation", "sigma", "time")
    return weight.ndim == 2 and not any(word in name for word in outside)


def make(network: nn.Module, config: Optim) -> list[torch.optim.Optimizer]:
    """AdamW for everything, or Muon for hidden matrices and AdamW for the rest. Vectors are never decayed."""
    named = [(name, weight) for name, weight in network.named_parameters() if weight.requires_grad]
    hidden = [w for n, w in named if config.name == "muon" and _is_hidden(n, w)]
    taken = {id(w) for w in hidden}
    rest = [w for _, w in named if id(w) not in taken]
    groups = [
        {"params": [w for w in rest if w.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [w for w in rest if w.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (config.beta1, config.beta2)
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW([g for g in groups if g["params"]], lr=config.lr, betas=betas, fused=_fused(rest))
    ]
    if hidden:
        optimizers.append(
            torch.optim.Muon(
                hidden,
                lr=config.lr,
                weight_decay=config.weight_decay,
                momentum=0.95,
                adjust_lr_fn="match_rms_adamw",  # so that one learning rate serves both
            )
        )
    return optimizers


def _fused(weights: Iterable[Tensor]) -> bool:
    return all(w.is_cuda for w in weights)


def factor(config: Optim, step: int, progress: float) -> float:
    """The share of the learning rate at ``step``, with ``progress`` in [0, 1] of the budget spent."""
    warm = min(1.0, (step + 1) / config.warmup) if config.warmup else 1.0
    progress = min(max(progress, 0.0), 1.0)
    fall = {
        "constant": 1.0,
        "linear": 1 - (1 - config.final) * progress,
        "cosine": config.final + (1 - config.final) * (1 + math.cos(math.pi * progress)) / 2,
    }
    return warm * fall[config.decay]


def step(optimizers: list[torch.optim.Optimizer], finite: Tensor) -> None:
    """Move the weights, unless ``finite`` is false. A fused optimizer asks that of the device: the host goes on."""
    for optimizer in optimizers:
        if optimizer.defaults.get("fused"):
            optimizer.found_inf = 1 - finite.float()  # type: ignore[attr-defined]
            optimizer.step()
        elif bool(finite):
            optimizer.step()


def set_rate(optimizers: list[torch.optim.Optimizer], rate: float) -> None:
    """The learning rate of the next step."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
