"""Int8 weights: the error of every entry is at most half the scale of its row, and a mutant's is not."""

import math
from collections.abc import Callable
from pathlib import Path

import boxed
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sedd import evaluation, hub
from sedd.loading import load_model
from sedd.runtime.distributed import Ranks
from sedd.training import checkpoint
from sedd.training.checkpoint import quantize_int8

Refuses = Callable[..., None]
Quantized = tuple[Tensor, Tensor]
Quantize = Callable[[Tensor], Quantized]


def matrix(seed: int, rows: int, columns: int) -> Tensor:
    """Rows of very different sizes, one of them of zeros."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-30, 5, rows).unsqueeze(-1) * (torch.arange(rows) != rows // 2).unsqueeze(-1)
    return torch.randn(rows, columns, generator=generator) * sizes


def is_within_half_a_scale(weight: Tensor, quantize: Quantize) -> bool:
    """|w − s·q| ≤ s/2 in every entry, where s is no more than a 127th of the largest entry of the row."""
    values, scale = quantize(weight)
    w, s = weight.double(), scale.double()
    largest = w.abs().amax(-1, keepdim=True)
    near = (w - s * values.double()).abs() <= s / 2 * (1 + 1e-9)
    small = (s <= largest / 127 * (1 + 1e-6)) | (largest == 0)
    return bool(near.all() and small.all())


@given(seed=st.integers(0, 1000), rows=st.integers(1, 6), columns=st.integers(1, 9))
def test_the_error_is_at_most_half_a_scale(seed: int, rows: int, columns: int) -> None:
    weight = matrix(seed, rows, columns)
    assert is_within_half_a_scale(weight, quantize_int8)
    values, scale = quantize_int8(weight)
    assert torch.equal(quantize_int8(values.float() * scale)[0], values)
    assert values.abs().max() <= 127


def truncate(weight: Tensor) -> Quantized:
    scale = quantize_int8(weight)[1]
    return (weight / scale).trunc().to(torch.int8), scale


def scale_of_columns(weight: Tensor) -> Quantized:
    values, scale = quantize_int8(weight.t())
    return values.t(), scale[: len(weight)]


def scale_of_all(weight: Tensor) -> Quantized:
    scale = (weight.abs().max() / 127).expand(len(weight), 1)
    return (weight / scale).round().to(torch.int8), scale


def by_128(weight: Tensor) -> Quantized:
    scale = quantize_int8(weight)[1] * 127 / 128
    return (weight / scale).round().clamp(-128, 127).to(torch.int8), scale


@pytest.mark.parametrize("mutant", [truncate, scale_of_columns, scale_of_all, by_128])
def test_mutants_break_it(mutant: Quantize) -> None:
    assert not is_within_half_a_scale(matrix(0, 8, 8), mutant)


def test_each_dtype_is_stored_and_loaded(tmp_path: Path) -> None:
    """int8 keeps all but matrices exactly; parameters are counted without scales; a small folder stays small."""
    folder = boxed.write_model(tmp_path / "model")
    weights = checkpoint.load_weights(folder, "ema")[0]
    for dtype, size in (("int8", 0.35), ("bfloat16", 0.6), ("float32", 1.0)):
        out = hub.save_pretrained(folder, tmp_path / dtype, dtype=dtype)
        assert checkpoint.corruption(out) is None
        header, before = checkpoint.read_header(out), checkpoint.read_header(folder)
        assert (header.parameters, header.dtype) == (before.parameters, dtype)
        assert header.bytes <= size * before.bytes
        loaded = load_model(out)
        assert all(p.dtype == torch.float32 for p in loaded.network.parameters())
        for name, value in checkpoint.load_weights(out, "ema")[0].items():
            if dtype == "float32" or (dtype == "int8" and value.ndim != 2):
                assert torch.equal(value, weights[name]), name
            else:
                assert torch.allclose(value.float(), weights[name], atol=float(weights[name].abs().max()) / 200), name
        again = hub.save_pretrained(out, tmp_path / f"{dtype}-again")
        assert (again / "ema.safetensors").read_bytes() == (out / "ema.safetensors").read_bytes()
    assert f"stored in int8: {(tmp_path / 'int8/ema.safetensors').stat().st_size / 1e6:.2f} MB" in (
        (tmp_path / "int8/README.md").read_text()
    )


def test_what_cannot_be_stored_or_read_is_refused(tmp_path: Path, refuses: Refuses) -> None:
    folder = boxed.write_model(tmp_path / "model")
    refuses(lambda: hub.save_pretrained(folder, tmp_path / "x", dtype="int4"), "'int4'", "int8, bfloat16, float32")
    refuses(lambda: checkpoint.pack_weights({"w": torch.tensor([float("nan")])}, "int8"), "w is not finite")
    out = hub.save_pretrained(folder, tmp_path / "small", dtype="int8")
    tensors = checkpoint.load_tensors(out, "ema")
    scales = [name for name in tensors if name.endswith("_scale")]
    for changed in ({}, {scales[0]: tensors[scales[0]][:-1]}):
        others = {name: value for name, value in tensors.items() if name != scales[0]}
        checkpoint.write_tensors(tmp_path / "damaged" / "ema.safetensors", others | changed)
        refuses(lambda: checkpoint.load_weights(tmp_path / "damaged", "ema"), scales[0][:-6], "one per row")


def test_the_cost_of_a_dtype_is_measured_on_common_random_numbers(tmp_path: Path) -> None:
    """Its error is far below that of a bound, it is the difference of the two bounds, and 0 for the same weights."""
    folder = boxed.write_model(tmp_path / "model")
    before, after = (load_model(f) for f in (folder, hub.save_pretrained(folder, tmp_path / "s", dtype="int8")))
    (tmp_path / "text.txt").write_text("abcde" * 80)
    protocol, ranks = evaluation.get_protocol("strict"), Ranks(0, 1, torch.device("cpu"))
    corpus = evaluation.read_corpus(str(tmp_path / "text.txt"), protocol, before)
    bounds = [evaluation.evaluate(loaded, corpus, protocol, ranks, draws=4) for loaded in (before, after)]
    cost, back, none = (
        evaluation.evaluate_difference(*pair, corpus, protocol, ranks, draws=4)
        for pair in ((before, after), (after, before), (before, before))
    )
    assert cost["nats_per_token"] == -back["nats_per_token"] != 0
    assert none["nats_per_token"] == none["stderr_nats_per_token"] == 0
    stderr = cost["stderr_nats_per_token"]
    assert 0 < stderr < bounds[0]["stderr_nats_per_token"] / 10  # with other noise for each it would be the larger
    difference = bounds[1]["nats_per_token"] - bounds[0]["nats_per_token"]
    assert abs(cost["nats_per_token"] - difference) < 4 * stderr + 1e-5
    assert cost["bits_per_char"] == pytest.approx(cost["nats_per_token"] / math.log(2), abs=1e-6)
