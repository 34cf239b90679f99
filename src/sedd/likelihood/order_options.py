"""How many orders a likelihood is estimated with, and which models have one that is a mixture over orders.

This module does not import torch: a mistake is refused before torch is imported.
"""

from sedd.border import check_count
from sedd.config import RunConfig

Orders = int | str
"""A number of random orders, or ``all``."""
MAX_LENGTH = 16
"""Most tokens for ``all``: there are 2^L sets of revealed tokens, each of which takes one network call."""


def parse_orders(text: str) -> Orders:
    """Read a number of orders, or ``all``."""
    if text == "all":
        return "all"
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"orders is {text!r}; give a number of 1 or more, or all")
    return int(text)


def check_orders(orders: Orders, estimator: str | None) -> None:
    """Refuse a number of orders below 1, and an estimator that has other draws."""
    if orders != "all" and (not isinstance(orders, int) or orders < 1):
        raise ValueError(f"orders is {orders!r}; give a number of 1 or more, or all")
    if isinstance(orders, int):
        check_count("orders", orders)
    if estimator not in (None, "any-order"):
        raise ValueError(
            f"orders are those of estimator any-order, and estimator is {estimator!r}; leave one of them out"
        )


def check_mixture(config: RunConfig) -> None:
    """Refuse a model whose distribution is not a mixture over orders."""
    process, kind = config.noise.process, config.model.parameterization
    if process == "absorbing" and kind == "mean" and config.time_conditioning != "sigma":
        return
    given = f"{kind} under {process} noise" + (" that depends on σ" if config.time_conditioning == "sigma" else "")
    raise ValueError(
        "orders is for a time-free denoiser under absorbing noise, whose distribution is a mixture over orders, and "
        f"this model is {given}; leave orders out, or train one with --objective lambda-dce"
    )


def check_all_orders_length(length: int) -> None:
    """Refuse a sequence that is too long for a sum over all orders."""
    if length > MAX_LENGTH:
        raise ValueError(
            f"orders is all, and a sequence has {length} tokens; the sum takes 2^{length} network calls, and at most "
            f"{MAX_LENGTH} tokens are allowed: give a number of orders"
        )
