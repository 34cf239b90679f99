"""Shapes of tensors, checks of the values that users pass, and the precision in which tensors are computed."""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

Tokens = Int[Tensor, "*b L"]  # token ids of sequences
PerSequence = Float[Tensor, "*b"]  # one number for each sequence: its noise σ, its time t or the weight of its loss
PerPosition = Float[Tensor, "*b L"]  # one number for each position, such as its loss
PerState = Float[Tensor, "*b L n"]  # one number for each state of each position, such as its log-score
PerToken = Float[Tensor, "*b L N"]  # one number for each token, which the mask is not, of each position


def upcast_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float32 for half precision, and any wider dtype unchanged."""
    return torch.promote_types(dtype, torch.float32)


def upcast(x: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """Convert half precision to float32, the least precision of norms, losses and scores."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def compute_dtype(weight: Float[Tensor, "*s"]) -> torch.dtype:
    """Return the dtype of matrix products with ``weight``: autocast's where it is enabled, else the weight's own."""
    device = weight.device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return weight.dtype


def check_range(x: Tensor, low: int | float, high: int | float, message: str) -> None:
    """Raise ValueError unless ``low`` ≤ x ≤ ``high``; {} in the message is the first value that is not.

    Only values on a CPU are read: those of other devices would have to wait for it.
    """
    if x.device.type == "cpu" and not torch.compiler.is_compiling() and (bad := ~((x >= low) & (x <= high))).any():
        raise ValueError(message.format(x[bad].flatten()[0].item()))


def check_times(t: Float[Tensor, "*s"]) -> None:
    check_range(t, 0, 1, "t is {}; it must lie in [0, 1], where 0 is data and 1 is noise")


def check_sigma(sigma: Float[Tensor, "*s"]) -> None:
    check_range(sigma, 0, math.inf, "sigma is {}; total noise must be 0 or more")


def check_clean_tokens(x_0: Int[Tensor, "*s"], vocab_size: int) -> None:
    tokens = f"tokens must lie in 0..{vocab_size - 1}; a mask is never clean data"
    check_range(x_0, 0, vocab_size - 1, "x_0 holds token {}; " + tokens)


def check_states(x: Int[Tensor, "*s"], num_states: int) -> None:
    check_range(x, 0, num_states - 1, f"x holds state {{}}; states must lie in 0..{num_states - 1}")


def check_vocab_size(vocab_size: int) -> None:
    if not isinstance(vocab_size, int) or vocab_size < 2:
        raise ValueError(f"vocab_size is {vocab_size}; a process needs a whole number of at least 2 tokens")
