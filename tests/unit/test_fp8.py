"""Float8 matrix products: their error, what stays in higher precision, and where they are refused."""

import pytest
import torch
from torch import Tensor

from sedd.loading import prepare_for_inference
from sedd.nn.transformer import Modern, Reference, Transformer
from sedd.ops import fp8
from sedd.ops.block_ops import pack_tokens
from sedd.runtime import device
from sedd.training.config import RunConfig


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_quantization_error_is_relative_to_the_row() -> None:
    """Half a unit in the last of three mantissa bits, or half the smallest subnormal of the row's scale."""
    x = draw(50, 96) * torch.logspace(-12, 12, 50)[:, None]
    values, scale = fp8.quantize_rowwise(x)
    error = (values.float() * scale - x).abs()
    assert (error <= x.abs() / 16 * (1 + 1e-5) + x.abs().amax(-1, keepdim=True) / 448 * 2**-10).all()
    assert error.max() > 0
    assert (values.float().abs().amax(-1) == 448).all()


def test_one_scale_for_all_rows_would_lose_small_rows() -> None:
    """The mutant: a row a millionth as large as the largest becomes 0."""
    x = draw(2, 96) * torch.tensor([[1.0], [1e-6]])
    scale = x.abs().max() / fp8.FP8_MAX
    assert not (x / scale).to(torch.float8_e4m3fn).float()[1].any()
    assert fp8.quantize_rowwise(x).values.float()[1].any()


def test_rows_of_zeros_and_of_nan() -> None:
    x = draw(3, 16)
    x[0], x[1, 4] = 0, torch.nan
    y = fp8.scaled_mm(fp8.quantize_rowwise(x), fp8.quantize_rowwise(draw(5, 16, seed=1)), torch.float32)
    assert (y[0] == 0).all()
    assert y[1].isnan().all()
    assert y[2].isfinite().all()


def test_weight_gradients_are_exact() -> None:
    """dW = dyᵀx and db = Σ dy exactly; the gradient of x is a float8 product."""
    x, weight, bias = (a.requires_grad_() for a in (draw(2, 7, 32), draw(24, 32, seed=1), draw(24, seed=2)))
    dy = draw(2, 7, 24, seed=3)
    x_fp8 = fp8.quantize_rowwise(x.detach().flatten(0, -2))
    y = fp8.fp8_linear(x, x_fp8, weight, bias)
    dx, dw, db = torch.autograd.grad(y, [x, weight, bias], dy)
    torch.testing.assert_close(dw, dy.flatten(0, 1).t() @ x.flatten(0, 1))
    torch.testing.assert_close(db, dy.sum((0, 1)))
    error = (dx - dy @ weight).norm() / dx.norm()
    assert 0.005 < error < 0.06


def networks(style: type[Transformer], width: int) -> list[Transformer]:
    """Return two networks with the same weights, the second with float8 enabled."""
    made = []
    for _ in range(2):
        network = style(states=20, width=width, depth=2, heads=2, generator=torch.Generator().manual_seed(0))
        for i, parameter in enumerate(network.parameters()):
            parameter.data.normal_(0, 0.15, generator=torch.Generator().manual_seed(i))
        made.append(network)
    made[1].enable_fp8()
    return made


@pytest.mark.parametrize("style", [Reference, Modern])
def test_an_fp8_network_is_near_the_exact_one(style: type[Transformer]) -> None:
    """Output and gradients within a tenth, but not within a thousandth: float8 was used."""
    x, sigma = torch.arange(40).view(2, 20) % 20, torch.tensor([0.5, 2.0])
    results = []
    for network in networks(style, 64):
        out = network(x, sigma)
        gradients = torch.autograd.grad((out * draw(*out.shape)).sum(), list(network.parameters()), allow_unused=True)
        results.append([out.detach(), torch.cat([g.flatten() for g in gradients if g is not None])])
    for got, exact in zip(results[1], results[0], strict=True):
        error = (got - exact).norm() / exact.norm()
        assert 1e-3 < error < 0.1


@pytest.mark.parametrize("style", [Reference, Modern])
def test_no_packed_tokens(style: type[Transformer]) -> None:
    """A micro-batch without a masked token."""
    network, x = networks(style, 32)[1], torch.zeros(2, 5, dtype=torch.long)
    hidden = network.hidden(x, torch.ones(2), packed=pack_tokens(x == 19))
    assert hidden.shape == (0, 32)
    hidden.sum().backward()


def test_dtype_of_the_residual_stream() -> None:
    """With float8 it is the compute dtype: bfloat16 under autocast, else float32 as the weights."""
    for network, dtype in zip(networks(Reference, 32), (torch.float32, torch.bfloat16), strict=True):
        dtypes: list[torch.dtype] = []
        network.blocks[0].register_forward_hook(lambda _block, _args, out, dtypes=dtypes: dtypes.append(out[0].dtype))
        for autocast in (True, False):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                assert network(torch.zeros(1, 4, dtype=torch.long), torch.ones(1)).dtype == torch.float32
        assert dtypes == [dtype, torch.float32]


def test_unsupported_widths_devices_and_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="multiple of 16, and it is 24; use bfloat16"):
        networks(Reference, 24)
    monkeypatch.setattr(device, "has_triton", lambda: False)
    with pytest.raises(ValueError, match=r"compute capability 8\.9"):
        fp8.check_supported("cuda", 64)
    with pytest.raises(ValueError, match="float8"):
        RunConfig.from_dict({"train": {"precision": "float4"}}).resolved()
    with pytest.raises(ValueError, match="choose one of float32, bfloat16"):
        prepare_for_inference(networks(Reference, 32)[0], "cpu", "float8")
