"""Published checkpoints give the log-scores of their original formulas."""

import json
from pathlib import Path

import publications
import pytest
import torch
from publications import DEPTH, HEADS, KINDS, WIDTH, Kind, V
from safetensors.torch import load_file
from torch import Tensor

from sedd.hub import convert
from sedd.hub.convert.layout import LAYOUTS, WeightSizes
from sedd.loading import load_model
from sedd.tokenizer import Bytes, Integers
from sedd.training import checkpoint
from sedd.training.config import DataConfig, ModelConfig, NoiseConfig, RunConfig
from sedd.training.setup import build_network, build_setup

FORMS = ["safetensors", "pickle", "old pickle", "safetensors shards", "pickle shards"]
kinds = pytest.mark.parametrize("kind", KINDS, ids="-".join)


def imported(tmp_path: Path, kind: Kind, form: str = "safetensors") -> Path:
    found = convert.read_published(publications.folder(tmp_path / "published", kind, form))
    return convert.save_model_folder(found, None, tmp_path / "model", "published")


def states(kind: Kind) -> tuple[Tensor, Tensor]:
    """Noisy rows, and noise from nearly none to all."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randint(kind.states, (6, 9), generator=generator)
    x[:, ::2] = kind.states - 1  # masks, where there is one
    return x, torch.tensor([1e-3, 0.05, 0.4, 1.0, 3.0, 6.9])


def error(kind: Kind, model: torch.nn.Module, mutant: str = "") -> float:
    """How far the log-scores of a model are from those of the description; at masks, where only those exist."""
    x, sigma = states(kind)
    found, true = model(x, sigma), publications.log_score(kind, publications.weights(kind), x, sigma, mutant)
    if kind.layout == "sedd":
        return float((found - true).abs().max())
    return float((found[..., :V] - true)[x == V].abs().max())


@kinds
def test_log_scores_are_those_of_the_description(tmp_path: Path, kind: Kind) -> None:
    """Within 1e-4 in float32. Log-scores go to ±10, so a wrong formula is far off: see the mutants."""
    assert error(kind, load_model(imported(tmp_path, kind)).model) < 1e-4


@pytest.mark.parametrize("mutant", ["scale first", "sin first", "interleaved", "no ln(D−1)", "conditioned on σ"])
@kinds
def test_wrong_formulas_are_caught(tmp_path: Path, kind: Kind, mutant: str) -> None:
    """Every mistake that the layout allows is a hundred times what is tolerated; one it does not is none."""
    silent = {
        "sedd": {"conditioned on σ"} | ({"no ln(D−1)"} if kind.graph == "uniform" else set()),
        "radd": {"scale first", "sin first", "no ln(D−1)", "conditioned on σ"},
        "mdlm": {"no ln(D−1)"},
    }[kind.layout]
    off = error(kind, load_model(imported(tmp_path, kind)).model, mutant)
    assert off < 1e-4 if mutant in silent else off > 1e-2


@pytest.mark.parametrize("form", FORMS)
@kinds
def test_export_undoes_import(tmp_path: Path, kind: Kind, form: str) -> None:
    """To the bit, in whichever file the weights came, with all of the configuration."""
    layout = convert.export_model(imported(tmp_path, kind, form), tmp_path / "back")
    assert layout.name == kind.layout
    back, first = load_file(tmp_path / "back" / "model.safetensors"), publications.weights(kind)
    assert back.keys() == first.keys()
    for name, value in first.items():
        assert torch.equal(back[name], value), name
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == publications.config(kind)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_stays_as_it_is(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = publications.folder(tmp_path / "published", KINDS[0])
    half = {name: value.to(dtype) for name, value in publications.weights(KINDS[0]).items()}
    checkpoint.write_tensors(folder / "model.safetensors", half)
    model = convert.save_model_folder(convert.read_published(folder), None, tmp_path / "model", "published")
    convert.export_model(model, tmp_path / "back", "sedd")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert all(back[name].dtype == dtype and torch.equal(back[name], value) for name, value in half.items())
    assert load_model(model).network.head.weight.dtype == torch.float32


RUNS = {
    "sedd": RunConfig(objective="score-entropy"),
    "sedd uniform": RunConfig(noise=NoiseConfig("uniform", "geometric", {"lo": 1e-3, "hi": 9.0})),
    "radd": RunConfig(objective="lambda-dce"),
    "radd in time": RunConfig(objective="t-dce", model=ModelConfig(time_conditioning="none")),
    "mdlm": RunConfig(objective="t-dce", model=ModelConfig(time_conditioning="zero")),
    "mdlm with sigma": RunConfig(objective="t-dce"),
    "sedd eps": RunConfig(noise=NoiseConfig("absorbing", "log-linear", {"eps": 0.01})),
}


@pytest.mark.parametrize("name", RUNS)
def test_import_undoes_export(tmp_path: Path, name: str) -> None:
    """A model of ours, written in a published layout and read again, is the same model with the same tokenizer."""
    run = RunConfig.from_dict(RUNS[name].as_dict())
    run.model = ModelConfig(
        "reference",
        WIDTH,
        DEPTH,
        HEADS,
        cond_dim=16,
        seq_len=24,
        dropout=0.05,
        time_conditioning=run.model.time_conditioning,
    )
    run = run.resolved()
    run.data = DataConfig(tokenizer="bytes")
    made = build_setup(run, 256)
    network = build_network(run, made)
    with torch.no_grad():
        for i, parameter in enumerate(network.parameters()):
            parameter.normal_(generator=torch.Generator().manual_seed(i))
    records = {"config": {**run.as_dict(), "vocab_size": 256}, "state": {}}
    first = checkpoint.save(tmp_path, "first", {"ema": network.state_dict()}, records, Bytes().files())
    layout = convert.export_model(first, tmp_path / "out")
    assert layout.name == name.split()[0]
    found = convert.read_published(tmp_path / "out")
    again = load_model(convert.save_model_folder(found, Bytes(), tmp_path / "again", "out"))
    for key, value in network.state_dict().items():
        assert torch.equal(again.network.state_dict()[key], value), key
    same = ModelConfig(**{**vars(run.model), "time_conditioning": again.config.model.time_conditioning})
    assert (again.config.model, again.config.time_conditioning, again.config.objective) == (
        same,
        run.time_conditioning,
        run.objective,
    )
    assert (again.schedule, again.process.num_states) == (made.schedule, made.process.num_states)
    x = torch.randint(256, (2, 7), generator=torch.Generator().manual_seed(0))
    sigma = torch.tensor([0.2, 2.0])
    assert torch.equal(again.model(x, sigma), load_model(first).model(x, sigma))


@pytest.mark.parametrize(
    ("kind", "h", "depth", "heads", "parameters", "entries"),
    [
        (Kind("sedd"), 768, 12, 12, 169_627_218, 131),
        (Kind("sedd"), 1024, 24, 16, 424_477_010, 251),
        (Kind("sedd", "uniform"), 768, 12, 12, 169_625_681, 131),
        (Kind("radd"), 768, 12, 12, 162_265_682, 126),
        (Kind("radd"), 1024, 24, 16, 405_191_762, 246),
        (Kind("mdlm"), 768, 12, 12, 169_627_218, 131),
    ],
)
def test_published_sizes(kind: Kind, h: int, depth: int, heads: int, parameters: int, entries: int) -> None:
    """What a published configuration implies: the names and shapes of the description, and the listed counts."""
    tokens, half = 50257, h // heads // 2
    states = tokens + (kind.graph == "absorb")
    wanted = publications.table(kind, states, h, depth, half=half)
    config = publications.config(kind)
    config |= {"tokens": tokens} if kind.layout != "mdlm" else {"vocab_size": states, "hidden_dim": h}
    config |= {"n_blocks": depth, "n_heads": heads} if kind.layout == "mdlm" else {}
    if kind.layout != "mdlm":
        config["model"] |= {"hidden_size": h, "n_blocks": depth, "n_heads": heads}
    cond = None if kind.layout == "radd" else 128
    run, vocab_size = LAYOUTS[kind.layout].parse_config(config, WeightSizes(states, h, depth, heads, cond))
    with torch.device("meta"):
        network = build_network(run, build_setup(run, vocab_size))
    shapes = {name: tuple(value.shape) for name, value in network.state_dict().items()}
    assert shapes == wanted
    assert len(shapes) == entries
    count = sum(torch.Size(shape).numel() for name, shape in shapes.items() if name != "rotary_emb.inv_freq")
    assert count == parameters
    assert vocab_size == tokens


def test_configurations_are_read_from_files(tmp_path: Path) -> None:
    """Noise, objective, time conditioning, length and dropout, all of them from the files."""
    found = {
        "-".join(kind): convert.read_published(publications.folder(tmp_path / kind.layout / kind.graph, kind))
        for kind in KINDS
    }
    settings = {
        name: (
            f.config.noise.process,
            str(build_setup(f.config, V).schedule),
            f.config.objective,
            f.config.time_conditioning,
        )
        for name, f in found.items()
    }
    assert settings == {
        "sedd-absorb": ("absorbing", "LogLinear(eps=0.001)", "score-entropy", "sigma"),
        "sedd-uniform": ("uniform", "Geometric(lo=0.001, hi=15.0)", "score-entropy", "sigma"),
        "radd-absorb": ("absorbing", "LogLinear(eps=0.001)", "t-dce", "none"),
        "mdlm-absorb": ("absorbing", "LogLinear(eps=0.001)", "t-dce", "zero"),
    }
    assert {(f.config.model.seq_len, f.config.model.dropout, f.vocab_size) for f in found.values()} == {(24, 0.1, V)}


# Lightning -------------------------------------------------------------------------------------------------


def lightning(path: Path, average: object, **more: object) -> Path:
    state = publications.weights(KINDS[3]) | {"noise.sigma_max": torch.tensor(20.0)}
    torch.save({"state_dict": state, "ema": average, "epoch": 3, "callbacks": {}, **more}, path)
    return path


def test_the_averages_of_a_lightning_checkpoint_are_used(tmp_path: Path) -> None:
    """They are a list without names; both sets are kept, and the averaged one is the model."""
    averages = publications.weights(KINDS[3], seed=5)
    shadows = [value for name, value in averages.items() if "inv_freq" not in name]
    path = lightning(tmp_path / "last.ckpt", {"decay": 0.9999, "num_updates": 7, "shadow_params": shadows})
    for source in (path, tmp_path):
        found = convert.read_published(source)
        model = convert.save_model_folder(found, None, tmp_path / f"from-{source.name}", "last.ckpt")
        for stem, expected in (("ema", averages), ("model", publications.weights(KINDS[3]))):
            stored = load_model(model, stem).network.state_dict()
            assert all(torch.equal(stored[name.removeprefix("backbone.")], v) for name, v in expected.items())
    assert found.config.model.seq_len == 1024
    assert load_model(model).tokenizer == Integers(size=V)


def test_a_lightning_checkpoint_without_averages_is_itself(tmp_path: Path) -> None:
    settings = {"config": {"time_conditioning": True, "model": {"length": 33, "n_heads": HEADS}}}
    found = convert.read_published(lightning(tmp_path / "last.ckpt", None, hyper_parameters=settings))
    assert list(found.weights) == ["ema"]
    assert (found.config.time_conditioning, found.config.model.seq_len, found.original) == ("sigma", 33, None)
    model = load_model(convert.save_model_folder(found, None, tmp_path / "model", "last.ckpt")).model
    assert error(KINDS[3], model, "conditioned on σ") < 1e-4
    assert error(KINDS[3], model) > 1e-2
