"""The limits of a server: on its queue, on time, and on every number that multiplies the work of a request."""

from dataclasses import dataclass
from typing import final

TOKENS_PER_ROW = 2**14
"""Tokens that a request may have per row that it may have; a single row may always be as long as the model's rows."""


@final
@dataclass(frozen=True)
class Limits:
    """Limits of a server."""

    slots: int = 32  # rows that are filled at the same time
    queue: int = 256  # rows that may wait
    timeout: float = 120.0  # seconds within which a request is answered; a request may set a shorter time
    rows: int = 64  # rows of one request: prompts times n
    steps: int = 1024
    draws: int = 256  # Monte Carlo draws per text of a likelihood
    body: int = 2**20  # bytes of a request's body
    connections: int = 512  # open connections; fewer where the process may not open so many files
    header_seconds: float = 10.0  # seconds within which the headers of a request must have arrived
    same_shape: bool = False
    """Pad every forward pass to the same number of rows: replies then have the same bits at any load."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "same_shape" and not value > 0:
                raise ValueError(f"{name} is {value}; it must be above 0")

    @property
    def tokens(self) -> int:
        """Tokens of one request, over all its rows."""
        return TOKENS_PER_ROW * self.rows
