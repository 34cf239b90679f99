"""Networks of the user's own: only what the user named is imported, and mistakes are sentences."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sedd
from sedd.loading import convert_precision
from sedd.training import checkpoint, networks
from sedd.training.config import RunConfig
from sedd.training.overrides import merge_config
from sedd.training.setup import build_network, build_setup

MODULE = '''
from pathlib import Path

import torch
from torch import nn

Path(__file__).with_suffix(".imported").touch()


class MyNet(nn.Module):
    """A row sees itself by a mean: of all tokens or, if causal, of those so far."""

    def __init__(self, num_states, width=16, length=None, labels=0, causal=False):
        super().__init__()
        self.causal, self.embed, self.out = causal, nn.Embedding(num_states, width), nn.Linear(width, num_states)
        self.position = nn.Parameter(0.1 * torch.randn(length, width))
        self.hidden, self.label = nn.Linear(width, width), nn.Embedding(labels + 1, width) if labels else None

    def forward(self, x, sigma, valid=None, label=None):
        h = self.embed(x) + self.position[: x.shape[1]] + sigma.log1p()[:, None, None]
        if self.label is not None:
            none = x.new_full((len(x),), self.label.num_embeddings - 1)
            h = h + self.label(none if label is None else label)[:, None]
        seen = torch.ones_like(x, dtype=torch.bool) if valid is None else valid
        weight = seen[..., None].to(h.dtype)
        sums, counts = (h * weight).cumsum(1), weight.cumsum(1)
        if not self.causal:
            sums, counts = sums[:, -1:], counts[:, -1:]
        return self.out(torch.relu(self.hidden(h + sums / counts.clamp_min(1))))


class Timeless(nn.Module):
    def __init__(self, num_states):
        super().__init__()
        self.embed, self.out = nn.Embedding(num_states, 8), nn.Linear(8, num_states)

    def forward(self, x):
        return self.out(torch.relu(self.embed(x) + self.embed(x).mean(1, keepdim=True)))


class Narrow(Timeless):
    def forward(self, x):
        return super().forward(x)[..., :-1]


class Flat(Timeless):
    def forward(self, x):
        return super().forward(x).mean(1)


class Picky(nn.Module):
    def __init__(self, num_states, width):
        super().__init__()


class Stateless(nn.Module):
    def __init__(self):
        super().__init__()


def function(num_states):
    return None


class NoModule:
    pass
'''


@pytest.fixture(autouse=True)
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a module of networks; nothing is allowed, imported or recorded yet."""
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "mynets.py").write_text(MODULE)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    monkeypatch.setattr(sys, "path", sys.path[:])
    forget(monkeypatch)
    return folder


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be another process: nothing is allowed or imported."""
    monkeypatch.setattr(networks, "_allowed", {})
    for name in [name for name in sys.modules if name.startswith(("mynets", "hostile"))]:
        monkeypatch.delitem(sys.modules, name)


def was_imported(module: Path) -> bool:
    return module.with_suffix(".imported").exists()


# Names and classes -----------------------------------------------------------------------------------------


def test_a_named_class_is_found_in_the_working_directory_and_built(code: Path) -> None:
    section = networks.named("mynets:MyNet") | {"width": 8}
    network = networks.build(section, 5, 12, 0)
    assert type(network).__name__ == "MyNet"
    assert network.embed.weight.shape == (5, 8)
    assert network.position.shape == (12, 8)
    assert network.label is None
    assert networks.build(section, 5, 12, 3).label.weight.shape == (4, 8)
    assert sys.path[-1] == str(code)  # searched last: it replaces no installed module


def test_a_class_is_its_own_name() -> None:
    class Local(nn.Module):
        pass

    name = networks.allow(Local)
    assert networks.import_class({"class": name}) is Local


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("MyNet", ["network is 'MyNet'", "my_package:MyNet"]),
        ("mynets:", ["my_package:MyNet"]),
        ("../mynets:MyNet", ["my_package:MyNet"]),
        ("nowhere.at_all:MyNet", ["no module nowhere", "install it"]),
        ("mynets:Other", ["module mynets has no Other"]),
        ("mynets:function", ["<function", "subclass of torch.nn.Module"]),
        ("mynets:NoModule", ["NoModule", "subclass of torch.nn.Module"]),
        ("os:system", ["subclass of torch.nn.Module"]),
        ("broken:MyNet", ["broken:MyNet cannot be imported", "ZeroDivisionError"]),
        ("missing:MyNet", ["missing:MyNet cannot be imported", "no_such_package"]),
    ],
)
def test_names_that_lead_nowhere(name: str, words: list[str], code: Path, refuses: Callable[..., object]) -> None:
    (code / "broken.py").write_text("1 / 0")
    (code / "missing.py").write_text("import no_such_package")
    refuses(lambda: networks.import_class(networks.named(name)), *words)


@pytest.mark.parametrize(
    ("section", "labels", "words"),
    [
        ({"class": "mynets:MyNet", "depth": 3}, 0, ["mynets:MyNet(num_states, width=16", "argument 'depth'"]),
        ({"class": "mynets:Picky"}, 0, ["argument: 'width'", "--set network.width="]),
        ({"class": "mynets:Stateless"}, 0, ["number of states first"]),
        ({"class": "mynets:Timeless"}, 2, ["labels", "mynets:Timeless"]),
    ],
)
def test_constructors_that_do_not_fit(
    section: dict[str, Any], labels: int, words: list[str], refuses: Callable[..., object]
) -> None:
    refuses(lambda: networks.build(networks.named(section), 5, 12, labels), *words)


# What is imported ------------------------------------------------------------------------------------------


def test_nothing_is_imported_that_was_not_named(code: Path, refuses: Callable[..., object]) -> None:
    networks.allow("mynets:Timeless")
    refuses(
        lambda: networks.import_class({"class": "mynets:MyNet"}),
        "mynets:MyNet",
        "--network mynets:MyNet",
        "network=MyNet",
    )
    assert not was_imported(code / "mynets.py")


def test_a_run_of_ones_own_is_found_again(
    code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuses: Callable[..., object]
) -> None:
    """In its folder, with the same class and options, from anywhere; a copy of the folder is someone else's."""
    run, section = tmp_path / "run", networks.named("mynets:MyNet") | {"width": 8}
    networks.remember(run, section)
    for folder, claimed, is_own in (
        (run, section, True),
        (tmp_path / "link", section, True),
        (run, section | {"width": 9}, False),
        (run, section | {"class": "mynets:Timeless"}, False),
        (tmp_path / "copy", section, False),
    ):
        forget(monkeypatch)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(code)])
        (tmp_path / "link").unlink(missing_ok=True)
        (tmp_path / "link").symlink_to(run)
        networks.allow_own(folder, claimed)
        if is_own:
            assert networks.import_class(claimed).__name__ == "MyNet"
        else:
            refuses(lambda claimed=claimed: networks.import_class(claimed), "--network")


