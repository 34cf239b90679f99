"""The likelihood bound of the exact score equals the entropy."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from sedd import exact, factory, registry
from sedd.diffusion import validate

MAX_WORK = 4_000_000
"""The largest enumeration: pairs of a noisy and a clean sequence, times their entries, per quadrature node."""


class BoundRow(NamedTuple):
    """The bound of the exact score on one random distribution, in nats per sequence."""

    process: str
    schedule: str
    entropy: float
    diffusion: float
    prior: float
    reconstruction: float
    bound: float
    gap: float


def compute_bounds(vocab_size: int, length: int, seed: int) -> Iterator[BoundRow]:
    """Compute the bound of the exact score, from the true marginal at t = 1; it should equal the entropy."""
    validate.vocab_size(vocab_size)
    if length < 1:
        raise ValueError(f"length is {length}; it must be 1 or more")
    pairs = length * (math.log(vocab_size) + math.log(vocab_size + 1))
    if pairs + math.log(length * (vocab_size + 1)) > math.log(MAX_WORK):
        raise ValueError(
            f"{vocab_size} tokens at length {length} are too many to enumerate; "
            "3 tokens go up to length 4, 2 tokens up to length 6"
        )
    for process_name in registry.PROCESSES.built_in:
        for schedule_name in registry.SCHEDULES.built_in:
            process, schedule = factory.build_process(process_name, vocab_size), factory.build_schedule(schedule_name)
            p_data = exact.Distribution.random(vocab_size, length, torch.Generator().manual_seed(seed))
            score = exact.Score(p_data, process)
            terms = exact.bound(score, p_data, process, schedule, true_base=True, nodes=96)
            yield BoundRow(
                process=process_name,
                schedule=schedule_name,
                entropy=p_data.entropy().item(),
                **{name: value.item() for name, value in terms._asdict().items()},
                bound=terms.total.item(),
                gap=(terms.total - p_data.entropy()).item(),
            )
