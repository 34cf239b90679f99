"""Transformers: the reference architecture equals the published network; properties of both architectures."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from sedd.nn import transformer
from sedd.nn.layers import NgramEmbedding, angles, join_tables
from sedd.nn.transformer import Modern, Reference, Transformer, attention_mask
from sedd.objectives import DenoisingScoreEntropy, LambdaDCE
from sedd.ops.block_ops import TORCH, Rotation, apply_rotary
from sedd.parameterization import CausalModel, MeanModel, ScoreModel
from sedd.process import Absorbing
from sedd.schedule import Geometric, LogLinear, Schedule, corruption_probability
from sedd.training.config import ModelConfig

ARCHITECTURES = [Reference, Modern, pytest.param(partial(Modern, ngrams=3, embedding_norm=True), id="ngrams")]
architectures = pytest.mark.parametrize("architecture", ARCHITECTURES)


def build_network(architecture: type[Transformer], seed: int = 0, **options: object) -> Transformer:
    """Build a small network in which no weight is 0, so that no dependence is hidden by the initialisation."""
    network = architecture(**({"states": 7, "width": 24, "depth": 2, "heads": 3, "cond_dim": 8} | options))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            noise = torch.empty_like(parameter).normal_(generator=generator)
            parameter.copy_(1 + 0.3 * noise if "norm" in name and name.endswith("weight") else 0.3 * noise)
    return network.eval()


def ids(*shape: int, states: int = 7, seed: int = 1) -> Tensor:
    return torch.randint(states, shape, generator=torch.Generator().manual_seed(seed))


# The published network -------------------------------------------------------------------------------------

SMALL = {"width": 768, "depth": 12, "heads": 12}
MEDIUM = {"width": 1024, "depth": 24, "heads": 16}


@pytest.mark.parametrize(
    ("options", "parameters", "entries"),
    [
        (SMALL | {"states": 50258}, 169_627_218, 131),
        (MEDIUM | {"states": 50258}, 424_477_010, 251),
        (SMALL | {"states": 50257}, 169_625_681, 131),
        (SMALL | {"states": 50258, "time_conditioning": False}, 162_265_682, 126),
        (MEDIUM | {"states": 50258, "time_conditioning": False}, 405_191_762, 246),
    ],
)
def test_published_sizes(options: dict[str, int], parameters: int, entries: int) -> None:
    with torch.device("meta"):
        network = Reference(**options)
    assert sum(p.numel() for p in network.parameters()) == parameters
    assert len(network.state_dict()) == entries


@pytest.mark.parametrize("conditioned", [True, False])
def test_published_layout(conditioned: bool) -> None:
    """Names and shapes of all weights, written out."""
    D, h, cond, d = 7, 24, 128, 8
    block = {
        "norm1.weight": (h,),
        "norm2.weight": (h,),
        "attn_qkv.weight": (3 * h, h),
        "attn_out.weight": (h, h),
        "mlp.0.weight": (4 * h, h),
        "mlp.0.bias": (4 * h,),
        "mlp.2.weight": (h, 4 * h),
        "mlp.2.bias": (h,),
    }
    layout = {
        "vocab_embed.embedding": (D, h),
        "rotary_emb.inv_freq": (d // 2,),
        "output_layer.norm_final.weight": (h,),
        "output_layer.linear.weight": (D, h),
        "output_layer.linear.bias": (D,),
    }
    if conditioned:
        block |= {"adaLN_modulation.weight": (6 * h, cond), "adaLN_modulation.bias": (6 * h,)}
        layout |= {
            "sigma_map.mlp.0.weight": (cond, 256),
            "sigma_map.mlp.0.bias": (cond,),
            "sigma_map.mlp.2.weight": (cond, cond),
            "sigma_map.mlp.2.bias": (cond,),
            "output_layer.adaLN_modulation.weight": (2 * h, cond),
            "output_layer.adaLN_modulation.bias": (2 * h,),
        }
    else:
        block |= {"norm1.bias": (h,), "norm2.bias": (h,)}
        layout |= {"output_layer.norm_final.bias": (h,)}
    layout |= {f"blocks.{i}.{name}": shape for i in range(2) for name, shape in block.items()}
    network = Reference(states=D, width=h, depth=2, heads=3, time_conditioning=conditioned)
    assert {name: tuple(value.shape) for name, value in network.state_dict().items()} == layout
    frequencies = torch.tensor([10000 ** (-2 * i / d) for i in range(d // 2)])
    torch.testing.assert_close(network.state_dict()["rotary_emb.inv_freq"], frequencies)


def published(w: dict[str, Tensor], x: Tensor, sigma: Tensor, heads: int, mutant: str = "") -> Tensor:
    """Compute the published forward pass for one sequence, head by head and position by position."""
    conditioned = "sigma_map.mlp.0.weight" in w

    def norm(h: Tensor, name: str) -> Tensor:
        h = (h - h.mean(-1, keepdim=True)) / (h.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
        return h * w[f"{name}.weight"] + w.get(f"{name}.bias", 0)

    def affine(h: Tensor, name: str) -> Tensor:
        return h @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)

    def rotate(vector: Tensor, m: int) -> Tensor:
        half = len(vector) // 2
        pairs = vector.view(half, 2).T.flatten() if mutant == "interleaved" else vector
        z = torch.complex(pairs[:half], pairs[half:])
        z = z * torch.exp(1j * m * torch.tensor([10000 ** (-i / half) for i in range(half)], dtype=torch.float64))
        rotated = torch.cat([z.real, z.imag])
        return rotated.view(2, half).T.flatten() if mutant == "interleaved" else rotated

    def attention(h: Tensor, i: int) -> Tensor:
        length, width = h.shape
        d = width // heads
        q, k, v = affine(h, f"blocks.{i}.attn_qkv").view(length, 3, heads, d).unbind(1)
        attended = torch.zeros(length, heads, d, dtype=h.dtype)
        for head in range(heads):
            for m in range(length):
                scores = [rotate(q[m, head], m) @ rotate(k[n, head], n) / math.sqrt(d) for n in range(length)]
                attended[m, head] = torch.stack(scores).softmax(-1) @ v[:, head]
        return affine(attended.flatten(1), f"blocks.{i}.attn_out")

    def modulation(name: str, count: int) -> tuple[Tensor | float, ...]:
        if not conditioned:
            return (0.0, 0.0, 1.0) * (count // 3) or (0.0, 0.0)
        return affine(c, name).chunk(count)

    if conditioned:
        angle = sigma * torch.tensor([math.exp(-math.log(1e4) * i / 128) for i in range(128)], dtype=torch.float64)
        waves = [angle.sin(), angle.cos()] if mutant == "sin first" else [angle.cos(), angle.sin()]
        c = F.silu(affine(torch.cat(waves), "sigma_map.mlp.0"))
        c = affine(c, "sigma_map.mlp.2")
        c = c if mutant == "one SiLU" else F.silu(c)
    h = w["vocab_embed.embedding"][x]
    for i in range(2):
        shift1, scale1, gate1, shift2, scale2, gate2 = modulation(f"blocks.{i}.adaLN_modulation", 6)
        if mutant == "scale first":
            shift1, scale1 = scale1, shift1
        h = h + gate1 * attention(norm(h, f"blocks.{i}.norm1") * (1 + scale1) + shift1, i)
        inner = affine(norm(h, f"blocks.{i}.norm2") * (1 + scale2) + shift2, f"blocks.{i}.mlp.0")
        inner = F.gelu(inner, approximate="none" if mutant == "exact GELU" else "tanh")
        h = h + gate2 * affine(inner, f"blocks.{i}.mlp.2")
    shift, scale, *_ = modulation("output_layer.adaLN_modulation", 2)
    return affine(norm(h, "output_layer.norm_final") * (1 + scale) + shift, "output_layer.linear")


@pytest.mark.parametrize("conditioned", [True, False])
def test_reference_is_the_published_network(conditioned: bool) -> None:
    network = build_network(Reference, time_conditioning=conditioned).double()
    weights = {name: value.double() for name, value in network.state_dict().items()}
    x, sigma = ids(3, 5), torch.tensor([0.01, 0.7, 6.0], dtype=torch.float64)
    expected = torch.stack([published(weights, *row, heads=3) for row in zip(x, sigma, strict=True)])
    torch.testing.assert_close(network(x, sigma), expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(network.float()(x, sigma.float()), expected.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mutant", ["interleaved", "sin first", "one SiLU", "scale first", "exact GELU"])
def test_the_comparison_detects_small_deviations(mutant: str) -> None:
    network = build_network(Reference).double()
    x, sigma = ids(5), torch.tensor(0.7, dtype=torch.float64)
    wrong = published(dict(network.state_dict()), x, sigma, heads=3, mutant=mutant)
    assert (network(x, sigma) - wrong).abs().max() > 1e-4


def test_reference_initialisation_has_the_published_distribution() -> None:
    network = Reference(states=50, width=64, depth=1, heads=4, generator=torch.Generator().manual_seed(0))
    for name, value in network.named_parameters():
        if "adaLN" in name or "output_layer.linear" in name:
            assert (value == 0).all(), name
        elif "norm" in name:
            assert (value == 1).all(), name
        elif value.ndim == 2:
            bound = value.shape[-1] ** -0.5
            assert 0.98 * bound < value.abs().max() <= bound, name
            assert abs(value.std() * math.sqrt(3) / bound - 1) < 0.05, name


# Properties of both architectures -------------------------------------------------------------------------


@architectures
def test_weights_are_a_function_of_the_generator(architecture: type[Transformer]) -> None:
    def initialised(seed: int) -> dict[str, Tensor]:
        return architecture(
            states=7, width=24, depth=2, heads=3, generator=torch.Generator().manual_seed(seed)
        ).state_dict()

    before = torch.get_rng_state()
    first, again, other = initialised(0), initialised(0), initialised(1)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["vocab_embed.embedding"], other["vocab_embed.embedding"])
    with torch.device("meta"):
        late = architecture(states=7, width=24, depth=2, heads=3)
    late = late.to_empty(device="cpu")
    late.reset_parameters(torch.Generator().manual_seed(0))
    assert all(torch.equal(first[name], value) for name, value in late.state_dict().items())


@architectures
@pytest.mark.parametrize("causal", [False, True])
def test_a_sequence_does_not_depend_on_the_rest_of_its_batch(architecture: type[Transformer], causal: bool) -> None:
    network = build_network(architecture, causal=causal)
    x, sigma = ids(4, 6), torch.tensor([0.1, 1.0, 2.0, 9.0])
    out = network(x, sigma)
    order = torch.tensor([2, 0, 3, 1])
    torch.testing.assert_close(network(x[order], sigma[order]), out[order], rtol=1e-6, atol=1e-6)
    x_other, sigma_other = ids(4, 6, seed=2), torch.rand(4)
    x_other[1], sigma_other[1] = x[1], sigma[1]
    torch.testing.assert_close(network(x_other, sigma_other)[1], out[1], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(network(x.view(2, 2, 6), sigma.view(2, 2)), out.view(2, 2, 6, 7), rtol=1e-6, atol=1e-6)
    network, sigma = network.double(), sigma.double()  # products of another size are summed in another order
    torch.testing.assert_close(network(x[1], sigma[1]), network(x, sigma)[1], rtol=1e-12, atol=1e-12)


@architectures
@pytest.mark.parametrize("causal", [False, True])
def test_a_padded_batch_equals_its_single_sequences(architecture: type[Transformer], causal: bool) -> None:
    """Whatever ids the padding has; gradients are finite, also with a sequence of padding alone."""
    network = build_network(architecture, causal=causal)
    lengths, sigma = torch.tensor([5, 3, 1, 0]), torch.tensor([0.1, 1.0, 2.0, 3.0])
    x, valid = ids(4, 5), torch.arange(5) < lengths[:, None]
    out = network(x, sigma, valid)
    out.sum().backward()
    assert out.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())
    for row, length in enumerate(lengths):
        single = network(x[row, :length], sigma[row]) if length else out[row, :0]
        torch.testing.assert_close(out[row, :length], single, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(network(torch.where(valid, x, 0), sigma, valid)[valid], out[valid])
    if not causal:
        assert (network(x, sigma)[1, :3] - out[1, :3]).abs().max() > 1e-3  # without the mask it attends to padding


@architectures
def test_padding_on_the_left_of_a_causal_sequence_is_ignored(architecture: type[Transformer]) -> None:
    network, sigma = build_network(architecture, causal=True), torch.ones(1)
    valid = torch.tensor([[False, False, True, True]])
    x = ids(1, 4)
    out = network(x, sigma, valid)
    assert out.isfinite().all()
    torch.testing.assert_close(network(torch.where(valid, x, 3), sigma, valid)[valid], out[valid])


@pytest.mark.parametrize("causal", [False, True])
def test_every_query_has_a_key_and_no_valid_query_attends_to_padding(causal: bool) -> None:
    """Some kernels return NaN for a query without a key."""
    valid = torch.tensor([[True, True, False], [False, False, True], [False, False, False]])
    mask = attention_mask(valid, torch.ones(3, 3, dtype=torch.bool).tril() if causal else None)
    assert mask is not None
    mask = mask[:, 0].expand(3, 3, 3)
    assert mask.any(-1).all()
    assert not (mask & valid[:, :, None] & ~valid[:, None]).any()


def dependence(network: Transformer, length: int = 6, valid: Tensor | None = None) -> Tensor:
    """Return whether the output at i (row) depends on the input at j (column)."""
    x, sigma = ids(1, length), torch.ones(1)
    depends = torch.zeros(length, length, dtype=torch.bool)
    for j in range(length):
        changed = x.clone()
        changed[0, j] = (x[0, j] + 1) % 7
        depends[:, j] = (network(changed, sigma, valid) != network(x, sigma, valid)).any(-1)[0]
    return depends


EVERYWHERE = torch.ones(6, 6, dtype=torch.bool)


@architectures
@pytest.mark.parametrize("causal", [False, True])
def test_which_outputs_depend_on_which_inputs(architecture: type[Transformer], causal: bool) -> None:
    """Output i depends on input j for j ≤ i alone if causal, else for every j."""
    assert torch.equal(
        dependence(build_network(architecture, causal=causal)), EVERYWHERE.tril() if causal else EVERYWHERE
    )


@pytest.mark.parametrize("architecture", [Reference, Modern])
def test_the_output_of_a_hollow_network_depends_on_every_token_but_its_own(architecture: type[Transformer]) -> None:
    """In three blocks, one more than carry a token to a neighbour and back; padding changes none of it."""
    network = build_network(architecture, hollow=True, depth=3, outputs=7)
    hollow_pattern = ~torch.eye(6, dtype=torch.bool)
    assert torch.equal(dependence(network), hollow_pattern)
    valid = torch.tensor([[True, True, True, True, False, False]])
    assert torch.equal(dependence(network, valid=valid)[:4], hollow_pattern[:4] & valid)
    x, sigma = ids(1, 6), torch.ones(1)
    torch.testing.assert_close(network(x, sigma, valid)[:, :4], network(x[:, :4], sigma), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("leak", ["the token itself", "diagonal of ordinary attention"])
def test_a_mask_that_leaks_the_token_is_caught(leak: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, length = transformer.hollow_mask, 6

    def mutant(length: int, device: torch.device) -> Tensor:
        mask = whole(length, device)
        if leak == "the token itself":
            mask[-1, length - 1] = True  # the last position attends to its own token
        else:
            mask[: 2 * length, : 2 * length] = True  # its neighbours have seen the token
        return mask

    monkeypatch.setattr(transformer, "hollow_mask", mutant)
    depends = dependence(build_network(Modern, hollow=True, depth=3, outputs=7), length)
    assert depends.diagonal().any()


def test_a_hollow_network_is_refused_what_would_show_it_the_token(refuses: Callable[..., None]) -> None:
    refuses(lambda: build_network(Modern, hollow=True, ngrams=2), "hollow", "n-gram")
    refuses(lambda: build_network(Modern, hollow=True, causal=True), "hollow", "causal")


def test_rotary_scores_depend_on_distance_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(8, dtype=torch.float64, generator=generator) for _ in "qk")
    angle = angles(torch.arange(50, dtype=torch.float64), 8)
    rotation = Rotation(angle.cos(), angle.sin())
    rows = (apply_rotary(x.expand(1, 50, 1, 8), rotation)[0, :, 0] for x in (q, k))
    q, k = rows
    scores = q @ k.T
    for distance in (-20, 0, 1, 20):
        along = scores.diagonal(distance)
        torch.testing.assert_close(along, along[:1].expand_as(along), rtol=1e-12, atol=1e-12)
    assert (scores[0, 1] - scores[0, 2]).abs() > 1e-3
    torch.testing.assert_close(q.norm(dim=-1), q[0].norm().expand(50))


@architectures
def test_order_of_tokens_matters(architecture: type[Transformer]) -> None:
    network, x = build_network(architecture), torch.tensor([[1, 2, 3, 4, 5]])
    out = network(x, torch.ones(1))
    assert (network(x.flip(-1), torch.ones(1)).flip(-2) - out).abs().max() > 1e-3


def test_qk_norm_removes_the_scale_of_queries_and_keys() -> None:
    """Larger weights for queries and keys change nothing in `Modern`, and sharpen the attention of `Reference`."""
    x, sigma = ids(2, 5), torch.ones(2)
    for architecture, qkv in ((Modern, "qkv"), (Reference, "attn_qkv")):
        network = build_network(architecture)
        out = network(x, sigma)
        with torch.no_grad():
            getattr(network.blocks[0], qkv).weight[:48] *= 3  # the rows of the values are the last 24 of 72
        same = torch.allclose(network(x, sigma), out, rtol=1e-4, atol=1e-4)
        assert same == (architecture is Modern)


@architectures
def test_only_a_network_with_time_conditioning_depends_on_sigma(architecture: type[Transformer]) -> None:
    x = ids(2, 5)
    little, much = torch.full((2,), 0.1), torch.tensor([3.0, math.inf])
    free, conditioned = build_network(architecture, time_conditioning=False), build_network(architecture)
    assert torch.equal(free(x, little), free(x, much))
    assert (conditioned(x, little) - conditioned(x, much)).abs().amin(0).max() > 1e-3
    assert not any("sigma" in name or "odulation" in name for name in free.state_dict())


@architectures
def test_the_output_is_finite_at_any_noise_level(architecture: type[Transformer]) -> None:
    sigma = torch.tensor([0.0, 1e-8, 1e-3, 1.0, 20.0, 1e3, 1e30, math.inf])
    network = build_network(architecture)
    out = network(ids(1, 5).expand(8, 5), sigma)
    assert out.isfinite().all()
    assert torch.equal(out[5:], out[5:6].expand(3, -1, -1))  # noise above 10³ is clamped


@architectures
@pytest.mark.parametrize("conditioned", [True, False])
@pytest.mark.parametrize("schedule", [LogLinear(), Geometric()], ids=lambda s: type(s).__name__)
def test_the_first_loss_is_known(architecture: type[Transformer], conditioned: bool, schedule: Schedule) -> None:
    """With a head of 0 all tokens are equally likely: the expected loss is σ'e^−σ·log N per token, or log N (λ-DCE).

    The expectation over masks is exact: a token is masked with probability 1 − e^−σ, and its loss is 0 otherwise.
    """
    N, process = 11, Absorbing(11)
    network = architecture(states=N + 1, width=24, depth=2, heads=3, time_conditioning=conditioned)
    x_0, t = ids(6, 5, states=N), torch.linspace(0.05, 0.95, 6)
    assert (network(x_0, t) == 0).all()
    masked = torch.full_like(x_0, N)
    sigma, rate = schedule(t)
    score_entropy, model = DenoisingScoreEntropy(), ScoreModel(network, process, schedule)
    expected = (corruption_probability(sigma)[:, None] * score_entropy.loss(model, masked, x_0, t)).mean(-1)
    torch.testing.assert_close(expected, rate * torch.exp(-sigma) * math.log(N), rtol=1e-4, atol=0)
    assert (score_entropy.loss(model, x_0, x_0, t) == 0).all()
    expected = (t[:, None] * LambdaDCE().loss(MeanModel(network, process), masked, x_0, t)).mean(-1)
    torch.testing.assert_close(expected, torch.full((6,), math.log(N)))


@architectures
@pytest.mark.parametrize("conditioned", [True, False])
@pytest.mark.parametrize("how", ["autocast", "converted"])
def test_mixed_precision_keeps_residual_stream_and_output_in_float32(
    architecture: type[Transformer], conditioned: bool, how: str
) -> None:
    """The head's product is in bfloat16; noise-level embedding, residual stream and output are in float32."""
    network, x, sigma = build_network(architecture, time_conditioning=conditioned), ids(2, 40), torch.tensor([0.3, 3.0])
    exact = network(x, sigma)
    network = network.bfloat16() if how == "converted" else network
    dtypes: dict[str, torch.dtype] = {}
    modules = {"noise": network.sigma_map, "block": network.blocks[0], "head": network.head}

    def note(name: str, output: Any) -> None:
        dtypes[name] = (output[0] if name == "block" else output).dtype  # a block returns the stream first

    for name, module in modules.items():
        if module is not None:
            module.register_forward_hook(lambda _module, _inputs, output, name=name: note(name, output))
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        out = network(x, sigma)
    assert out.dtype == torch.float32
    assert dtypes == ({"noise": torch.float32} if conditioned else {}) | {
        "block": torch.float32,
        "head": torch.bfloat16,
    }
    assert 0 < (out - exact).norm() / exact.norm() < 0.03
    out.logsumexp(-1).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())


