"""`sedd.Diffusion`: any network, under every process and parameterization, trains, samples, infills and bounds."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sedd
from sedd import Diffusion, exact
from sedd.parameterization import MeanModel

ROOT = Path(__file__).parents[2]
TOKENS, LENGTH = 3, 3
PROCESSES = {"absorbing": sedd.Absorbing(TOKENS), "uniform": sedd.Uniform(TOKENS), "hybrid": sedd.Hybrid(TOKENS, 0.3)}


class MyNet(nn.Module):
    """A perceptron on whole sequences: it can represent every distribution."""

    def __init__(self, states: int, length: int = LENGTH, width: int = 64) -> None:
        super().__init__()
        self.states = states
        layers = [nn.Linear(length * states + 2, width), nn.GELU(), nn.Linear(width, width), nn.GELU()]
        self.layers = nn.Sequential(*layers, nn.Linear(width, length * states))

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        one_hot = nn.functional.one_hot(x, self.states).flatten(1)
        level = torch.stack([sigma.log1p(), (-sigma).exp()], -1)
        return self.layers(torch.cat([one_hot, level], -1)).view(*x.shape, self.states)


class TimeFree(nn.Module):
    """A network of tokens alone, with labels and padding."""

    def __init__(self, states: int, labels: int = 0) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(states, 8), nn.Linear(8, states)
        self.label = nn.Embedding(labels + 1, 8)

    def forward(self, x: Tensor, valid: Tensor | None = None, label: Tensor | None = None) -> Tensor:
        h = self.embed(x)
        weight = torch.ones_like(x) if valid is None else valid.long()
        h = h + (h * weight[..., None]).sum(1, keepdim=True) / weight.sum(1)[:, None, None]
        return self.head(h if label is None else h + self.label(label)[:, None])


def readme_block() -> str:
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)[0]


@pytest.mark.parametrize("process", ["sedd.Absorbing(3)", "sedd.Uniform(3)", "sedd.Hybrid(3, 0.3)"])
def test_the_block_of_the_readme_learns_a_distribution(process: str) -> None:
    """Its program, on 27 sequences and with a larger learning rate: the bound ends within 0.1 nats of the entropy."""
    distribution = exact.Distribution.random(TOKENS, LENGTH, torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    states = eval(process, {"sedd": sedd}).num_states
    code = readme_block().replace("sedd.Absorbing(26)", process).replace("MyNet(27)", f"MyNet({states})")
    code = code.replace("length=64", f"length={LENGTH}").replace("3e-4", "1e-2")
    names: dict[str, Any] = {
        "MyNet": MyNet,
        "batches": (distribution.draw(256, generator) for _ in range(300)),
        "tokens": torch.tensor([[-1, 1, -1]]),
    }
    exec(compile(code, "README.md", "exec"), names)
    assert names["samples"].shape == (16, LENGTH)
    assert names["filled"][0, 1] == 1
    assert ((names["filled"] >= 0) & (names["filled"] < TOKENS)).all()
    assert names["bound"].nats.shape == names["bound"].stderr.shape == (256,)
    every = names["diffusion"].bound(distribution.sequences, draws=256)
    bound = float((distribution.probabilities * every.nats).sum())
    error = float((distribution.probabilities * every.stderr).square().sum().sqrt())
    assert bound > distribution.entropy() - 4 * error
    assert bound < distribution.entropy() + 0.1


@pytest.mark.parametrize("parameterization", ["score", "mean", "conditional"])
@pytest.mark.parametrize("process", PROCESSES.values(), ids=PROCESSES)
def test_every_parameterization_trains_samples_and_bounds(process: sedd.Process, parameterization: str) -> None:
    diffusion = Diffusion(MyNet(process.num_states), process, length=LENGTH, parameterization=parameterization)
    x = torch.randint(TOKENS, (5, LENGTH))
    diffusion.loss(x).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in diffusion.parameters())
    for options in ({}, {"steps": 4}, {"temperature": 0.5, "top_k": 2}):
        samples = diffusion.sample(3, seed=1, **options)
        assert samples.dtype == torch.long
        assert ((samples >= 0) & (samples < TOKENS)).all()
        assert not samples.requires_grad
    bound = diffusion.bound(x, draws=4)
    assert bound.nats.shape == bound.stderr.shape == (5,)
    assert not bound.nats.requires_grad


MASKS = [sedd.FirstHitting(), sedd.Ancestral(), sedd.Remask(), sedd.Ordered(), sedd.Confident(), sedd.EntropyBounded()]
ANY = [sedd.Tweedie(), sedd.Euler(), sedd.Theta(theta=0.3)]


@pytest.mark.parametrize("sampler", [*MASKS, *ANY], ids=lambda sampler: type(sampler).__name__)
def test_every_sampler_fills_open_positions_and_keeps_the_others(sampler: sedd.Sampler) -> None:
    diffusion = Diffusion(MyNet(4), PROCESSES["absorbing"])
    tokens = torch.tensor([[-1, 2, -1], [0, -1, 1]])
    filled = diffusion.infill(tokens, seed=0, sampler=sampler, steps=6)
    assert torch.equal(filled[tokens >= 0], tokens[tokens >= 0])
    assert ((filled >= 0) & (filled < TOKENS)).all()


def test_a_sample_depends_on_its_seed_and_row_alone() -> None:
    diffusion = Diffusion(MyNet(4), PROCESSES["absorbing"], length=LENGTH)
    many, few = diffusion.sample(8, seed=5), diffusion.sample(3, seed=5)
    assert torch.equal(many[:3], few)
    assert not torch.equal(many, diffusion.sample(8, seed=6))


def test_torch_decides_the_seed_that_is_not_given() -> None:
    diffusion = Diffusion(MyNet(4), PROCESSES["absorbing"], length=LENGTH)
    torch.manual_seed(7)
    first, second = diffusion.sample(8), diffusion.sample(8)
    torch.manual_seed(7)
    assert torch.equal(first, diffusion.sample(8))
    assert not torch.equal(first, second)


def test_the_loss_is_a_function_of_the_generator() -> None:
    diffusion, x = Diffusion(MyNet(4), PROCESSES["absorbing"]), torch.randint(TOKENS, (4, LENGTH))
    losses = [diffusion.loss(x, generator=torch.Generator().manual_seed(seed)).item() for seed in (1, 1, 2)]
    assert losses[0] == losses[1] != losses[2]


def test_the_trajectory_goes_from_noise_to_the_sample() -> None:
    diffusion = Diffusion(MyNet(4), PROCESSES["absorbing"], length=LENGTH)
    states = list(diffusion.trajectory(torch.full((2, LENGTH), -1), seed=3))
    assert (states[0].x == TOKENS).all()
    assert torch.equal(states[-1].x, diffusion.sample(2, seed=3))


def test_labels_and_guidance_reach_the_network() -> None:
    """With a network that copies its label, guided samples are that label."""

    class Copy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(30.0))

        def forward(self, x: Tensor, label: Tensor | None = None) -> Tensor:
            logits = torch.zeros(*x.shape, TOKENS + 1)
            if label is None:
                return logits * self.scale
            return self.scale * nn.functional.one_hot(label, TOKENS + 1)[:, None].expand_as(logits)

    diffusion = Diffusion(Copy(), PROCESSES["absorbing"], length=LENGTH)
    assert (diffusion.sample(4, seed=0, label=1) == 1).all()
    assert (diffusion.sample(4, seed=0, label=torch.tensor([0, 1, 2, 1])) == torch.tensor([[0], [1], [2], [1]])).all()
    assert (diffusion.sample(4, seed=0, label=2, guidance=2.0) == 2).all()
    x = torch.ones(1, LENGTH, dtype=torch.long)
    assert diffusion.bound(x, draws=4, label=1).nats < 0.1 < diffusion.bound(x, draws=4).nats


def test_padding_does_not_count() -> None:
    diffusion = Diffusion(TimeFree(4), PROCESSES["absorbing"])
    x, valid = torch.randint(TOKENS, (6, LENGTH)), torch.tensor([[True, True, False]]).expand(6, -1)
    other = torch.where(valid, x, (x + 1) % TOKENS)
    losses = [diffusion.loss(a, valid=valid, generator=torch.Generator().manual_seed(0)) for a in (x, other)]
    assert losses[0] == losses[1]
    model, generator = diffusion.model.bind(valid=valid), torch.Generator().manual_seed(0)
    each = diffusion.objective(model, torch.where(valid, x, 0), generator=generator)
    assert losses[0] == each[valid].mean() != each.mean()
    bounds = [diffusion.bound(a, draws=8, valid=valid).nats for a in (x, other)]
    assert torch.equal(*bounds)
    padded, short = diffusion.bound(x, draws=512, valid=valid), diffusion.bound(x[:, :2], draws=512)
    assert ((padded.nats - short.nats).abs() < 5 * (padded.stderr**2 + short.stderr**2).sqrt()).all()


def test_an_encoder_of_transformers_is_a_network() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=4, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    diffusion = Diffusion(transformers.BertForMaskedLM(config).eval(), PROCESSES["absorbing"], length=LENGTH)
    x = torch.randint(TOKENS, (4, LENGTH))
    diffusion.loss(x).backward()
    assert diffusion.sample(2, seed=0).shape == (2, LENGTH)
    assert (diffusion.bound(x, draws=4).nats > 0).all()


def test_a_parameterized_network_and_a_bundled_model_are_the_same_class() -> None:
    model = MeanModel(MyNet(4), PROCESSES["absorbing"])
    assert torch.equal(
        Diffusion.of(model, length=LENGTH).sample(4, seed=1),
        sedd.FirstHitting().sample(model, 4, LENGTH, seed=1, steps=None),
    )
    molecules = sedd.load("molecules")
    assert isinstance(molecules.diffusion, Diffusion)
    texts = molecules.sample(2, steps=4, seed=3)
    ids = molecules.diffusion.sample(2, steps=4, seed=3)
    assert [list(text.ids) for text in texts] == ids.tolist()


def test_state_and_device_are_those_of_a_module(tmp_path: Path) -> None:
    first, second = (Diffusion(MyNet(4), PROCESSES["absorbing"], length=LENGTH) for _ in range(2))
    second.load_state_dict(first.state_dict())
    assert torch.equal(first.sample(4, seed=0), second.sample(4, seed=0))
    assert first.device == torch.device("cpu")
    assert {name for name, _ in first.named_parameters()}


def two_layers(states: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Embedding(states, 8), nn.Linear(8, outputs))


GOOD = Diffusion(MyNet(4), PROCESSES["absorbing"], length=LENGTH)
X = torch.zeros(2, LENGTH, dtype=torch.long)
MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    "class of a network": (lambda: Diffusion(MyNet, PROCESSES["absorbing"]), "instance"),
    "class of a process": (lambda: Diffusion(MyNet(4), sedd.Uniform), "process is"),
    "too few outputs": (lambda: Diffusion(two_layers(4, 3), sedd.Absorbing(3)).loss(X), "3 entries.*4"),
    "no row for the mask": (lambda: Diffusion(two_layers(3, 4), sedd.Absorbing(3)).loss(X), "every state.*mask"),
    "schedule that is a number": (lambda: Diffusion(MyNet(4), sedd.Absorbing(3), 0.1), "schedule is 0.1"),
    "class of an objective": (lambda: Diffusion(MyNet(4), sedd.Absorbing(3), objective=sedd.LambdaDCE), r"LambdaDCE"),
    "unknown parameterization": (lambda: Diffusion(MyNet(4), sedd.Absorbing(3), parameterization="x0"), "'x0'.*mean"),
    "no length": (lambda: Diffusion(MyNet(4), sedd.Absorbing(3)).sample(2), "length=64"),
    "floats": (lambda: GOOD.loss(X.float()), "float32.*int64"),
    "one sequence": (lambda: GOOD.loss(X[0]), r"\(3,\).*\(sequences, length\)"),
    "mask in clean data": (lambda: GOOD.loss(X + 3), "3.*0..2"),
    "open position in clean data": (lambda: GOOD.bound(X - 1), "-1"),
    "token out of range": (lambda: GOOD.infill(X + 7), "7.*0..2.*−1"),
    "class of a sampler": (lambda: GOOD.sample(1, sampler=sedd.Tweedie), r"Tweedie\(\)"),
    "sampler of other noise": (lambda: GOOD.sample(1, sampler=sedd.Gibbs()), "remask"),
    "guidance without a label": (lambda: GOOD.sample(1, guidance=2.0), "label"),
    "label without an argument": (lambda: GOOD.sample(1, label=1), "label"),
    "padding that would count": (
        lambda: Diffusion(TimeFree(4), sedd.Absorbing(3), objective=sedd.AnyOrder()).loss(X, valid=X == 0),
        "AnyOrder.*LambdaDCE",
    ),
    "no samples": (lambda: GOOD.sample(0), "count is 0"),
    "negative seed": (lambda: GOOD.sample(1, seed=-1), "seed is -1"),
    "text as a seed": (lambda: GOOD.sample(1, seed="a"), "seed is 'a'"),
    "no steps": (lambda: GOOD.sample(1, steps=0), "steps is 0"),
    "half a step": (lambda: GOOD.sample(1, steps=4.5), r"steps is 4.5.*\[1, 0.7, 0.3, 0\]"),
    "network for an objective": (lambda: sedd.LambdaDCE()(MyNet(4), X), r"LambdaDCE.*ScoreModel\(network, process\)"),
    "network as a model": (lambda: sedd.Tweedie().sample(MyNet(4), 1, 3), "MyNet is not a model"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence_that_says_what_to_pass(mistake: str) -> None:
    do, words = MISTAKES[mistake]
    with pytest.raises((ValueError, TypeError), match=words) as raised:
        do()
    assert "\n" not in str(raised.value)
