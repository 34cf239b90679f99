"""Inside a compiled graph. Run without shape checks at every call, which would break the graph."""

from collections.abc import Callable

import pytest
import torch

from sedd import exact
from sedd.objective import DenoisingScoreEntropy
from sedd.parameterization import Mean, Score
from sedd.process import Absorbing, Process, Uniform
from sedd.schedule import Geometric
from sedd.transformer import Modern, Reference, Transformer


@pytest.mark.parametrize("wrapper", [Score, Mean])
@pytest.mark.parametrize("process", [Uniform(7), Absorbing(7)], ids=str)
def test_compiled_losses_are_the_same(process: Process, wrapper: type) -> None:
    """The border's checks look at values on the CPU; inside a graph they must not."""
    generator = torch.Generator().manual_seed(0)
    x_0 = torch.randint(7, (6, 3), generator=generator)
    t = torch.linspace(0.1, 1, 6)
    objective = DenoisingScoreEntropy(process, Geometric())
    x_t = objective.corrupt(x_0, t, generator)
    table = exact.Table(process.num_states, 3)
    with torch.no_grad():
        table.weight.normal_(generator=generator)
    model = wrapper(table, process)

    def run(loss: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        value = loss(model, x_t, x_0, t)
        (gradient,) = torch.autograd.grad(value.sum(), table.weight)
        return value.detach(), gradient

    compiled = torch.compile(objective.loss, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(run(compiled), run(objective.loss), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("style", "causal"), [(Reference, False), (Modern, True)])
def test_compiled_networks_are_the_same(style: type[Transformer], causal: bool) -> None:
    """In one graph, forwards and backwards, with padding and without."""
    network = style(states=7, width=24, depth=1, heads=3, causal=causal)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_(0, 0.3)
    x, sigma = torch.randint(7, (4, 6)), torch.rand(4)

    def run(call: Callable[..., torch.Tensor], valid: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        value = call(x, sigma, valid)
        return value.detach(), *torch.autograd.grad(value.logsumexp(-1).sum(), list(network.parameters()))

    compiled = torch.compile(network, backend="aot_eager", fullgraph=True)
    for valid in (None, torch.arange(6) < torch.tensor([[6], [3], [1], [0]])):
        torch.testing.assert_close(run(compiled, valid), run(network, valid), rtol=1e-5, atol=1e-5)
