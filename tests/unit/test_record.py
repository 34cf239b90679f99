"""Recordings where there is no GPU: nothing is recorded, and a copy of a network is no other's."""

import copy

import torch

from sedd.record import Recorded, Recording
from sedd.transformer import Modern


def test_a_cpu_records_nothing() -> None:
    network = Modern(states=5, width=16, depth=3, heads=2)
    network.record()
    assert network.recorded is None
    network(torch.zeros(2, 4, dtype=torch.long), torch.ones(2)).sum().backward()


def test_a_copy_is_recorded_anew() -> None:
    """With its own weights, by itself: graphs stay where they were made."""
    network = Modern(states=5, width=16, depth=3, heads=2)
    network.recorded = Recorded(network._tensors, network.blocks[:-1].parameters())
    network.recorded._recordings["made"] = Recording(None, (), (), None, (), ())
    made = copy.deepcopy(network).recorded
    assert made is not None
    assert made.function.__self__ is not network  # type: ignore[attr-defined]
    assert list(network.recorded._recordings) == ["made"]
    assert made._recordings == {}
    assert not {id(w) for w in made.weights} & {id(p) for p in network.parameters()}
