"""One launch moves weights and average as clipping, torch's AdamW and `ema.update` do, one after the other."""

import copy
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sedd import checkpoint, data, ops, training
from sedd.config import BudgetConfig, DataConfig, ModelConfig, OptimConfig, RunConfig, TrainConfig
from sedd.ops import adamw_ema_triton
from sedd.tokenizer import Bytes
from sedd.training import optimizer
from sedd.training.ema import EMA

STEPS = 5
SHAPES = [(37, 29), (1, 1), (64, 3), (7,), (1,), (130,)]
"""Less than a part, parts and a rest, whole parts alone."""


class Net(nn.Module):
    """Weights of odd sizes, and a buffer; its gradients are given."""

    def __init__(self, device: str) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        made = [torch.randn(shape, generator=generator) for shape in SHAPES]
        self.weights = nn.ParameterList([nn.Parameter(w.to(device)) for w in made])
        self.register_buffer("table", torch.ones(3, device=device))

    def receive(self, step: int) -> None:
        generator = torch.Generator().manual_seed(1 + step)
        for w in self.weights:
            w.grad = (10.0**-step * torch.randn(w.shape, generator=generator)).to(w)


def config(clip: float) -> OptimConfig:
    return OptimConfig(lr=1e-2, weight_decay=0.3, beta1=0.8, beta2=0.97, grad_clip=clip, ema_decay=0.9)


def pair(way: type[optimizer.OptimizerStep], device: str, clip: float = 1.0) -> optimizer.OptimizerStep:
    network = Net(device)
    return way(network, EMA(network, copy.deepcopy(network), 0.9), config(clip))


def state(mover: optimizer.OptimizerStep) -> dict[str, Tensor]:
    """All that a step writes."""
    held = dict(mover.network.state_dict(prefix="network.")) | dict(mover.ema.network.state_dict(prefix="average."))
    moments = mover.optimizers[0].state_dict()["state"]
    return held | {f"{i}.{name}": value for i, kept in moments.items() for name, value in kept.items()}


def go(mover: optimizer.OptimizerStep, step: int, finite: bool = True) -> Tensor:
    """As the trainer does: the average follows if there was a step."""
    mover.network.receive(step)
    norm = mover.clip_grad_norm()
    optimizer.set_learning_rate(mover.optimizers, 1e-2 / (1 + step))
    mover.step(step, norm, torch.tensor(finite, device=norm.device))
    if finite:
        mover.update_ema(step)
    mover.zero_grad()
    return norm


def same(ours: optimizer.OptimizerStep, theirs: optimizer.OptimizerStep) -> None:
    got, want = state(ours), state(theirs)
    assert list(got) == list(want)
    for name, value in want.items():
        assert got[name].shape == value.shape
        assert got[name].dtype == value.dtype
        torch.testing.assert_close(
            got[name].cpu(), value.cpu(), rtol=1e-6, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw_ema_triton, "SIZE", 64)


@pytest.mark.parametrize("clip", [0.5, 1e9])
def test_the_movers_agree(clip: float, device: str) -> None:
    """With clipping, which is active in the first steps and not in the last, and without."""
    ours, theirs = pair(optimizer.FusedOptimizerStep, device, clip), pair(optimizer.TorchOptimizerStep, device, clip)
    norms = []
    for step in range(STEPS):
        norms.append(go(theirs, step))
        assert torch.equal(go(ours, step), norms[-1])
        same(ours, theirs)
    assert max(norms) > 0.5 > min(norms)


REFUSED = 2


def through_a_refusal(device: str) -> None:
    """A step that is none, of gradients that are no numbers, then more: nothing of it is written, nor is it counted."""
    ours, theirs = pair(optimizer.FusedOptimizerStep, device), pair(optimizer.TorchOptimizerStep, device)
    for step in range(STEPS):
        if step == REFUSED:
            before = {name: value.clone() for name, value in state(ours).items()}
            ours.network.receive(step)
            ours.network.weights[0].grad.fill_(torch.nan)
            ours.step(step, ours.clip_grad_norm(), torch.tensor(False, device=device))
            assert all(torch.equal(value, before[name]) for name, value in state(ours).items())
        else:
            go(ours, step)
            go(theirs, step)
        same(ours, theirs)


def test_a_refused_step_is_none(device: str) -> None:
    through_a_refusal(device)