def test_a_record_that_cannot_be_written_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))
    networks.remember(tmp_path / "run", networks.named("mynets:MyNet"))
    assert "--network mynets:MyNet" in capsys.readouterr().err


# Runs ------------------------------------------------------------------------------------------------------

TINY: dict[str, Any] = {
    "tokenizer": "chars",
    "steps": 3,
    "model": {"seq_len": 16},
    "train": {"batch_size": 4, "eval_sequences": 4, "eval_every": 3},
    "on_event": lambda *_: None,
}


def text(folder: Path) -> Path:
    path = folder / "text.txt"
    path.write_text("the cat sat on\na mat\nand saw\ntwo birds\n" * 60)
    return path


def train(folder: Path, network: Any = "mynets:MyNet", **options: Any) -> sedd.Model:
    merged = {**TINY, **options}
    for section in ("model", "train"):
        merged[section] = {**TINY[section], **options.get(section, {})}
    return sedd.train(text(folder), out=folder / "run", network=network, **merged)


SAMPLERS = ("first-hitting", "ancestral", "tweedie", "euler", "theta", "remask", "confidence", "entropy", "ordered")
CAUSAL = {"class": "mynets:MyNet", "causal": True}


OF_MASKS: tuple[tuple[str, dict[str, Any]], ...] = (("t-dce", {}), ("lambda-dce", {}), ("any-order", {}))
OF_BOTH: tuple[tuple[str, dict[str, Any]], ...] = (
    ("score-entropy", {}),
    ("score-entropy", {"model": {"parameterization": "mean"}}),
    ("concrete-score", {"model": {"parameterization": "signed-score"}}),
    ("mean", {}),
    ("d3pm", {}),
    ("autoregressive", {"network": CAUSAL}),
)


