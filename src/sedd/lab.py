"""Demonstrations on laws small enough to know everything about."""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from sedd import build, exact

MOST_STATES = 1296
"""The largest space `bound` enumerates: every pair of sequences is looked at, at every node."""


class Row(NamedTuple):
    """The exact score's bound on one random law, in nats a sequence."""

    process: str
    schedule: str
    entropy: float
    diffusion: float
    prior: float
    reconstruction: float
    bound: float
    gap: float


def bound(vocab_size: int, length: int, seed: int) -> Iterator[Row]:
    """The bound of the exact score, from the true marginal at t = 1, against the entropy it should equal."""
    if length < 1:
        raise ValueError(f"length is {length}; it must be 1 or more")
    if (states := (vocab_size + 1) ** length) > MOST_STATES:
        raise ValueError(f"{vocab_size} tokens at length {length} make {states} masked sequences; "
                         f"at most {MOST_STATES} are enumerated: choose fewer tokens or a shorter length")  # fmt: skip
    for process_name in build.PROCESSES:
        for schedule_name in build.SCHEDULES:
            process, schedule = build.process(process_name, vocab_size), build.schedule(schedule_name)
            law = exact.Law.random(vocab_size, length, torch.Generator().manual_seed(seed))
            score = exact.Score(law, process)
            terms = exact.bound(score, law, process, schedule, true_base=True, nodes=96)
            yield Row(
                process=process_name,
                schedule=schedule_name,
                entropy=law.entropy().item(),
                **{name: value.item() for name, value in terms._asdict().items()},
                bound=terms.total.item(),
                gap=(terms.total - law.entropy()).item(),
            )