def test_rotary_angles_are_not_rounded_with_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    network, found = build_network(Reference), []

    def trunk(h: Tensor, sigma: Tensor, valid: None, rotation: Rotation, packed: None) -> Tensor:
        found.append(rotation)
        return h

    monkeypatch.setattr(network, "trunk", trunk)
    for dtype in (torch.float32, torch.bfloat16):
        network.to(dtype).hidden(ids(1, 2000), torch.ones(1))
    assert found[1].cos.dtype == torch.float32
    assert all(torch.equal(rounded, value) for rounded, value in zip(*found, strict=True))


@architectures
def test_the_head_reads_the_hidden_states(architecture: type[Transformer]) -> None:
    network, x, sigma = build_network(architecture, outputs=4), ids(2, 3, 5), torch.rand(2, 3)
    hidden = network.hidden(x, sigma)
    assert hidden.shape == (2, 3, 5, 24)
    assert torch.equal(network.head(hidden), network(x, sigma))
    assert network.head.weight.shape == (4, 24)


@architectures
def test_dropout_is_active_in_training_alone(architecture: type[Transformer]) -> None:
    network, x, sigma = build_network(architecture, dropout=0.5), ids(2, 5), torch.ones(2)
    assert torch.equal(network(x, sigma), build_network(architecture)(x, sigma))
    network.train()
    assert not torch.equal(network(x, sigma), network(x, sigma))


