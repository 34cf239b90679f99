"""Optimizers (AdamW, Muon), the learning-rate schedule and gradient clipping.

References: AdamW, Loshchilov and Hutter 2017, "Decoupled Weight Decay Regularization", arXiv 1711.05101; cosine decay,
the same authors 2016, "SGDR: Stochastic Gradient Descent with Warm Restarts", arXiv 1608.03983.
"""

import math

import torch
from torch import Tensor, nn

from sedd.training.config import OptimConfig
from sedd.training.muon import Muon

_NOT_HIDDEN = ("embed", "head", "output", "linear", "adaLN", "modulation", "sigma", "time")
"""Parts of the names of matrices outside the hidden layers: embeddings, the head, noise conditioning."""

MIN_FUSED_ON_CPU = 2**17
"""Weights from which on torch's fused AdamW is used on a CPU; a step of fewer takes a fraction of a millisecond."""


def build_optimizers(network: nn.Module, config: OptimConfig) -> list[torch.optim.Optimizer]:
    """Build AdamW for all weights, or Muon for hidden matrices and AdamW for the rest; vectors have no weight decay."""
    matrices: list[Tensor] = []
    vectors: list[Tensor] = []
    hidden: dict[int, list[Tensor]] = {3: [], 1: []}  # by the number of matrices that are stacked in one
    for name, weight in network.named_parameters():
        if not weight.requires_grad:
            continue
        if weight.ndim < 2:
            vectors.append(weight)
        elif config.name == "muon" and weight.ndim == 2 and not any(word in name for word in _NOT_HIDDEN):
            hidden[3 if "qkv" in name else 1].append(weight)
        else:
            matrices.append(weight)
    decayed = {"params": matrices, "weight_decay": config.weight_decay}
    groups = [group for group in (decayed, {"params": vectors, "weight_decay": 0.0}) if group["params"]]
    betas = (config.beta1, config.beta2)
    weights = [*matrices, *vectors]
    # one kernel: on a GPU, and on a CPU for many weights, in a quarter of the time there
    on_cpu = all(w.device.type == "cpu" for w in weights) and sum(w.numel() for w in weights) >= MIN_FUSED_ON_CPU
    fused = on_cpu or all(w.is_cuda for w in weights)
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, lr=config.lr, betas=betas, fused=fused)]
    if by_parts := [{"params": found, "parts": parts} for parts, found in hidden.items() if found]:
        optimizers.append(Muon(by_parts, lr=config.lr, weight_decay=config.weight_decay))
    return optimizers


def lr_multiplier(config: OptimConfig, step: int, budget_used: float) -> float:
    """Return the learning-rate schedule's factor: linear warmup over steps, then decay over the used budget."""
    warmup = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    progress = 1 - min(1.0, (1 - min(max(budget_used, 0.0), 1.0)) / config.decay_fraction)
    final_fraction = config.final_lr_fraction
    decay = {
        "constant": 1.0,
        "linear": 1 - (1 - final_fraction) * progress,
        "cosine": final_fraction + (1 - final_fraction) * (1 + math.cos(math.pi * progress)) / 2,
    }
    return warmup * decay[config.lr_schedule]


def set_learning_rate(optimizers: list[torch.optim.Optimizer], lr: float) -> None:
    """Set the learning rate of the next step."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr


def step_if_finite(optimizers: list[torch.optim.Optimizer], finite: Tensor) -> None:
    """Apply the optimizers unless ``finite`` is false.

    A fused AdamW and Muon read the flag on the device (``found_inf``), so that the host need not wait for it.
    """
    for optimizer in optimizers:
        if optimizer.defaults.get("fused") or isinstance(optimizer, Muon):
            optimizer.found_inf = 1 - finite.float()  # type: ignore[attr-defined]
            optimizer.step()
        elif bool(finite):
            optimizer.step()


def clip_grad_norm(weights: list[Tensor], max_norm: float) -> Tensor:
    """Clip the norm of all gradients together to ``max_norm``, in place, and return the norm before clipping."""
    norm = torch.nn.utils.clip_grad_norm_(weights, max_norm)
    whole: Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # FSDP: a DTensor
    return whole
