"""Published checkpoints: everything wrong with one is reported in a sentence before anything is written."""

import json
import random
import zipfile
from collections.abc import Callable
from pathlib import Path

import publications
import pytest
import torch
from publications import KINDS, Kind
from safetensors.torch import save_file

from sedd.hub import convert

Refuses = Callable[..., None]
SEDD, UNIFORM, RADD, MDLM = KINDS


@pytest.mark.parametrize("form", ["safetensors shards", "pickle shards"])
@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "./part", "sub/part", "C:\\part", 7])
def test_an_index_with_paths_outside_is_refused(refuses: Refuses, tmp_path: Path, form: str, name: object) -> None:
    source = publications.folder(tmp_path / "source", SEDD, form)
    (path,) = source.glob("*.index.json")
    suffix = ".safetensors" if form.startswith("safe") else ".bin"
    index = json.loads(path.read_text())
    first = next(iter(index["weight_map"]))
    index["weight_map"][first] = f"{name}{suffix}" if isinstance(name, str) else name
    path.write_text(json.dumps(index))
    refuses(lambda: convert.read_published(source), "files beside it and nothing else")


@pytest.mark.parametrize("form", ["safetensors", "pickle", "old pickle", "safetensors shards"])
@pytest.mark.parametrize("fraction", [0.0, 0.01, 0.5, 0.999])
def test_truncated_files_are_refused(refuses: Refuses, tmp_path: Path, form: str, fraction: float) -> None:
    source = publications.folder(tmp_path / "source", SEDD, form)
    path = max(source.iterdir(), key=lambda file: file.stat().st_size)
    content = path.read_bytes()
    path.write_bytes(content[: int(fraction * len(content))])
    refuses(lambda: convert.read_published(source), path.name)


HEAD = "output_layer.linear.weight"


@pytest.mark.parametrize(
    ("changes", "sentences"),
    [
        ({HEAD: lambda w: w.long()}, [HEAD, "int64", "float32, bfloat16 or float16"]),
        ({HEAD: lambda w: w.bool()}, [HEAD, "bool"]),
        ({HEAD: lambda w: w.double()}, [HEAD, "float64"]),
        ({HEAD: lambda w: w.to(torch.complex64)}, [HEAD, "complex64"]),
        ({HEAD: lambda w: w.to(torch.float8_e4m3fn)}, [HEAD, "float8_e4m3fn"]),
        ({HEAD: lambda w: w.index_fill(0, torch.tensor(3), torch.nan)}, [HEAD, "NaN or infinite"]),
        ({HEAD: lambda w: w.index_fill(0, torch.tensor(3), torch.inf)}, [HEAD, "NaN or infinite"]),
        ({HEAD: lambda w: w[1:]}, [HEAD, "(11, 32)", "(12, 32)"]),
        ({HEAD: lambda w: w.flatten()}, [HEAD, "(384,)"]),
        ({HEAD: None}, [f"lacks {HEAD}"]),
        (
            {"blocks.1.norm1.weight": None, "blocks.0.norm1.weight": None},
            ["lacks blocks.0.norm1.weight, blocks.1.norm"],
        ),
        ({"more": lambda _: torch.zeros(3)}, ["has unknown more"]),
        ({"noise.sigma": lambda _: torch.zeros(3)}, ["has unknown noise.sigma"]),
        ({HEAD: None, "more": lambda _: torch.zeros(3)}, [f"lacks {HEAD}", "unknown more"]),
        ({"blocks.2.norm1.weight": lambda _: torch.zeros(32)}, ["has unknown blocks.2.norm1.weight"]),
        ({"vocab_embed.embedding": None}, ["lacks vocab_embed.embedding"]),
        ({"vocab_embed.embedding": lambda w: w[:-1]}, ["11 tokens", "11 rows"]),
        ({"rotary_emb.inv_freq": lambda w: w / 2}, ["other rotary positions"]),
        ({"rotary_emb.inv_freq": lambda w: w[:-1]}, ["not half the width of a head"]),
        ({"sigma_map.mlp.0.bias": lambda w: w[:-1]}, ["cond_dim is 128", "127"]),
    ],
)
def test_wrong_weights_are_refused(
    refuses: Refuses, tmp_path: Path, changes: dict[str, Callable[..., torch.Tensor]], sentences: list[str]
) -> None:
    source = publications.folder(tmp_path / "source", SEDD)
    weights = publications.weights(SEDD)
    for name, change in changes.items():
        if change is None:
            del weights[name]
        else:
            weights[name] = change(weights.get(name)).contiguous()
    save_file(weights, source / "model.safetensors")
    refuses(lambda: convert.read_published(source), *sentences)


