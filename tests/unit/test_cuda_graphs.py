"""CUDA graphs without a GPU: nothing is captured, and a copy of a network shares no graphs."""

import copy
import gc
import weakref

import pytest
import torch

from sedd.nn.transformer import Modern
from sedd.runtime.cuda_graphs import CapturedGraphs, GraphedFunction


def build_network() -> Modern:
    return Modern(states=5, width=16, depth=3, heads=2)


def test_nothing_is_captured_on_a_cpu() -> None:
    network = build_network()
    network.enable_cuda_graphs()
    assert network.graphed_blocks is None


def test_a_network_moved_to_the_cpu_does_not_use_graphs() -> None:
    network = build_network()
    network.graphed_blocks = GraphedFunction(network.blocks[:-1].parameters())
    network(torch.zeros(2, 4, dtype=torch.long), torch.ones(2)).sum().backward()
    assert network.graphed_blocks._graphs == {}


def test_a_copy_captures_its_own_graphs() -> None:
    """Of its own weights: the graphs stay with the original."""
    network = build_network()
    network.graphed_blocks = GraphedFunction(network.blocks[:-1].parameters())
    network.graphed_blocks._graphs["graphs"] = CapturedGraphs(None, (), (), None, (), ())
    copied = copy.deepcopy(network)
    assert copied.graphed_blocks is not None
    assert list(network.graphed_blocks._graphs) == ["graphs"]
    assert copied.graphed_blocks._graphs == {}
    assert [id(w) for w in copied.graphed_blocks.weights] == [id(w) for w in copied.blocks[:-1].parameters()]


def test_no_reference_cycle() -> None:
    """The memory of a deleted network is freed at once, not at the next garbage collection."""
    network = build_network()
    network.graphed_blocks = GraphedFunction(network.blocks[:-1].parameters())
    reference = weakref.ref(network)
    gc.disable()
    try:
        del network
        assert reference() is None
    finally:
        gc.enable()


def test_a_function_without_gradients_is_called_directly() -> None:
    def double(a: torch.Tensor) -> tuple[torch.Tensor]:
        return (2 * a,)

    (output,) = GraphedFunction([torch.ones(2)])(double, torch.ones(3))
    assert output.tolist() == [2, 2, 2]


@pytest.mark.parametrize("option", ["compile_trunk", "activation_checkpointing"])
def test_compiled_and_checkpointed_networks_do_not_use_graphs(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    network = build_network()
    if option == "compile_trunk":
        network.compile_trunk("eager")
    else:
        network.activation_checkpointing = lambda block, *rest: block(*rest)
    network.enable_cuda_graphs()
    assert network.graphed_blocks is None
    other = build_network()
    other.enable_cuda_graphs()
    assert other.graphed_blocks is not None