@architectures
def test_every_weight_is_trained(architecture: type[Transformer]) -> None:
    """Four steps from the initial weights change every one of them, and the loss falls."""
    network = architecture(states=8, width=24, depth=2, heads=3, generator=torch.Generator().manual_seed(0))
    first = {name: value.clone() for name, value in network.named_parameters()}
    model, x_0 = MeanModel(network, Absorbing(7)), ids(1, 6).expand(4, 6)
    optimizer, loss_of, t = torch.optim.Adam(network.parameters(), 1e-2), LambdaDCE(), torch.full((4,), 0.5)
    losses = []
    for _ in range(4):
        x_t = loss_of.corrupt(model, x_0, t, torch.Generator().manual_seed(0))
        loss = loss_of.loss(model, x_t, x_0, t).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    assert [name for name, value in network.named_parameters() if torch.equal(value, first[name])] == []


@architectures
def test_a_causal_network_is_an_autoregressive_model(architecture: type[Transformer]) -> None:
    """It reads a start token, and the probabilities of all sequences sum to 1."""
    model = CausalModel(
        build_network(architecture, states=4, outputs=3, causal=True, time_conditioning=False), Absorbing(3)
    )
    x = torch.cartesian_prod(*[torch.arange(3)] * 3)
    log_p = model.log_next(x).gather(-1, x[..., None]).sum((-2, -1))
    torch.testing.assert_close(log_p.exp().sum(), torch.tensor(1.0))


