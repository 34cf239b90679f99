"""On a GPU: blocks that are replayed learn, to the bit, what blocks that are told launch by launch do."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sedd import bench, build, record, training
from sedd.fused import Fused
from sedd.transformer import Transformer

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
        run.model.style, run.model.dropout, run.model.depth = style, 0.1, 3
        self.parts, generator = build.parts(run, 500), torch.Generator().manual_seed(0)
        made = [bench.batch(self.parts, setting, run.model.length, generator) for _ in range(4)]
        self.batches = [bench.Batch(*(a.cuda() for a in b)) for b in made]
        ends = torch.arange(batch, device="cuda")[:, None] * 5 + 20
        self.valid = torch.arange(run.model.length, device="cuda") < ends if padded else None
        self.network: Transformer = build.run_network(run, self.parts).cuda()
        with torch.no_grad():
            for i, p in enumerate(self.network.parameters()):
                p.normal_(0, 0.1, generator=torch.Generator("cuda").manual_seed(i))
        if setting.precision == "float8":
            self.network.narrow()
        if recorded:
            self.network.record()
            assert self.network.recorded is not None
        self.fused = Fused(self.parts.objective, build.run_model(run, self.network, self.parts))
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
    with pytest.raises(RuntimeError, match=r"has been modified by an inplace operation|goes back once"):
        first.backward()
    second.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="goes back once"):
        second.backward()


def test_an_evaluation_in_between_is_not_replayed() -> None:
    """Without dropout, in another shape, between the ways of a step: nothing of it is recorded or spoilt."""
    ours, theirs = Lesson(True), Lesson(False)
    found = []
    for lesson in (ours, theirs):
        torch.manual_seed(0)
        total = lesson.loss(0)
        with torch.no_grad():
            lesson.network.eval()
            said = lesson.network(lesson.batches[1].x_t[:3], torch.ones(3, device="cuda"))
            lesson.network.train()
        total.backward()
        found.append([said, *(p.grad for p in lesson.network.parameters() if p.grad is not None)])
    assert same(*found)


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
        bench.forget("cuda")
        lesson = Lesson(recorded, batch=64)
        lesson.gradient(0)
        torch.cuda.reset_peak_memory_stats()
        lesson.gradient(1)
        counted.append(torch.cuda.max_memory_allocated())
        peaks.append(record.peak())
    assert counted[1] < counted[0] < peaks[1]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_run_is_the_same_run(accumulate: int, tmp_path: Path) -> None:
    """From files to weights, while batches are fetched by another thread."""
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"{i} times {i % 7} is {i * (i % 7)}" for i in range(3000)))
    ends = []
    for recorded in (True, False):
        loop = {"record": recorded, "accumulate": accumulate, "precision": "bfloat16", "deterministic": True}
        words = {"sources": [str(text)], "steps": 30, "loop": {**loop, "log_every": 1, "eval_every": 10}}
        losses: list[float] = []

        def hear(kind: str, said: dict[str, Any], losses: list[float] = losses) -> None:
            if "loss" in said:
                losses.append(said["loss"])

        config = training.configured(words, recipe="tiny")
        config.model.dropout = 0.1
        end = training.run(
            config, lambda config=config: training.prepared(config), tmp_path / str(recorded), False, hear
        )
        ends.append((losses, end.bound))
    assert len(ends[0][0]) >= 30
    assert ends[0] == ends[1]