@pytest.mark.parametrize("there", [optimizer.FusedOptimizerStep, optimizer.TorchOptimizerStep])
@pytest.mark.parametrize("here", [optimizer.FusedOptimizerStep, optimizer.TorchOptimizerStep])
def test_a_run_goes_on_from_what_it_saved(
    here: type[optimizer.OptimizerStep], there: type[optimizer.OptimizerStep], device: str
) -> None:
    """In the middle, with either mover before and after: state comes back in other tensors."""
    whole, first, second = pair(optimizer.TorchOptimizerStep, device), pair(here, device), pair(there, device)
    for step in range(2):
        go(whole, step)
        go(first, step)
    go(second, 4)  # it has been elsewhere
    for old, new in ((first.network, second.network), (first.ema.network, second.ema.network)):
        new.load_state_dict(old.state_dict())
    second.optimizers[0].load_state_dict(copy.deepcopy(first.optimizers[0].state_dict()))
    for step in range(2, STEPS):
        go(whole, step)
        go(second, step)
    same(second, whole)


def test_weights_without_a_gradient_stay_and_their_average_comes_nearer(device: str) -> None:
    """Torch leaves their moments and count alone; one of them comes a step later, another never."""
    ours, theirs = pair(optimizer.FusedOptimizerStep, device), pair(optimizer.TorchOptimizerStep, device)
    for step in range(3):
        for mover in (ours, theirs):
            weights = mover.network.weights
            weights[4].requires_grad_(False).fill_(3)
            mover.network.receive(step)
            weights[4].grad = None
            if step == 0:
                weights[2].grad = None
            mover.step(step, mover.clip_grad_norm(), torch.tensor(True, device=device))
            mover.update_ema(step)
        same(ours, theirs)
    assert ours.optimizers[0].state[ours.network.weights[2]]["step"] == 2


def test_gradients_may_lie_anywhere(device: str) -> None:
    """Not at a multiple of sixteen bytes, nor in order; they are read, and not written."""
    ours, theirs = pair(optimizer.FusedOptimizerStep, device), pair(optimizer.TorchOptimizerStep, device)
    for mover in (ours, theirs):
        mover.network.receive(0)
        wide, vector = mover.network.weights[0], mover.network.weights[5]
        if mover is ours:  # torch's own on a GPU refuses some
            wide.grad = wide.grad.T.contiguous().T
            vector.grad = torch.cat((vector.grad[:1], vector.grad))[1:]
        kept = wide.grad.clone(), vector.grad.clone()
        mover.step(0, mover.clip_grad_norm(), torch.tensor(True, device=device))
        mover.update_ema(0)
        if mover is ours:
            assert vector.grad.data_ptr() % 16
            assert torch.equal(wide.grad, kept[0])
            assert torch.equal(vector.grad, kept[1])
    same(ours, theirs)


def test_weights_may_not_lie_anywhere(device: str) -> None:
    ours = pair(optimizer.FusedOptimizerStep, device)
    ours.network.weights[3].data = torch.zeros(8, device=device)[1:]
    with pytest.raises(ValueError, match="16 bytes"):
        go(ours, 0)