@pytest.mark.parametrize(
    ("kind", "changes", "sentences"),
    [
        (SEDD, {"tokens": 12}, ["12 tokens", "12 rows"]),
        (SEDD, {"tokens": "many"}, ["tokens is 'many'", "int"]),
        (SEDD, {"tokens": True}, ["tokens is True"]),
        (SEDD, {"graph": {"type": "gauss"}}, ["graph.type is 'gauss'", "absorb, uniform"]),
        (SEDD, {"graph": None}, ["has no graph.type"]),
        (SEDD, {"noise": {"type": "cosine"}}, ["noise.type is 'cosine'", "loglinear, geometric"]),
        (SEDD, {"noise": {"type": "geometric", "sigma_min": 9, "sigma_max": 2}}, ["lo is 9.0 and hi is 2.0"]),
        (SEDD, {"noise": {"type": "geometric", "sigma_min": "small"}}, ["sigma_min is 'small'", "float"]),
        (SEDD, {"model": {"n_heads": 2}}, ["n_heads", "2", "4"]),
        (SEDD, {"model": {"hidden_size": 64}}, ["hidden_size", "64", "32"]),
        (SEDD, {"model": {"n_blocks": 3}}, ["lacks blocks.2.adaLN_modulation.bias"]),
        (SEDD, {"model": {"n_blocks": 1}}, ["has unknown blocks.1.adaLN_modulation.bias"]),
        (SEDD, {"model": {"n_blocks": 10**9}}, ["n_blocks", "1000000000"]),
        (SEDD, {"model": {"length": 0}}, ["model.seq_len is 0"]),
        (SEDD, {"model": {"dropout": 2}}, ["dropout is 2.0"]),
        (SEDD, {"model": {"scale_by_sigma": False}}, ["scale_by_sigma is False"]),
        (UNIFORM, {"model": {"scale_by_sigma": True}}, ["scale_by_sigma is True"]),
        (RADD, {"graph": {"type": "uniform"}}, ["graph.type is 'uniform'", "absorb"]),
        (RADD, {"training": {"loss_type": "mse"}}, ["loss_type is 'mse'"]),
        (MDLM, {"time_conditioning": "no"}, ["time_conditioning is 'no'", "bool"]),
        (MDLM, {"parameterization": "d3pm"}, ["parameterization is 'd3pm'", "subs"]),
        (MDLM, {"vocab_size": 50258}, ["50257 tokens", "12 rows"]),
    ],
)
def test_wrong_configurations_are_refused(
    refuses: Refuses, tmp_path: Path, kind: Kind, changes: dict[str, object], sentences: list[str]
) -> None:
    source = publications.folder(tmp_path / "source", kind)
    config = publications.config(kind)
    for name, value in changes.items():
        config[name] = {**config[name], **value} if name == "model" else value
    (source / "config.json").write_text(json.dumps(config))
    refuses(lambda: convert.read_published(source), *sentences)