# Refused options and inputs --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"width": 25}, ["width 25", "heads 3"]),
        ({"width": 15}, ["width 15", "heads 3", "pairs"]),
        ({"dropout": 1.0}, ["dropout is 1.0", "[0, 1)"]),
        ({"dropout": -0.1}, ["dropout is -0.1"]),
    ],
)
@architectures
def test_invalid_sizes_are_refused(
    refuses: Callable[..., None], architecture: type[Transformer], options: dict[str, object], words: list[str]
) -> None:
    refuses(lambda: architecture(**({"states": 7, "width": 24, "depth": 2, "heads": 3} | options)), *words)


@architectures
def test_invalid_inputs_are_refused(refuses: Callable[..., None], architecture: type[Transformer]) -> None:
    network = build_network(architecture)
    refuses(lambda: network(torch.tensor([[7]]), torch.ones(1)), "state 7", "0..6")
    refuses(lambda: network(ids(1, 3), -torch.ones(1)), "sigma is -1.0")


@pytest.mark.parametrize("conditioned", [True, False])
def test_only_modern_distinguishes_positions_of_masks(conditioned: bool) -> None:
    """Rotary attention depends on distances: with equal tokens, the reference network has equal outputs everywhere."""
    masks = torch.full((1, 6), 4)
    for build, distinguishes in ((Reference, False), (Modern, True)):
        network = build(states=5, width=16, depth=2, heads=2, time_conditioning=conditioned)
        with torch.no_grad():
            for value in network.parameters():
                value.normal_(generator=torch.Generator().manual_seed(0))
        output = network(masks, torch.ones(1))
        spread = (output - output[:, :1]).abs().max() / output.abs().max()
        assert (spread > 1e-2) == distinguishes