@pytest.mark.parametrize(
    ("process", "objective", "options"),
    [*(("absorbing", *one) for one in (*OF_BOTH, *OF_MASKS)), *(("uniform", *one) for one in OF_BOTH)],
)
def test_every_objective(process: str, objective: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = train(tmp_path, objective=objective, process=process, **options)
    assert type(model.loaded.network).__name__ == "MyNet"
    assert len(model.sample(2, seed=1)) == 2
    (bound,) = model.bound("the cat", draws=4)
    assert 0 < bound.nats < 100


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_sampler(sampler: str, timeless: sedd.Model) -> None:
    steps = None if sampler in ("entropy", "ordered") else 8
    one, same = (timeless.sample(3, steps=steps, sampler=sampler, seed=2) for _ in range(2))
    assert [text.ids for text in one] == [text.ids for text in same]


@pytest.fixture
def timeless(tmp_path: Path) -> sedd.Model:
    return train(tmp_path, "mynets:Timeless", objective="lambda-dce")


def test_without_sigma_hidden_states_are_cached(timeless: sedd.Model) -> None:
    """Rows that have not changed are not computed again, with the same texts."""
    assert not timeless.loaded.model.depends_on_sigma
    texts = timeless.sample(2, steps=64, sampler="tweedie", seed=3)
    assert texts.stats.row_calls < 64 * 2


def test_the_weights_are_the_classs_own_and_seeded(tmp_path: Path) -> None:
    """A checkpoint is the state dict of the class, and initial weights are a function of the seed."""
    model = train(tmp_path, {"class": "mynets:MyNet", "width": 24})
    weights = checkpoint.load_tensors(model.loaded.folder, "ema")
    assert {name: value.shape for name, value in weights.items()} == {
        name: value.shape for name, value in model.loaded.network.state_dict().items()
    }
    assert weights["embed.weight"].shape[1] == 24
    config = model.loaded.config
    setup = build_setup(config, model.loaded.process.vocab_size)
    torch.manual_seed(5)
    one = build_network(config, setup)
    state = torch.random.get_rng_state()
    torch.manual_seed(5)
    assert torch.equal(state, torch.random.get_rng_state())  # the global generator is as it was
    torch.manual_seed(6)
    two = build_network(config, setup)
    assert torch.equal(one.embed.weight, two.embed.weight)


def test_templates_of_different_lengths(timeless: sedd.Model) -> None:
    """A network without the padding computes each length by itself, so a text does not depend on the others."""
    short, long = "a{4}b", "the {6} on"
    both = timeless.infill([short, long], seed=4)
    assert both[0].ids[:6] == timeless.infill(short, seed=4)[0].ids[:6]
    assert len(both[1].ids) > len(both[0].ids)


def test_labels_and_guidance(tmp_path: Path) -> None:
    rows = "".join(f"{word},{kind}\n" for kind, word in (("a", "the cat"), ("b", "two birds")) * 60)
    table = tmp_path / "table.csv"
    table.write_text("text,kind\n" + rows)
    model = sedd.train(table, out=tmp_path / "run", network="mynets:MyNet", **{**TINY, "label": "kind", "model": {}})
    assert model.labels == ("a", "b")
    one, other = (model.sample(2, label=label, guidance=3.0, seed=1) for label in ("a", "b"))
    assert [t.ids for t in one] != [t.ids for t in other]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"objective": "ratio-matching"}, ["ratio-matching", "own transformer"]),
        ({"train": {"precision": "float8"}}, ["float8", "own transformer"]),
        ({"compile": True}, ["train.compile", "own transformer"]),
        ({"train": {"activation_checkpointing": "full"}}, ["activation_checkpointing", "own transformer"]),
        ({"model": {"width": 32}}, ["model.width", "--set network.width"]),
        ({"network": {"width": 3}}, ["--network my_package:MyNet"]),
        ({"network": "mynets:Narrow"}, ["entries per position"]),
        ({"network": "mynets:Flat"}, ["Flat returned shape", "outputs"]),
        ({"network": "mynets:Timeless", "data": {"packing": "lines", "pad": "ignore"}}, ["padding", "valid"]),
    ],
)
def test_what_a_network_cannot_do_is_a_sentence(
    options: dict[str, Any], words: list[str], tmp_path: Path, refuses: Callable[..., object]
) -> None:
    refuses(lambda: train(tmp_path, **{"network": "mynets:MyNet", **options}), *words)


def test_padding_that_is_ignored(tmp_path: Path) -> None:
    model = train(tmp_path, data={"packing": "lines", "pad": "ignore"})
    assert len(model.sample(1, length=12, seed=1)[0].ids) <= 12
    assert model.evaluate(draws=2)["nats_per_token"] > 0


def test_bfloat16_is_autocast(tmp_path: Path) -> None:
    """In training, and in inference: weights stay in float32, and the results are close."""
    model = train(tmp_path, train={"precision": "bfloat16"})
    low = convert_precision(model.loaded, "bfloat16")
    assert (model.loaded.precision, low.precision) == ("float32", "bfloat16")
    x, sigma = torch.zeros(2, 5).long(), torch.ones(2)
    one, other = model.loaded.model(x, sigma), low.model(x, sigma)
    assert not torch.equal(one, other)
    torch.testing.assert_close(one, other, rtol=0.05, atol=0.05)
    again = convert_precision(low, "float32").model(x, sigma)
    assert torch.equal(one, again)
    assert all(p.dtype == torch.float32 for p in low.network.parameters())


