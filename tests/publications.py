"""Small checkpoints with random weights in the published layouts, and a reference implementation of their networks.

Written from the description of the layouts with plain torch functions, independently of the package.
"""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import yaml
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

V, WIDTH, DEPTH, HEADS, COND = 11, 32, 2, 4, 128


class Kind(NamedTuple):
    """A layout and the process of its model."""

    layout: str
    graph: str = "absorb"

    @property
    def states(self) -> int:
        return V + (self.graph == "absorb")

    @property
    def prefix(self) -> str:
        return "backbone." if self.layout == "mdlm" else ""


KINDS = [Kind("sedd"), Kind("sedd", "uniform"), Kind("radd"), Kind("mdlm")]


def table(kind: Kind, states: int, h: int, depth: int, cond: int = COND, half: int = WIDTH // HEADS // 2) -> dict:
    """Return the names and shapes of a layout."""
    timed = kind.layout != "radd"
    block = {
        "norm1.weight": (h,),
        **({} if timed else {"norm1.bias": (h,)}),
        "attn_qkv.weight": (3 * h, h),
        "attn_out.weight": (h, h),
        "norm2.weight": (h,),
        **({} if timed else {"norm2.bias": (h,)}),
        "mlp.0.weight": (4 * h, h),
        "mlp.0.bias": (4 * h,),
        "mlp.2.weight": (h, 4 * h),
        "mlp.2.bias": (h,),
        **({"adaLN_modulation.weight": (6 * h, cond), "adaLN_modulation.bias": (6 * h,)} if timed else {}),
    }
    noise = {
        "sigma_map.mlp.0.weight": (cond, 256),
        "sigma_map.mlp.0.bias": (cond,),
        "sigma_map.mlp.2.weight": (cond, cond),
        "sigma_map.mlp.2.bias": (cond,),
    }
    last = {
        "norm_final.weight": (h,),
        **({} if timed else {"norm_final.bias": (h,)}),
        "linear.weight": (states, h),
        "linear.bias": (states,),
        **({"adaLN_modulation.weight": (2 * h, cond), "adaLN_modulation.bias": (2 * h,)} if timed else {}),
    }
    return {
        "vocab_embed.embedding": (states, h),
        **(noise if timed else {}),
        "rotary_emb.inv_freq": (half,),
        **{f"blocks.{i}.{name}": shape for i in range(depth) for name, shape in block.items()},
        **{f"output_layer.{name}": shape for name, shape in last.items()},
    }


def weights(kind: Kind, seed: int = 0) -> dict[str, Tensor]:
    """Return random weights by their published names; none has its initial value."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, shape in table(kind, kind.states, WIDTH, DEPTH).items():
        noise = torch.randn(shape, generator=generator)
        made[name] = 1 + 0.3 * noise if "norm" in name and name.endswith("weight") else 0.2 * noise
    half = WIDTH // HEADS // 2
    made["rotary_emb.inv_freq"] = 1.0 / (10000 ** (torch.arange(half).float() / half))
    return {kind.prefix + name: value for name, value in made.items()}


def config(kind: Kind) -> dict[str, Any]:
    """Return the published configuration: nested, or flat for MDLM."""
    if kind.layout == "mdlm":
        sizes = {"hidden_dim": WIDTH, "cond_dim": COND, "n_blocks": DEPTH, "n_heads": HEADS, "model_length": 24}
        more = {"vocab_size": V + 1, "dropout": 0.1, "time_conditioning": False, "torch_dtype": "float32"}
        return {"model_type": "mdlm", **sizes, **more}
    noise = {"type": "geometric" if kind.graph == "uniform" else "loglinear", "sigma_min": 1e-3, "sigma_max": 15}
    sizes = {"hidden_size": WIDTH, "cond_dim": COND, "length": 24, "n_blocks": DEPTH, "n_heads": HEADS, "dropout": 0.1}
    nested = {"tokens": V, "ngpus": 8, "noise": noise, "training": {"batch_size": 512}, "model": {"name": "x", **sizes}}
    if kind.layout == "radd":
        nested["training"]["loss_type"] = "t_DCE"
        return nested
    nested["model"]["scale_by_sigma"] = kind.graph == "absorb"
    return nested | {"graph": {"type": kind.graph, "file": "data"}}


def folder(path: Path, kind: Kind, form: str = "safetensors", seed: int = 0) -> Path:
    """Write a checkpoint as safetensors, a pickle, a pickle in the legacy format, or shards of either."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config(kind)))
    made = weights(kind, seed)
    if form == "safetensors":
        save_file(made, path / "model.safetensors")
    elif form in ("pickle", "old pickle"):
        torch.save(made, path / "pytorch_model.bin", _use_new_zipfile_serialization=form == "pickle")
    else:
        stem, suffix = ("model", "safetensors") if form == "safetensors shards" else ("pytorch_model", "bin")
        parts = [dict(list(made.items())[i::2]) for i in (0, 1)]
        names = [f"{stem}-0000{i}-of-00002.{suffix}" for i in (1, 2)]
        for part, name in zip(parts, names, strict=True):
            save_file(part, path / name) if suffix == "safetensors" else torch.save(part, path / name)
        index = {key: name for part, name in zip(parts, names, strict=True) for key in part}
        text = json.dumps({"metadata": {}, "weight_map": index})
        (path / f"{stem}.{suffix}.index.json").write_text(text)
    return path


def trainer_run(path: Path, kind: Kind, seed: int = 0, prefix: str = "") -> Path:
    """Write the folder of a run of the original training code; the EMA weights are those of the next seed.

    Its learning rate is a NumPy number, since the warm-up multiplies it by the result of ``numpy.minimum``.
    """
    trained = {name: torch.nn.Parameter(w) for name, w in weights(kind, seed).items() if "inv_freq" not in name}
    optimizer = torch.optim.AdamW(trained.values(), lr=3e-4)
    sum(w.sum() for w in trained.values()).backward()
    for group in optimizer.param_groups:
        group["lr"] = 0.0 * np.minimum(7 / 2500, 1.0)
    optimizer.step()
    shadows = [w for name, w in weights(kind, seed + 1).items() if "inv_freq" not in name]
    state = {
        "optimizer": optimizer.state_dict(),
        "model": {prefix + name: w for name, w in weights(kind, seed).items()},
        "ema": {"decay": 0.9999, "num_updates": 7, "shadow_params": shadows},
        "step": 7,
    }
    settings = {**config(kind), "hydra": {"run": {"dir": "exp_local/${data.train}"}}}
    for folder, name in (("checkpoints-meta", "checkpoint.pth"), ("checkpoints", "checkpoint_1.pth")):
        (path / folder).mkdir(parents=True, exist_ok=True)
        torch.save(state, path / folder / name)
    (path / ".hydra").mkdir()
    (path / ".hydra" / "config.yaml").write_text(yaml.safe_dump(settings))
    return path


# Reference implementation ----------------------------------------------------------------------------------


def _norm(w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w.get(f"{name}.bias"), 1e-5)


def _rotary(x: Tensor, interleaved: bool) -> Tensor:
    """Apply rotary positions to (b, heads, L, d), rotating the two halves of each head."""
    d = x.shape[-1]
    angle = torch.arange(x.shape[-2])[:, None] * 10000.0 ** (-torch.arange(0, d, 2) / d)
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., : d // 2], x[..., d // 2 :])
    one, two = a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()
    return torch.stack([one, two], -1).flatten(-2) if interleaved else torch.cat([one, two], -1)


def _attention(w: dict[str, Tensor], i: int, x: Tensor, mutant: str) -> Tensor:
    b, length, h = x.shape
    packed = (x @ w[f"blocks.{i}.attn_qkv.weight"].T).view(b, length, 3, HEADS, h // HEADS).permute(2, 0, 3, 1, 4)
    q, k = (_rotary(part, mutant == "interleaved") for part in packed[:2])
    attended = (q @ k.transpose(-1, -2) / math.sqrt(h // HEADS)).softmax(-1) @ packed[2]
    return attended.transpose(1, 2).reshape(b, length, h) @ w[f"blocks.{i}.attn_out.weight"].T


def _mlp(w: dict[str, Tensor], i: int, x: Tensor) -> Tensor:
    inner = F.linear(x, w[f"blocks.{i}.mlp.0.weight"], w[f"blocks.{i}.mlp.0.bias"])
    return F.linear(F.gelu(inner, approximate="tanh"), w[f"blocks.{i}.mlp.2.weight"], w[f"blocks.{i}.mlp.2.bias"])


def _sigma_embedding(w: dict[str, Tensor], sigma: Tensor, mutant: str) -> Tensor:
    angle = sigma[:, None] * torch.exp(-math.log(1e4) * torch.arange(128) / 128)
    waves = [angle.sin(), angle.cos()] if mutant == "sin first" else [angle.cos(), angle.sin()]
    c = F.silu(F.linear(torch.cat(waves, -1), w["sigma_map.mlp.0.weight"], w["sigma_map.mlp.0.bias"]))
    return F.silu(F.linear(c, w["sigma_map.mlp.2.weight"], w["sigma_map.mlp.2.bias"]))


def _modulation(w: dict[str, Tensor], name: str, c: Tensor, count: int, mutant: str) -> list[Tensor]:
    """Return shift, scale and gate, in this order."""
    parts = list(F.linear(c, w[f"{name}.weight"], w[f"{name}.bias"])[:, None].chunk(count, -1))
    if mutant == "scale first":
        parts[0], parts[1] = parts[1], parts[0]
    return parts


def output(w: dict[str, Tensor], x: Tensor, sigma: Tensor, mutant: str = "") -> Tensor:
    """Return the network's output."""
    timed = "sigma_map.mlp.0.weight" in w
    h = w["vocab_embed.embedding"][x]
    c = _sigma_embedding(w, sigma, mutant) if timed else sigma
    for i in range(DEPTH):
        one, two = f"blocks.{i}.norm1", f"blocks.{i}.norm2"
        if not timed:
            h = h + _attention(w, i, _norm(w, one, h), mutant)
            h = h + _mlp(w, i, _norm(w, two, h))
            continue
        a, b, gate, d, e, last = _modulation(w, f"blocks.{i}.adaLN_modulation", c, 6, mutant)
        h = h + gate * _attention(w, i, _norm(w, one, h) * (1 + b) + a, mutant)
        h = h + last * _mlp(w, i, _norm(w, two, h) * (1 + e) + d)
    h = _norm(w, "output_layer.norm_final", h)
    if timed:
        shift, scale = _modulation(w, "output_layer.adaLN_modulation", c, 2, mutant)
        h = h * (1 + scale) + shift
    return F.linear(h, w["output_layer.linear.weight"], w["output_layer.linear.bias"])


def log_score(kind: Kind, named: dict[str, Tensor], x: Tensor, sigma: Tensor, mutant: str = "") -> Tensor:
    """Return the log-score of a published model; entries whose ratio is 0 are −∞."""
    w = {name.removeprefix(kind.prefix): value for name, value in named.items()}
    e = torch.expm1(sigma)[:, None, None]
    if kind.layout == "sedd":
        z = output(w, x, sigma, mutant)
        if kind.graph == "absorb":
            z = z - e.log() - (0 if mutant == "no ln(D−1)" else math.log(kind.states - 1))
        return z.scatter(-1, x[..., None], 0.0)
    conditioned = kind.layout == "radd" or mutant == "conditioned on σ"
    log_p = output(w, x, sigma if conditioned else torch.zeros_like(sigma), mutant)[..., :V].log_softmax(-1)
    return log_p - e.log()  # at masked positions