# n-grams ---------------------------------------------------------------------------------------------------


def ngram_embedding(**options: Any) -> NgramEmbedding:
    made = NgramEmbedding(**({"states": 4, "width": 3, "longest": 3, "causal": False} | options))
    with torch.no_grad():
        for i, table in enumerate(made.tables):
            table.normal_(generator=torch.Generator().manual_seed(i))
    return made


def embed_ngrams(made: NgramEmbedding, x: Tensor, valid: Tensor | None, joined: bool = False) -> Tensor:
    return TORCH.embed(made.lookups(x, valid, joined), None, False, torch.float32)


@pytest.mark.parametrize("causal", [False, True])
def test_ngram_embeddings_follow_their_definition(causal: bool) -> None:
    """Written out: the tokens before and after, nearest first, 4 beyond the ends and at padding."""
    made, x = ngram_embedding(causal=causal), ids(2, 6, states=4)
    valid = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    found = embed_ngrams(made, x, valid)
    tables = iter(made.tables)
    expected = torch.zeros(2, 6, 3)
    for n in (1, 2, 3):
        for side in (-1,) if causal else (-1, 1):
            table = next(tables)
            for row in range(2):
                for i in range(6):
                    places = [i + side * j for j in range(1, n + 1)]
                    tokens = [int(x[row, k]) if 0 <= k < 6 and valid[row, k] else 4 for k in places]
                    key = 0
                    for token in tokens:
                        key = key * 5 + token
                    expected[row, i] += table[key]
    torch.testing.assert_close(found, expected)
    reversed_sides = embed_ngrams(made, x.flip(-1), valid.flip(-1)).flip(-2)
    assert not torch.allclose(reversed_sides, expected)  # the mutant: sides exchanged


