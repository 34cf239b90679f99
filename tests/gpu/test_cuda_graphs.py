"""On a GPU: blocks that are replayed learn, to the bit, what blocks that are told launch by launch do."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sedd import bench, factory, training
from sedd.nn.transformer import Transformer
from sedd.runtime import cuda_graphs
from sedd.training.loss import FusedLoss

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class Lesson:
    """A small network with dropout, batches for it, and its loss: replayed, or not."""

    def __init__(
        self, recorded: bool, style: str = "reference", padded: bool = False, batch: int = 8, **options: Any
    ) -> None:
        setting = bench.TrainSetting(recipe="tiny", batch=batch, vocab_size=500, **options)
        run = setting.run()
        run.model.architecture, run.model.dropout, run.model.depth = style, 0.1, 3
        self.parts, generator = factory.build_setup(run, 500), torch.Generator().manual_seed(0)
        made = [bench.random_batch(self.parts, setting, run.model.seq_len, generator) for _ in range(4)]
        self.batches = [bench.NoisyBatch(*(a.cuda() for a in b)) for b in made]
        ends = torch.arange(batch, device="cuda")[:, None] * 5 + 20
        self.valid = torch.arange(run.model.seq_len, device="cuda") < ends if padded else None
        self.network: Transformer = factory.build_network(run, self.parts).cuda()
        with torch.no_grad():
            for i, p in enumerate(self.network.parameters()):
                p.normal_(0, 0.1, generator=torch.Generator("cuda").manual_seed(i))
        if setting.precision == "float8":
            self.network.enable_fp8()
        if recorded:
            self.network.enable_cuda_graphs()
        self.fused = FusedLoss(self.parts.objective, factory.build_model(run, self.network, self.parts))
        self.precision = setting.precision

    def loss(self, i: int) -> Tensor:
        x_t, x_0, t, weight = self.batches[i]
        with torch.autocast("cuda", torch.bfloat16, enabled=self.precision != "float32"):
            return self.fused(x_t, x_0, t, weight, self.valid).total

    def gradient(self, *numbers: int) -> list[Tensor]:
        """Summed over batches, with every gradient left where it lies until the end."""
        torch.manual_seed(0)  # dropout
        losses = []
        for i in numbers:
            losses.append(self.loss(i))
            losses[-1].backward()
        found = [
            torch.stack(losses).detach(),
            *(p.grad.clone() for p in self.network.parameters() if p.grad is not None),
        ]
        self.network.zero_grad()
        return found


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    assert len(ours) == len(theirs) > 20
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("style", ["reference", "modern"])
@pytest.mark.parametrize(
    "options",
    [
        {"process": "uniform"},
        {"objective": "lambda-dce"},
        {"precision": "float8"},
        {"precision": "float32"},
    ],
)
def test_the_same_bits(style: str, padded: bool, options: dict[str, Any]) -> None:
    """Batch after batch, while the weights move and another number of positions counts; dropout too."""
    ours, theirs = Lesson(True, style, padded, **options), Lesson(False, style, padded, **options)
    for i in range(4):
        found = [lesson.gradient(i) for lesson in (ours, theirs)]
        assert found[0][0].isfinite().all()
        assert same(*found)
        assert ours.network.graphed_blocks is not None
        assert len(ours.network.graphed_blocks._graphs) == 1
        with torch.no_grad():
            for p in (*ours.network.parameters(), *theirs.network.parameters()):
                p *= 0.99


def test_gradients_add_up() -> None:
    """The gradients of a pass lie where the next one writes; whoever still needs them has a copy."""
    ours, theirs = Lesson(True), Lesson(False)
    assert same(ours.gradient(0, 1, 2), theirs.gradient(0, 1, 2))


def test_a_pass_that_was_overwritten_cannot_go_back() -> None:
    lesson = Lesson(True)
    first, second = lesson.loss(0), lesson.loss(1)
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):  # the last block knows already
        torch.autograd.grad(first, list(lesson.network.blocks[-1].parameters()))
    second.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward must run once"):
        second.backward()


def test_an_evaluation_in_between_is_not_replayed() -> None:
    """Without dropout, with gradients or without, in another shape, between the ways of a step: nothing is spoilt."""
    ours, theirs = Lesson(True), Lesson(False)
    found = []
    for lesson in (ours, theirs):
        torch.manual_seed(0)
        total = lesson.loss(0)
        lesson.network.eval()
        said = lesson.network(lesson.batches[1].x_t[:3], torch.ones(3, device="cuda"))
        lesson.network.train()
        total.backward()
        found.append([said.detach(), *(p.grad for p in lesson.network.parameters() if p.grad is not None)])
    assert same(*found)
    assert ours.network.graphed_blocks is not None
    assert len(ours.network.graphed_blocks._graphs) == 1


def test_weights_that_lie_elsewhere_are_found() -> None:
    ours, theirs = Lesson(True), Lesson(False)
    for lesson in (ours, theirs):
        lesson.gradient(0)
        for p in lesson.network.parameters():
            p.data = 1.1 * p.data
    assert same(ours.gradient(1), theirs.gradient(1))


def test_a_copy_learns_by_itself() -> None:
    """Its recordings are of its own weights."""
    ours, theirs = Lesson(True), Lesson(False)
    ours.gradient(0)
    copied = copy.deepcopy(ours.network)
    with torch.no_grad():
        for p in (*ours.network.parameters(), *theirs.network.parameters()):
            p *= 1.1
        for p, q in zip(copied.parameters(), ours.network.parameters(), strict=True):
            p.copy_(q)
            q.zero_()
    ours.fused.network = copied
    ours.network = copied
    assert same(ours.gradient(1), theirs.gradient(1))


def test_memory_of_recordings_is_counted() -> None:
    """What lies between the ways of a step is no tensor of torch's; the peak has it all the same."""
    counted, peaks = [], []
    for recorded in (False, True):
        bench.free_memory("cuda")
        lesson = Lesson(recorded, batch=64)
        lesson.gradient(0)
        torch.cuda.reset_peak_memory_stats()
        lesson.gradient(1)
        counted.append(torch.cuda.max_memory_allocated())
        peaks.append(cuda_graphs.peak_memory())
    assert counted[1] < counted[0] < peaks[1]


