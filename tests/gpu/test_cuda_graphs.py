"""On a GPU: with CUDA graphs, losses and gradients are to the bit what they are without."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from measure import free_memory
from torch import Tensor
from train import NoisyBatch, TrainSetting, random_batch

from sedd.nn.transformer import Transformer
from sedd.ops.fused_loss import fused_loss
from sedd.runtime import cuda_graphs
from sedd.training import loop
from sedd.training.datasets import prepare_data
from sedd.training.dry_run import estimate_cost
from sedd.training.overrides import merge_config
from sedd.training.setup import ARCHITECTURES, build_model, build_network, build_setup

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class SmallRun:
    """A small network with dropout, batches and a loss; with CUDA graphs or without."""

    def __init__(
        self, graphs: bool, architecture: str = "reference", padded: bool = False, batch: int = 8, **options: Any
    ) -> None:
        setting = TrainSetting(recipe="tiny", batch=batch, vocab_size=500, **options)
        run = setting.run()
        run.model.architecture, run.model.dropout, run.model.depth = architecture, 0.1, 3
        self.parts, generator = build_setup(run, 500), torch.Generator().manual_seed(0)
        made = [random_batch(self.parts, setting, run.model.seq_len, generator) for _ in range(4)]
        self.batches = [NoisyBatch(*(a.cuda() for a in b)) for b in made]
        lengths = torch.arange(batch, device="cuda")[:, None] * 5 + 20
        self.valid = torch.arange(run.model.seq_len, device="cuda") < lengths if padded else None
        self.network: Transformer = build_network(run, self.parts).cuda()
        with torch.no_grad():
            for i, p in enumerate(self.network.parameters()):
                p.normal_(0, 0.1, generator=torch.Generator("cuda").manual_seed(i))
        if setting.precision == "float8":
            self.network.enable_fp8()
        if graphs:
            self.network.enable_cuda_graphs()
        self.model = build_model(run, self.network, self.parts)
        self.precision = setting.precision

    def loss(self, i: int) -> Tensor:
        x_t, x_0, t, weight = self.batches[i]
        with torch.autocast("cuda", torch.bfloat16, enabled=self.precision != "float32"):
            return fused_loss(self.parts.objective, self.model, x_t, x_0, t, weight, self.valid).total

    def gradient(self, *numbers: int) -> list[Tensor]:
        """Return losses and gradients summed over batches; gradients accumulate in ``weight.grad``."""
        torch.manual_seed(0)  # dropout
        losses = []
        for i in numbers:
            losses.append(self.loss(i))
            losses[-1].backward()
        result = [
            torch.stack(losses).detach(),
            *(p.grad.clone() for p in self.network.parameters() if p.grad is not None),
        ]
        self.network.zero_grad()
        return result


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    assert len(ours) == len(theirs) > 20
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("architecture", ["reference", "modern"])
@pytest.mark.parametrize(
    "options",
    [
        {"process": "uniform"},
        {"objective": "lambda-dce"},
        {"precision": "float8"},
        {"precision": "float32"},
    ],
)
def test_the_same_bits(architecture: str, padded: bool, options: dict[str, Any]) -> None:
    """Batch after batch, while the weights change and the number of masked positions differs; with dropout."""
    ours, theirs = SmallRun(True, architecture, padded, **options), SmallRun(False, architecture, padded, **options)
    for i in range(4):
        results = [run.gradient(i) for run in (ours, theirs)]
        assert results[0][0].isfinite().all()
        assert same(*results)
        assert ours.network.graphed_blocks is not None
        assert len(ours.network.graphed_blocks._graphs) == 1
        with torch.no_grad():
            for p in (*ours.network.parameters(), *theirs.network.parameters()):
                p *= 0.99


def test_gradients_accumulate() -> None:
    """Gradients of one pass lie in buffers that the next overwrites; those in ``weight.grad`` are copied first."""
    ours, theirs = SmallRun(True), SmallRun(False)
    assert same(ours.gradient(0, 1, 2), theirs.gradient(0, 1, 2))


def test_backward_of_an_overwritten_pass_is_an_error() -> None:
    run = SmallRun(True)
    first, second = run.loss(0), run.loss(1)
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):  # noticed in the last block
        torch.autograd.grad(first, list(run.network.blocks[-1].parameters()))
    second.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward must run once"):
        second.backward()


def test_evaluation_between_forward_and_backward() -> None:
    """An evaluation in another shape and without dropout runs without graphs and overwrites nothing."""
    ours, theirs = SmallRun(True), SmallRun(False)
    results = []
    for run in (ours, theirs):
        torch.manual_seed(0)
        total = run.loss(0)
        run.network.eval()
        output = run.network(run.batches[1].x_t[:3], torch.ones(3, device="cuda"))
        run.network.train()
        total.backward()
        results.append([output.detach(), *(p.grad for p in run.network.parameters() if p.grad is not None)])
    assert same(*results)
    assert ours.network.graphed_blocks is not None
    assert len(ours.network.graphed_blocks._graphs) == 1


def test_weights_in_new_memory_are_captured_again() -> None:
    ours, theirs = SmallRun(True), SmallRun(False)
    for run in (ours, theirs):
        run.gradient(0)
        for p in run.network.parameters():
            p.data = 1.1 * p.data
    assert same(ours.gradient(1), theirs.gradient(1))


def test_a_copy_has_its_own_graphs() -> None:
    """Of its own weights."""
    ours, theirs = SmallRun(True), SmallRun(False)
    ours.gradient(0)
    copied = copy.deepcopy(ours.network)
    with torch.no_grad():
        for p in (*ours.network.parameters(), *theirs.network.parameters()):
            p *= 1.1
        for p, q in zip(copied.parameters(), ours.network.parameters(), strict=True):
            p.copy_(q)
            q.zero_()
    ours.model.network = copied
    ours.network = copied
    assert same(ours.gradient(1), theirs.gradient(1))


def test_peak_memory_counts_graphs() -> None:
    """Activations inside a graph are not allocated by torch during a step, but the peak counts them."""
    allocated, peaks = [], []
    for graphs in (False, True):
        free_memory("cuda")
        run = SmallRun(graphs, batch=64)
        run.gradient(0)
        torch.cuda.reset_peak_memory_stats()
        run.gradient(1)
        allocated.append(torch.cuda.max_memory_allocated())
        peaks.append(cuda_graphs.peak_memory())
    assert allocated[1] < allocated[0] < peaks[1]


# Kinds of networks -----------------------------------------------------------------------------------------


def pair(architecture: str, **options: Any) -> tuple[Transformer, Transformer]:
    """Return two networks with the same weights, the first with CUDA graphs."""
    made = [ARCHITECTURES[architecture](states=30, width=32, depth=3, heads=2, **options).cuda() for _ in range(2)]
    for network in made:
        for i, p in enumerate(network.parameters()):
            torch.nn.init.normal_(p, 0, 0.2, generator=torch.Generator("cuda").manual_seed(i))
    made[0].enable_cuda_graphs()
    return made[0], made[1]


def backward(network: Transformer, size: int = 4, valid: Tensor | None = None) -> None:
    """Accumulate the gradient of a batch of that size."""
    torch.manual_seed(size)
    x = torch.randint(30, (size, 16), device="cuda")
    network(x, torch.rand(size, device="cuda"), valid).square().mean().backward()


def assert_same_gradients(ours: Transformer, theirs: Transformer) -> None:
    """Gradients are equal to the bit, the same ones are missing, and the first network used graphs."""
    assert ours.graphed_blocks is not None
    assert ours.graphed_blocks._graphs
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        assert a.grad is None or torch.equal(a.grad, b.grad), name


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("options", [{"causal": True}, {"time_conditioning": False, "causal": True}, {"dropout": 0.3}])
@pytest.mark.parametrize("architecture", ["reference", "modern"])
def test_kinds_of_networks(architecture: str, options: dict[str, Any], padded: bool) -> None:
    """Causal ones too, with padding or without."""
    made = pair(architecture, **options)
    valid = torch.arange(16, device="cuda") < torch.tensor([[5], [16], [9], [1]], device="cuda") if padded else None
    for network in made:
        backward(network, valid=valid)
        backward(network, valid=valid)
    assert_same_gradients(*made)


def test_in_float64() -> None:
    """With the PyTorch block operations."""
    made = [network.double() for network in pair("reference")]
    for network in made:
        backward(network)
        backward(network)
    assert_same_gradients(made[0], made[1])


def test_alternating_shapes() -> None:
    """Gradients of several shapes accumulate, also with more shapes than `MAX_GRAPHS`."""
    made = pair("modern")
    for network in made:
        for size in (4, 2, 4, 2, 1, 3, 5, 6, 4):
            backward(network, size)
    assert_same_gradients(*made)
    assert len(made[0].graphed_blocks._graphs) == cuda_graphs.MAX_GRAPHS  # type: ignore[union-attr]


def test_gradients_set_to_0_and_weights_frozen_for_some_steps() -> None:
    made = pair("reference")
    for network in made:
        network.blocks[0].requires_grad_(False)
        backward(network)
        network.blocks[0].requires_grad_(True)
        backward(network)
        network.zero_grad(set_to_none=False)
        backward(network)
        backward(network)
    assert_same_gradients(*made)


# Runs ------------------------------------------------------------------------------------------------------


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list with one entry per capture."""
    captured: list[int] = []
    capture = cuda_graphs._capture
    monkeypatch.setattr(cuda_graphs, "_capture", lambda *args: captured.append(1) or capture(*args))  # type: ignore[func-returns-value]
    return captured


