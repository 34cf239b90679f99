"""Recordings where there is no GPU: nothing is recorded, and a copy of a network is no other's."""

import copy
import gc
import weakref

import pytest
import torch

from sedd.nn.transformer import Modern
from sedd.runtime.cuda_graphs import CapturedGraphs, GraphedFunction


def network() -> Modern:
    return Modern(states=5, width=16, depth=3, heads=2)


def test_a_cpu_records_nothing() -> None:
    made = network()
    made.enable_cuda_graphs()
    assert made.graphed_blocks is None


def test_a_network_that_left_its_gpu_is_not_replayed() -> None:
    made = network()
    made.graphed_blocks = GraphedFunction(made.blocks[:-1].parameters())
    made(torch.zeros(2, 4, dtype=torch.long), torch.ones(2)).sum().backward()
    assert made.graphed_blocks._graphs == {}


def test_a_copy_is_recorded_anew() -> None:
    """With its own weights: graphs stay where they were made."""
    made = network()
    made.graphed_blocks = GraphedFunction(made.blocks[:-1].parameters())
    made.graphed_blocks._graphs["made"] = CapturedGraphs(None, (), (), None, (), ())
    copied = copy.deepcopy(made)
    assert copied.graphed_blocks is not None
    assert list(made.graphed_blocks._graphs) == ["made"]
    assert copied.graphed_blocks._graphs == {}
    assert [id(w) for w in copied.graphed_blocks.weights] == [id(w) for w in copied.blocks[:-1].parameters()]


def test_nobody_holds_on_to_a_recorded_network() -> None:
    """Its memory on a GPU is back when it is gone, not when Python next looks for what refers to itself."""
    made = network()
    made.graphed_blocks = GraphedFunction(made.blocks[:-1].parameters())
    gone = weakref.ref(made)
    gc.disable()
    try:
        del made
        assert gone() is None
    finally:
        gc.enable()


def test_what_learns_nothing_is_called_as_it_is() -> None:
    def doubled(a: torch.Tensor) -> tuple[torch.Tensor]:
        return (2 * a,)

    (said,) = GraphedFunction([torch.ones(2)])(doubled, torch.ones(3))
    assert said.tolist() == [2, 2, 2]


@pytest.mark.parametrize("way", ["compile_trunk", "activation_checkpointing"])
def test_what_is_compiled_or_recomputed_is_not_recorded(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    made = network()
    if way == "compile_trunk":
        made.compile_trunk("eager")
    else:
        made.activation_checkpointing = lambda block, *rest: block(*rest)
    made.enable_cuda_graphs()
    assert made.graphed_blocks is None
    other = network()
    other.enable_cuda_graphs()
    assert other.graphed_blocks is not None