# Networks of all kinds -------------------------------------------------------------------------------------


def pair(style: str, **options: Any) -> tuple[Transformer, Transformer]:
    """A network that is recorded, and another with the same weights that is not."""
    made = [factory.build_transformer(style, states=30, width=32, depth=3, heads=2, **options).cuda() for _ in range(2)]
    for network in made:
        for i, p in enumerate(network.parameters()):
            torch.nn.init.normal_(p, 0, 0.2, generator=torch.Generator("cuda").manual_seed(i))
    made[0].enable_cuda_graphs()
    return made[0], made[1]


def learn(network: Transformer, size: int = 4, valid: Tensor | None = None) -> None:
    """Add the gradient of a batch of that size."""
    torch.manual_seed(size)
    x = torch.randint(30, (size, 16), device="cuda")
    network(x, torch.rand(size, device="cuda"), valid).square().mean().backward()


def alike(ours: Transformer, theirs: Transformer) -> None:
    """Gradients, to the bit, and those that are missing; and one of them was replayed."""
    assert ours.graphed_blocks is not None
    assert ours.graphed_blocks._graphs
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        assert a.grad is None or torch.equal(a.grad, b.grad), name


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("options", [{"causal": True}, {"time_conditioning": False, "causal": True}, {"dropout": 0.3}])
@pytest.mark.parametrize("style", ["reference", "modern"])
def test_kinds_of_networks(style: str, options: dict[str, Any], padded: bool) -> None:
    """Those that see the past alone, too, with padding or without."""
    made = pair(style, **options)
    valid = torch.arange(16, device="cuda") < torch.tensor([[5], [16], [9], [1]], device="cuda") if padded else None
    for network in made:
        learn(network, valid=valid)
        learn(network, valid=valid)
    alike(*made)


def test_in_float64() -> None:
    """Where blocks are torch's own."""
    made = [network.double() for network in pair("reference")]
    for network in made:
        learn(network)
        learn(network)
    alike(made[0], made[1])


def test_shapes_take_turns() -> None:
    """Gradients of one are added to those of another; and more shapes than are kept."""
    made = pair("modern")
    for network in made:
        for size in (4, 2, 4, 2, 1, 3, 5, 6, 4):
            learn(network, size)
    alike(*made)
    assert len(made[0].graphed_blocks._graphs) == cuda_graphs.MAX_GRAPHS  # type: ignore[union-attr]


def test_gradients_that_are_set_to_0_and_weights_that_are_frozen_for_a_while() -> None:
    made = pair("reference")
    for network in made:
        network.blocks[0].requires_grad_(False)
        learn(network)
        network.blocks[0].requires_grad_(True)
        learn(network)
        network.zero_grad(set_to_none=False)
        learn(network)
        learn(network)
    alike(*made)


# Runs ------------------------------------------------------------------------------------------------------


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One for each recording that is made."""
    counted: list[int] = []
    plain = cuda_graphs._capture
    monkeypatch.setattr(cuda_graphs, "_record", lambda *told: counted.append(1) or plain(*told))  # type: ignore[func-returns-value]
    return counted


def a_text(folder: Path) -> str:
    text = folder / "text.txt"
    text.write_text("\n".join(f"{i} times {i % 7} is {i * (i % 7)}" for i in range(3000)))
    return str(text)


def test_what_a_run_would_cost(tmp_path: Path) -> None:
    """Memory is what is reserved, or a little less: what graphs keep is counted, and once."""
    bench.free_memory("cuda")
    config = training.merge_config({"sources": [a_text(tmp_path)], "steps": 30}, recipe="tiny")
    config.train.batch_size = 512
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved(), cuda_graphs.peak_memory()
    said = training.estimate_cost(config, lambda: training.prepare_data(config), steps=4)
    reserved, held = torch.cuda.max_memory_reserved() - before[0], said["peak_memory_MiB"] * 2**20 - before[1]
    assert 0.6 * reserved < held < 1.02 * reserved


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_run_is_the_same_run(accumulate: int, tmp_path: Path, made: list[int]) -> None:
    """From files to weights, while batches are fetched by another thread."""
    text = a_text(tmp_path)
    ends = []
    for recorded in (True, False):
        loop = {"record": recorded, "accumulate": accumulate, "precision": "bfloat16", "deterministic": True}
        words = {"sources": [text], "steps": 30, "train": {**loop, "log_every": 1, "eval_every": 10}}
        losses: list[float] = []

        def on_progress(kind: str, said: dict[str, Any], losses: list[float] = losses) -> None:
            if "loss" in said:
                losses.append(said["loss"])

        config = training.merge_config(words, recipe="tiny")
        config.model.dropout = 0.1
        end = training.run(
            config, lambda config=config: training.prepare_data(config), tmp_path / str(recorded), False, on_progress
        )
        ends.append((losses, end.validation))
        assert made == [1]
    assert len(ends[0][0]) >= 30
    assert ends[0] == ends[1]
