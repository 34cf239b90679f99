"""Inside a compiled graph. Run without shape checks at every call, which would break the graph."""

from collections.abc import Callable

import pytest
import torch

from sedd import exact
from sedd.objective import DenoisingScoreEntropy
from sedd.parameterization import Mean, Score
from sedd.process import Absorbing, Process, Uniform
from sedd.schedule import Geometric


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