def write_text(folder: Path) -> str:
    text = folder / "text.txt"
    text.write_text("\n".join(f"{i} times {i % 7} is {i * (i % 7)}" for i in range(3000)))
    return str(text)


def test_dry_run_memory(tmp_path: Path) -> None:
    """The predicted memory is what is reserved, or a little less: pools of graphs are counted, and once."""
    free_memory("cuda")
    config = merge_config({"sources": [write_text(tmp_path)], "steps": 30}, recipe="tiny")
    config.train.batch_size = 512
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved(), cuda_graphs.peak_memory()
    estimate = estimate_cost(config)
    reserved, held = torch.cuda.max_memory_reserved() - before[0], estimate["peak_memory_MiB"] * 2**20 - before[1]
    assert 0.6 * reserved < held < 1.02 * reserved


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_run_is_the_same_with_and_without_graphs(accumulation: int, tmp_path: Path, captures: list[int]) -> None:
    """From files to weights, while another thread prefetches batches."""
    text = write_text(tmp_path)
    results = []
    for graphs in (True, False):
        train = {"cuda_graphs": graphs, "grad_accumulation": accumulation, "precision": "bfloat16"}
        train |= {"deterministic": True, "log_every": 1, "eval_every": 10}
        options = {"sources": [text], "steps": 30, "train": train}
        losses: list[float] = []

        def on_event(kind: str, record: dict[str, Any], losses: list[float] = losses) -> None:
            if "loss" in record:
                losses.append(record["loss"])

        config = merge_config(options, recipe="tiny")
        config.model.dropout = 0.1
        result = loop.run(config, lambda config=config: prepare_data(config), tmp_path / str(graphs), False, on_event)
        results.append((losses, result.validation))
        assert captures == [1]
    assert len(results[0][0]) >= 30
    assert results[0] == results[1]