def test_without_a_recipe_the_batch_fits_the_network(tmp_path: Path) -> None:
    """Length, batch, tokenizer, learning rate and budget are chosen; the network's options stay as they were given."""
    path, lines = text(tmp_path), []
    config = merge_config(
        {"sources": [str(path)], "network": "mynets:MyNet"},
        sets=["network.width=24"],
        on_sizing=lines.append,
        device="cpu",
    )
    assert config.network == {"class": "mynets:MyNet", "width": 24}
    assert (config.optim.name, config.model.seq_len, config.budget.minutes) == ("adamw", 64, 5.0)
    assert config.train.batch_size * 64 >= 1024
    assert "mynets:MyNet, width 24" in lines[-1]


def test_options_keep_their_types() -> None:
    """No schema states them, so a number on the command line is a number, and what JSON cannot store is rejected."""
    sets = ["width=24", "rate=1e-3", "gated=True", "kind=gelu", "sizes=[1, 2]", "bias=null"]
    config = merge_config({"network": "mynets:MyNet"}, sets=[f"network.{text}" for text in sets])
    expected = {"width": 24, "rate": 0.001, "gated": True, "kind": "gelu", "sizes": [1, 2], "bias": None}
    assert config.network == {"class": "mynets:MyNet", **expected}
    assert RunConfig.from_dict(json.loads(json.dumps(config.as_dict()))) == config


def test_options_that_no_file_can_hold_are_rejected(refuses: Callable[..., object]) -> None:
    section = {"class": "mynets:MyNet", "activation": nn.GELU}
    refuses(lambda: merge_config({"network": section}), "network.activation", "GELU", "a list or a mapping")


# Folders of others -----------------------------------------------------------------------------------------


def claim(folder: Path, **changes: Any) -> None:
    """Change the configuration of a model folder as its author could; hashes agree."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.update(changes)
    path.write_text(json.dumps(config))
    (folder / "manifest.json").unlink(missing_ok=True)


@pytest.fixture
def downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model folder that someone else has made, with code in it; in this process nothing was named."""
    model = train(tmp_path)
    model.save(tmp_path / "saved")
    folder = tmp_path / "downloaded"
    shutil.copytree(tmp_path / "saved", folder)
    (folder / "hostile.py").write_text(MODULE)
    (tmp_path / "code" / "mynets.imported").unlink()
    forget(monkeypatch)
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize("name", ["hostile:MyNet", "os:system", "mynets:MyNet", "hostile", ["hostile:MyNet"], {}])
def test_a_downloaded_folder_imports_nothing(name: Any, downloaded: Path, refuses: Callable[..., object]) -> None:
    claim(downloaded, network={"class": name})
    modules = set(sys.modules)
    refuses(lambda: sedd.load(downloaded))
    refuses(lambda: merge_config({}, file=downloaded / "config.json"))
    refuses(lambda: merge_config({}, resume=downloaded))
    assert not {"hostile", "mynets"} & (set(sys.modules) - modules)
    assert not was_imported(downloaded / "hostile.py")


def test_a_downloaded_folder_is_loaded_with_the_class_that_is_given(downloaded: Path) -> None:
    sys.path.append(str(downloaded.parent / "code"))
    import mynets  # type: ignore[import-not-found]

    model = sedd.load(downloaded, network=mynets.MyNet)
    assert model.loaded.config.network == {"class": "mynets:MyNet"}
    renamed = type("Renamed", (mynets.MyNet,), {"__module__": "elsewhere"})
    other = sedd.load(downloaded, network=renamed)
    assert type(other.loaded.network) is renamed
    assert [t.ids for t in model.sample(2, seed=1)] == [t.ids for t in other.sample(2, seed=1)]
    saved = other.save(downloaded.parent / "again")
    assert json.loads((saved / "config.json").read_text())["network"] == {"class": "elsewhere:Renamed"}


def test_a_saved_model_is_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = train(tmp_path).sample(2, seed=1)
    sedd.load(tmp_path / "run").save(tmp_path / "saved")
    forget(monkeypatch)
    monkeypatch.chdir(tmp_path)
    assert [t.ids for t in sedd.load(tmp_path / "saved").sample(2, seed=1)] == [t.ids for t in texts]


def test_a_network_for_a_model_without_one(refuses: Callable[..., object]) -> None:
    refuses(lambda: sedd.load("stories", network="mynets:MyNet"), "own transformer", "leave network out")


def test_a_settings_file_of_ones_own_names_a_network(tmp_path: Path) -> None:
    """Under any name but config.json, which sedd writes: that is a folder's, and may be someone else's."""
    (tmp_path / "mine.yaml").write_text("network:\n  class: mynets:MyNet\n  width: 12\n")
    config = merge_config({}, file=tmp_path / "mine.yaml")
    assert config.network == {"class": "mynets:MyNet", "width": 12}


def test_old_configurations_have_no_network() -> None:
    stored = RunConfig().as_dict()
    del stored["network"]
    assert RunConfig.from_dict(stored) == RunConfig()
