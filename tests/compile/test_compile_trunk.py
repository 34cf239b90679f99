"""A compiled trunk in training: one graph for any number of masked tokens, and the numbers of eager mode."""

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from sedd.nn.transformer import Modern, Reference, Transformer
from sedd.objectives import DenoisingScoreEntropy
from sedd.ops.fused_loss import fused_loss
from sedd.parameterization import ScoreModel
from sedd.process import Absorbing
from sedd.runtime import activation_checkpointing

OBJECTIVE, PROCESS = DenoisingScoreEntropy(), Absorbing(11)


def build_network(architecture: type[Transformer]) -> Transformer:
    network = architecture(states=12, width=16, depth=2, heads=2, cond_dim=4)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_(0, 0.3, generator=generator)
    return network


def losses_and_gradients(network: Transformer, t: float) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    x_0, times = torch.randint(11, (4, 6), generator=generator), torch.full((4,), t)
    model = ScoreModel(network, PROCESS)
    x_t = OBJECTIVE.corrupt(model, x_0, times, generator)
    loss = fused_loss(OBJECTIVE, model, x_t, x_0, times, torch.ones(4))
    return loss.positions, *torch.autograd.grad(loss.total, list(network.parameters()))


@pytest.mark.parametrize("architecture", [Reference, Modern])
@pytest.mark.parametrize("name", ["none", "selective", "full"])
def test_one_graph_for_any_number_of_masks(name: str, architecture: type[Transformer]) -> None:
    eager, compiled = build_network(architecture), build_network(architecture)
    compiled.activation_checkpointing = getattr(activation_checkpointing, name)
    torch._dynamo.reset()
    counters.clear()
    compiled.compile_trunk(backend="aot_eager")
    for t in (0.5, 0.1, 0.0, 1.0, 0.8):
        torch.testing.assert_close(
            losses_and_gradients(compiled, t), losses_and_gradients(eager, t), rtol=1e-4, atol=1e-5
        )
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("architecture", [Reference, Modern])
def test_one_graph_per_block_for_any_number_of_masks(architecture: type[Transformer]) -> None:
    eager, compiled = build_network(architecture), build_network(architecture)
    torch._dynamo.reset()
    counters.clear()
    compiled.compile_blocks(backend="aot_eager")
    for t in (0.5, 0.1, 0.0, 1.0, 0.8):
        torch.testing.assert_close(
            losses_and_gradients(compiled, t), losses_and_gradients(eager, t), rtol=1e-4, atol=1e-5
        )
    assert counters["stats"]["unique_graphs"] == len(compiled.blocks)