def test_autograd_knows_that_weights_moved(device: str) -> None:
    """A product that is differentiated after a step through weights from before it is an error, as with torch's own."""
    ours = pair(optimizer.FusedOptimizerStep, device)
    x = torch.ones(29, 1, device=device, requires_grad=True)
    said = (ours.network.weights[0] @ x).sum()
    go(ours, 0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        said.backward()


def test_what_was_not_averaged_is_copied(device: str) -> None:
    ours = pair(optimizer.FusedOptimizerStep, device)
    ours.network.table.fill_(2)
    go(ours, 0)
    assert (ours.ema.network.table == 2).all()


@pytest.mark.parametrize("before", [optimizer.FusedOptimizerStep, optimizer.TorchOptimizerStep])
def test_a_run_in_files_goes_on(
    before: type[optimizer.OptimizerStep], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saved by either mover, resumed by the swift one: the same names and kinds in the files, the same numbers.

    Without their moments or their count weights would be off by a hundred times the tolerance.
    """
    monkeypatch.setattr(adamw_ema_triton, "SIZE", 4096)
    (tmp_path / "a.txt").write_text("".join(f"{i:08d}\n" for i in range(60)), encoding="utf-8")
    data.prepare([tmp_path / "a.txt"], tmp_path / "shards", Bytes())
    loop = TrainConfig(batch_size=4, eval_sequences=4, eval_every=0, save_every=2, precision="float32")
    model = ModelConfig("modern", width=16, depth=1, heads=2, seq_len=8, dropout=0.1)

    def run(out: str, way: type[optimizer.OptimizerStep], steps: int, resume: bool = False) -> dict[str, Tensor]:
        monkeypatch.setattr(optimizer, "build_optimizer_step", way)
        config = RunConfig(data=DataConfig(), model=model, budget=BudgetConfig(steps=steps), train=loop)
        config.optim.lr_schedule, config.optim.warmup_steps, config.optim.lr = "constant", 0, 1e-3
        training.run(config.resolved(), lambda: tmp_path / "shards", tmp_path / out, resume, lambda kind, record: None)
        saved = tmp_path / out / "checkpoints" / f"step-{steps:08d}"
        stems = ("model", "ema", "optimizer")
        return {f"{stem}/{name}": t for stem in stems for name, t in checkpoint.load_tensors(saved, stem).items()}

    whole = run("whole", optimizer.TorchOptimizerStep, 4)
    run("parts", before, 2)
    parts = run("parts", optimizer.FusedOptimizerStep, 4, resume=True)
    assert {name: (t.shape, t.dtype) for name, t in parts.items()} == {n: (t.shape, t.dtype) for n, t in whole.items()}
    assert all(t == 4 for name, t in parts.items() if name.endswith("|step"))
    for name, t in whole.items():
        torch.testing.assert_close(parts[name], t, rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


# Wrong ones ------------------------------------------------------------------------------------------------

WRONG: dict[str, tuple[str, str]] = {
    "vectors decay": ("torch.tensor([d for _, d in kinds]", "torch.tensor([0.3 for _, d in kinds]"),
    "average of the old weights": ("    p -= lost", "    old = p\n    p -= lost"),
    "a refused step counts": ("_foreach_add_(counts, [finite.float()] * len(counts))", "_foreach_add_(counts, 1)"),
    "a refused step is made": ("if well:", "if count > 0:"),
    "clipping is ignored": ("g *= scale", "g *= 1.0"),
    "decay of moved weights": ("    p -= lost * p\n", ""),
    "no correction of squares": ("tl.div_rn(tl.sqrt_rn(v), root)", "tl.sqrt_rn(v)"),
    "no correction of means": ("tl.load(rates + tensor)", "rate"),
    "rests are left out": ("range(0, n, size)", "range(0, n - size + 1, size)"),
    "decay before its rate": ("rate * tl.load(decays", "tl.load(decays"),
}


@pytest.fixture
def mutate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """The module with a line of it changed, in place of the true one."""

    def put(name: str) -> None:
        text, (old, new) = Path(str(adamw_ema_triton.__file__)).read_text(encoding="utf-8"), WRONG[name]
        assert text.count(old) == 1
        text = text.replace(old, new)
        if name == "average of the old weights":
            text = text.replace("share * (p - average)", "share * (old - average)")
        if name == "decay of moved weights":
            text = text.replace("    tl.store(values, p", "    p -= lost * p\n    tl.store(values, p")
        (tmp_path / "wrong.py").write_text(text, encoding="utf-8")
        monkeypatch.setattr(ops, "moves", _module(tmp_path / "wrong.py"))
        monkeypatch.setattr(ops.moves, "SIZE", 64)

    return put


def _module(path: Path) -> ModuleType:
    spec: Any = importlib.util.spec_from_file_location("wrong", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", WRONG)
def test_wrong_ones_are_noticed(name: str, device: str, mutate: Callable[[str], None]) -> None:
    mutate(name)
    with pytest.raises(AssertionError):
        through_a_refusal(device)


# Who is asked ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_definition_moves_what_is_not_on_a_card(name: str, a_card: Callable[[tuple[int, int]], None]) -> None:
    network = nn.Linear(3, 4)
    a_card((9, 0))
    step = optimizer.build_optimizer_step(network, EMA(network, copy.deepcopy(network), 0.9), OptimConfig(name=name))
    assert type(step) is optimizer.TorchOptimizerStep


def test_the_plain_mover_is_what_it_says(device: str) -> None:
    """Torch's own clipping and AdamW, and the average, written out."""
    ours, network, average = pair(optimizer.TorchOptimizerStep, device, 0.5), Net(device), Net(device)
    groups = [
        {"params": [w for w in network.weights if (w.ndim > 1) is m], "weight_decay": 0.3 * m} for m in (True, False)
    ]
    adam = torch.optim.AdamW(groups, betas=(0.8, 0.97), fused=False)
    for step in range(STEPS):
        go(ours, step)
        network.receive(step)
        nn.utils.clip_grad_norm_(network.parameters(), 0.5)
        optimizer.set_learning_rate([adam], 1e-2 / (1 + step))
        adam.step()
        decay = min(0.9, (1 + step) / (10 + step))
        for mean, weight in zip(average.parameters(), network.parameters(), strict=True):
            mean.data.lerp_(weight.data, 1 - decay)
    for mine, other in ((ours.network, network), (ours.ema.network, average)):
        torch.testing.assert_close(list(mine.parameters()), list(other.parameters()), rtol=1e-6, atol=1e-7)
