"""Checks of tensor arguments, and the precision in which tensors are computed."""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor


def upcast_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float32 for half precision, and any wider dtype unchanged."""
    return torch.promote_types(dtype, torch.float32)


def upcast(x: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """Convert half precision to float32, the least precision of norms, losses and scores."""
    return x.to(upcast_dtype(x.dtype))


def compute_dtype(weight: Float[Tensor, "*s"]) -> torch.dtype:
    """Return the dtype of matrix products with ``weight``: autocast's where it is enabled, else the weight's own."""
    device = weight.device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return weight.dtype


def _readable(x: Tensor) -> bool:
    """Return whether values can be read without synchronization: on a CPU, and not while compiling."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def _first(x: Tensor, bad: Tensor) -> float | int:
    value: float | int = x[bad].flatten()[0].item()
    return value


def check_times(t: Float[Tensor, "*s"]) -> None:
    """Require times in [0, 1]."""
    if _readable(t) and (bad := ~((t >= 0) & (t <= 1))).any():
        raise ValueError(f"t is {_first(t, bad)}; it must lie in [0, 1], where 0 is data and 1 is noise")


def check_sigma(sigma: Float[Tensor, "*s"]) -> None:
    """Require total noise of 0 or more."""
    if _readable(sigma) and (bad := ~(sigma >= 0)).any():
        raise ValueError(f"sigma is {_first(sigma, bad)}; total noise must be 0 or more")


def check_in_range(name: str, x: Float[Tensor, "*s"], first: Tensor, last: Tensor) -> None:
    """Require values in [first, last], up to rounding."""
    if _readable(x) and (bad := ~((x >= first * (1 - 1e-5)) & (x <= last * (1 + 1e-5)))).any():
        raise ValueError(f"{name} is {_first(x, bad)}; it must lie between {first.item():g} and {last.item():g}")


def check_clean_tokens(x_0: Int[Tensor, "*s"], vocab_size: int) -> None:
    """Require tokens in 0 … vocab_size − 1."""
    if _readable(x_0) and (bad := (x_0 < 0) | (x_0 >= vocab_size)).any():
        token = _first(x_0, bad)
        mask = " (that is the mask, which clean data never holds)" if token == vocab_size else ""
        raise ValueError(f"x_0 holds token {token}{mask}; tokens must lie in 0..{vocab_size - 1}")


def check_states(x: Int[Tensor, "*s"], num_states: int) -> None:
    """Require states of the process."""
    if _readable(x) and (bad := (x < 0) | (x >= num_states)).any():
        raise ValueError(f"x holds state {_first(x, bad)}; states must lie in 0..{num_states - 1}")


def check_weights(weights: Float[Tensor, "*s n"]) -> None:
    """Require rows of finite weights of 0 or more, at least one of them above 0."""
    if not _readable(weights):
        return
    if (bad := ~((weights >= 0) & (weights < math.inf))).any():
        raise ValueError(f"a weight is {_first(weights, bad)}; weights must be finite and 0 or more")
    if not (weights.amax(-1) > 0).all():
        raise ValueError("a row of weights is all 0; at least one entry must be above 0 to draw from it")


def check_decreasing_sigma(sigma_s: Float[Tensor, "*s"], sigma_t: Float[Tensor, "*s"]) -> None:
    """Require a reverse step to go to less noise."""
    check_sigma(sigma_s)
    check_sigma(sigma_t)
    if _readable(sigma_s) and (bad := ~(sigma_s < sigma_t)).any():
        raise ValueError(
            f"sigma_s is {_first(sigma_s, bad)} and sigma_t is {_first(sigma_t, bad)}; a step needs sigma_s < sigma_t"
        )


def check_vocab_size(vocab_size: int) -> None:
    """Require a vocabulary of at least 2 tokens."""
    if not isinstance(vocab_size, int) or vocab_size < 2:
        raise ValueError(f"vocab_size is {vocab_size}; a process needs a whole number of at least 2 tokens")


def check_num_outputs(output: Float[Tensor, "*s n"], expected: int, what: str) -> None:
    """Require the number of outputs per position that the process has."""
    if output.shape[-1] != expected:
        raise ValueError(f"the {what} has {output.shape[-1]} entries per position; this process needs {expected}")


def check_fraction(name: str, value: float, why: str) -> None:
    """Require a setting in the open interval (0, 1)."""
    if not 0 < value < 1:
        raise ValueError(f"{name} is {value}; it must lie between 0 and 1, {why}")


def check_t_min(value: float) -> None:
    """Require a first time in [0, 1)."""
    if not 0 <= value < 1:
        raise ValueError(f"t_min is {value}; it must lie in [0, 1)")
