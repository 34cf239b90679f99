"""torch.compile of losses, networks and runs. Run without shape checks at every call, which would break the graph."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch._dynamo.exc import RecompileError
from torch._dynamo.utils import counters

from sedd import data, exact
from sedd.nn.transformer import Modern, Reference, Transformer
from sedd.objectives import DenoisingScoreEntropy
from sedd.parameterization import MeanModel, ScoreModel
from sedd.process import Absorbing, Process, Uniform
from sedd.runtime.distributed import Ranks
from sedd.schedule import Geometric
from sedd.tokenizer import Bytes
from sedd.training import loop
from sedd.training.batches import Batch
from sedd.training.config import BudgetConfig, DataConfig, ModelConfig, NoiseConfig, RunConfig, TrainConfig
from sedd.training.trainer import Trainer, train_step


@pytest.mark.parametrize("wrapper", [ScoreModel, MeanModel])
@pytest.mark.parametrize("process", [Uniform(7), Absorbing(7)], ids=str)
def test_compiled_losses_are_the_same(process: Process, wrapper: type) -> None:
    """Argument checks read values on the CPU; inside a compiled graph they must not."""
    generator = torch.Generator().manual_seed(0)
    x_0 = torch.randint(7, (6, 3), generator=generator)
    t = torch.linspace(0.1, 1, 6)
    table, schedule, objective = exact.Table(process.num_states, 3), Geometric(), DenoisingScoreEntropy()
    x_t = process.corrupt(x_0, schedule.sigma(t), generator)
    with torch.no_grad():
        table.weight.normal_(generator=generator)
    model = wrapper(table, process, schedule)

    def run(loss: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        value = loss(model, x_t, x_0, t)
        (gradient,) = torch.autograd.grad(value.sum(), table.weight)
        return value.detach(), gradient

    compiled = torch.compile(objective.loss, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(run(compiled), run(objective.loss), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("architecture", "causal"), [(Reference, False), (Modern, True)])
def test_compiled_networks_are_the_same(architecture: type[Transformer], causal: bool) -> None:
    """In one graph, forward and backward, with padding and without."""
    network = architecture(states=7, width=24, depth=1, heads=3, causal=causal)
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


@pytest.fixture
def counted_graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Count graphs from 0, make recompilation an error, and use a backend that needs no C++ compiler."""
    torch._dynamo.reset()
    counters.clear()
    compile_trunk = Transformer.compile_trunk
    monkeypatch.setattr(Transformer, "compile_trunk", lambda self: compile_trunk(self, backend="aot_eager"))
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield


def prepare_shards(folder: Path, pad: str | None) -> Path:
    """Prepare one sequence per line, of several lengths, or the same text packed."""
    (folder / "a.txt").write_text("\n".join("abcdefgh"[: 1 + i % 8] for i in range(300)))
    lines = {"packing": "lines", "length": 8, "pad": pad} if pad else {}
    data.prepare([folder / "a.txt"], folder / "shards", Bytes(), **lines)  # type: ignore[arg-type]
    return folder / "shards"


def build_config(
    architecture: str = "modern", process: str = "absorbing", parameterization: str = "score", **train: object
) -> RunConfig:
    defaults = {"batch_size": 8, "eval_every": 2, "eval_sequences": 20, "log_every": 1}
    return RunConfig(
        data=DataConfig(packing="lines"),
        noise=NoiseConfig(process),
        model=ModelConfig(
            architecture, width=16, depth=2, heads=2, seq_len=8, dropout=0.1, parameterization=parameterization
        ),
        budget=BudgetConfig(steps=6),
        train=TrainConfig(compile=True, **(defaults | train)),  # type: ignore[arg-type]
    ).resolved()


@pytest.mark.usefixtures("counted_graphs")
@pytest.mark.parametrize(
    ("pad", "options"),
    [
        (None, {"precision": "bfloat16", "grad_accumulation": 2, "sample_every": 3}),
        ("ignore", {"precision": "bfloat16"}),
        (None, {"architecture": "reference", "process": "uniform", "parameterization": "mean"}),
    ],
    ids=["bfloat16 accumulated", "padded", "reference uniform mean"],
)
def test_a_run_compiles_one_graph(tmp_path: Path, pad: str | None, options: dict[str, object]) -> None:
    """Over steps, micro-batches, evaluations, samples and a last evaluation of another size."""
    shards = prepare_shards(tmp_path, pad)
    result = loop.run(build_config(**options), lambda: shards, tmp_path / "run", False, lambda kind, record: None)
    assert result.state.step == 6
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@pytest.mark.usefixtures("counted_graphs")
def test_recompilation_is_noticed(tmp_path: Path) -> None:
    shards = prepare_shards(tmp_path, None)
    blocks = [data.TokenBlocks.open(shards, 8, split) for split in ("train", "validation")]
    trainer = Trainer(build_config(), *blocks, Ranks(0, 1, torch.device("cpu")))
    batch = trainer.dataloader[0]
    train_step(trainer, batch, 0.0, lambda pending: None)
    smaller = Batch._make([*(column[:5] for column in batch[:-1]), batch.tokens])
    with pytest.raises(RecompileError):
        train_step(trainer, smaller, 0.0, lambda pending: None)
