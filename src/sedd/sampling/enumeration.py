"""The law of samples by enumeration: what `run` draws from, on spaces small enough to write down.

A law is over `exact.every` sequence of states. Nothing is drawn.
"""

from collections.abc import Callable
from itertools import pairwise

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sedd import exact
from sedd.diffusion.parameterization import LogScoreModel
from sedd.diffusion.process import Process
from sedd.diffusion.reverse import last_step
from sedd.diffusion.schedule import Schedule


def everything(process: Process, law: Float[Tensor, " n"], length: int) -> Int[Tensor, "n L"]:
    """Every sequence that ``law`` speaks of."""
    return exact.every(process.num_states, length).to(law.device)


def start(process: Process, given: Int[Tensor, " L"]) -> Float[Tensor, " n"]:
    """Noise around what is given; −1 is a blank."""
    x = exact.every(process.num_states, len(given))
    noise = process.log_prior(x, torch.tensor(torch.inf, dtype=torch.float64).expand(x.shape)).exp()
    return torch.where(given < 0, noise, (x == given).double()).prod(-1)


def step(
    law: Float[Tensor, " n"], table: Float[Tensor, "n L states"], x: Int[Tensor, "n L"], free: Bool[Tensor, "n L"]
) -> Float[Tensor, " n"]:
    """The law after a step in which only free positions move, each by its row of the table."""
    stays = torch.nn.functional.one_hot(x, table.shape[-1]).to(table.dtype)
    return exact.propagate(law, torch.where(free[..., None], table, stays))


After = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def walk(
    model: LogScoreModel, process: Process, schedule: Schedule, after: After, given: Int[Tensor, " L"], times: Tensor
) -> Float[Tensor, " n"]:
    """The law at the end of a grid: ``after(law, blank, t, s)`` makes all steps but the last."""
    law, x, blank = start(process, given), exact.every(process.num_states, len(given)), given < 0
    for t, s in list(pairwise(times))[:-1]:
        law = after(law, blank, t.expand(len(x)), s.expand(len(x)))
    table = last_step(model, process, x, schedule.sigma(times[-2]).expand(len(x)))
    return step(law, table, x, blank & process.unknown(x))