@pytest.mark.parametrize(
    ("noise", "options"),
    [
        ({"type": "geometric"}, {"lo": 1e-4, "hi": 20.0}),
        ({"type": "geometric", "sigma_min": 1e-3, "sigma_max": 15}, {"lo": 1e-3, "hi": 15.0}),
        ({"type": "loglinear"}, {"eps": 1e-3}),
        ({}, {"eps": 1e-3}),
    ],
    ids=str,
)
def test_noise_that_a_configuration_leaves_out_is_that_of_the_published_code(
    tmp_path: Path, noise: dict[str, object], options: dict[str, float]
) -> None:
    """In the repository of Lou et al. 2024, configs/config.yaml states σ_min and σ_max, and noise_lib.py ε."""
    source = publications.folder(tmp_path / "source", UNIFORM)
    path = source / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"noise": noise}))
    assert convert.read_published(source).config.noise.options == options


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff\xfe", b"[" * 10**5, b'{"tokens": NaN, "graph": {}}'])
def test_malformed_configurations_are_refused(refuses: Refuses, tmp_path: Path, content: bytes) -> None:
    source = publications.folder(tmp_path / "source", SEDD)
    (source / "config.json").write_bytes(content)
    refuses(lambda: convert.read_published(source), "config")


def test_wrong_ema_weights_are_refused(refuses: Refuses, tmp_path: Path) -> None:
    state = publications.weights(MDLM)
    shadows = [value for name, value in state.items() if "inv_freq" not in name]
    swapped = [shadows[1], shadows[0], *shadows[2:]]
    for ema, sentence in (
        ({"shadow_params": shadows[:-1]}, f"{len(shadows) - 1} EMA weights"),
        ({"shadow_params": swapped}, "has shape"),
        ({"shadow_params": [*shadows[:-1], "no tensor"]}, "not a tensor"),
        ([], "no list of EMA weights"),
    ):
        torch.save({"state_dict": state, "ema": ema}, tmp_path / "last.ckpt")
        refuses(lambda: convert.read_published(tmp_path / "last.ckpt"), sentence)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({}, "not weights by their names"),
        ([1, 2], "not weights by their names"),
        ({7: torch.zeros(2)}, "has the key 7"),
        ({"layer.weight": torch.zeros(2)}, "no layout of sedd, radd, mdlm"),
        ({**publications.weights(MDLM), "head.weight": torch.zeros(2)}, "has unknown head.weight beside names"),
        ({**publications.weights(SEDD), HEAD: "text"}, "not a tensor"),
        ({**publications.weights(SEDD), HEAD: torch.zeros(12, 32).to_sparse()}, "sparse"),
        ({**publications.weights(SEDD), HEAD: torch.zeros(12, 32, device="meta")}, "meta"),
        ({**publications.weights(SEDD), HEAD: torch.zeros(1, 1).expand(10**6, 10**6)}, "(1000000, 1000000)"),
    ],
)
def test_other_contents_are_refused(refuses: Refuses, tmp_path: Path, content: object, sentence: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(publications.config(SEDD)))
    torch.save(content, tmp_path / "pytorch_model.bin")
    refuses(lambda: convert.read_published(tmp_path), sentence)


def test_torchscript_is_refused(refuses: Refuses, tmp_path: Path) -> None:
    """A TorchScript archive holds code; the restricted loader refuses it."""
    path = tmp_path / "model.pt"
    torch.save(publications.weights(SEDD), path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("model/constants.pkl", b"\x80\x02]q\x00.")
    refuses(lambda: convert.read_published(path), "model.pt cannot be read as weights")


@pytest.mark.parametrize("form", ["safetensors", "pickle", "old pickle"])
def test_a_changed_byte_is_reported_or_changes_a_weight_only(tmp_path: Path, form: str) -> None:
    """For any changed byte, the file is refused with a ValueError, or only the value of a weight differs."""
    source = publications.folder(tmp_path / "source", SEDD, form)
    path = max(source.iterdir(), key=lambda file: file.stat().st_size)
    content, rng = path.read_bytes(), random.Random(0)
    places = [rng.randrange(3000) for _ in range(60)] + [len(content) - rng.randrange(1, 3000) for _ in range(60)]
    refused = 0
    for place in places:
        path.write_bytes(content[:place] + bytes([content[place] ^ rng.randrange(1, 256)]) + content[place + 1 :])
        try:
            found = convert.read_published(source)
        except ValueError:
            refused += 1
        else:
            shapes = {name: value.shape for name, value in publications.weights(SEDD).items()}
            assert {name: value.shape for name, value in found.weights["ema"].items()} == shapes
    assert refused > 30


def test_environment_variables_of_torch_do_not_lift_the_restriction(
    tmp_path: Path, refuses: Refuses, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Payload:
        def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
            return Path.touch, (tmp_path / "mark",)

    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    torch.save({"more": Payload()}, tmp_path / "pytorch_model.bin")
    refuses(lambda: convert.read_published(tmp_path), "which is code and not weights")
    assert not (tmp_path / "mark").exists()