@pytest.mark.parametrize(("states", "longest", "tables"), [(4, 1, 2), (4, 2, 2), (4, 3, 2), (20, 4, 4)])
def test_joined_tables_are_the_same_embedding(states: int, longest: int, tables: int) -> None:
    """In values and gradients; n-grams that are hashed keep tables of their own. In another order they would differ."""
    made, x = ngram_embedding(states=states, longest=longest), ids(2, 6, states=states)
    valid = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    assert len(made.lookups(x, valid, True)) == tables
    assert len(made.lookups(x, valid)) == 2 * longest  # on a CPU
    found = [embed_ngrams(made, x, valid, joined) for joined in (False, True)]
    torch.testing.assert_close(*found)
    upstream = torch.randn(found[0].shape, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(*(torch.autograd.grad(h, list(made.tables), upstream) for h in found))
    if longest == 3:
        left = list(made.tables)[::2]
        assert not torch.allclose(join_tables(left), join_tables(left).view(5, 5, 5, 3).transpose(0, 1).reshape(-1, 3))


def test_many_ngrams_are_hashed() -> None:
    """Into all rows, about evenly, and equal n-grams into equal rows."""
    made = NgramEmbedding(states=1000, width=1, longest=2, causal=False)
    assert [len(table) for table in made.tables] == [1001, 1001, 2**16, 2**16]
    x = ids(100, 1000, states=1000)
    keys = made.keys(torch.cat([x, x]), None)[2]
    assert torch.equal(keys[:100], keys[100:])
    assert (keys.min() >= 0) & (keys.max() < 2**16)
    counts = torch.bincount(keys[:100].flatten(), minlength=2**16)
    assert counts.double().var() < 1.3 * counts.double().mean()  # of a random function: 1.0


def test_ngrams_of_the_published_network_are_refused(refuses: Callable[..., None]) -> None:
    refuses(lambda: ModelConfig(architecture="reference", ngrams=2), "model.ngrams is 2", "model.architecture=modern")
    refuses(lambda: ModelConfig(ngrams=5), "model.ngrams is 5", "4 or less")


def test_the_embedding_norm_removes_the_scale_of_the_embeddings() -> None:
    """And blocks without time conditioning start as the identity: no weight of theirs but the last changes that."""
    for time_conditioning in (False, True):
        network = Modern(
            states=7, width=24, depth=2, heads=3, time_conditioning=time_conditioning, embedding_norm=True, ngrams=1
        ).double()
        x, sigma = ids(2, 5), torch.tensor([0.3, 2.0])
        hidden = network.hidden(x, sigma)
        embedding = network.vocab_embed.embedding[x] + network.position_embedding(torch.arange(5).double())
        torch.testing.assert_close(hidden, F.rms_norm(embedding, (24,)), rtol=1e-5, atol=0)
        with torch.no_grad():
            for parameter in (*network.vocab_embed.parameters(), *network.position_embedding.parameters()):
                parameter.mul_(3)
        torch.testing.assert_close(network.hidden(x, sigma), hidden, rtol=1e-5, atol=0)
        without = Modern(states=7, width=24, depth=2, heads=3, time_conditioning=time_conditioning).double()
        assert bool(without.blocks[0].out.weight.any())
        assert bool(network.blocks[0].out.weight.any()) == time_conditioning  # else gates and matrices were both at 0


def test_an_embedding_norm_of_the_published_network_is_refused(refuses: Callable[..., None]) -> None:
    refuses(lambda: ModelConfig(architecture="reference", embedding_norm=True), "embedding_norm", "architecture=modern")
