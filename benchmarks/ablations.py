"""Ablations: variants of a recipe, trained for equal wall-clock time and compared on the same noise.

python benchmarks/ablations.py FILE                                on a GPU: all variants, 30 seconds and 2 seeds each
python benchmarks/ablations.py FILE --only "base;x0;x0 + u-net" --seconds 60 --seeds 0,1,2
python benchmarks/ablations.py FILE --set model.width=64 --set train.batch_size=8 --seconds 5     anywhere
python benchmarks/ablations.py FILE --speeds speeds.json --steps 40    tokens per second of every variant
python benchmarks/ablations.py FILE --speeds speeds.json --equal-time 500 --set model.width=256 --set model.heads=2 \
    --part 0/6 --json rows-0.jsonl                                 one of six processes that share a GPU
python benchmarks/ablations.py --table FILE.jsonl …                the table of earlier results

FILE is a text in which the last 5/69 are held out, as in text8p: the first 69M characters of text8. Every run is a
training run as by `sedd train`, but with Muon as it was when most rows were stored (`StudyMuon`); in this process, so
that starting Python is not part of it, after three steps that are not counted, in which kernels are compiled. The bound
on held-out text has the same sequences, times and noise in every run, so a difference of two runs has a smaller error
than either. Variants of the network that lost exist only here.
At 8 × 256 on an H200 the host decides the speed of a run, so that equal times do not compare variants. ``--equal-time``
does: the speed of every variant is measured alone, at the size of the recipe, and a smaller network is then trained for
as many steps as the variant makes there while the base makes the steps given. Those runs can share a GPU. The results
page has the table with its significance.
"""

import argparse
import functools
import itertools
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import torch
from measure import free_memory
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (the conventional name)

from sedd.nn.transformer import AttentionContext, ModernBlock, Transformer
from sedd.ops import block_ops
from sedd.ops.block_ops import PackedTokens, ResidualBranch, Rotation, gather
from sedd.runtime import distributed
from sedd.tensors import compute_dtype
from sedd.training import batches, loop, optimizer, setup, validation
from sedd.training import trainer as trainer_module
from sedd.training.batches import Batch, TrainingDataLoader
from sedd.training.config import RunConfig
from sedd.training.datasets import open_datasets, prepare_data
from sedd.training.muon import Muon
from sedd.training.overrides import merge_config
from sedd.training.trainer import Trainer

FEATURES = ("network", "training")
"""Entries of a variant that are no configuration: code of this file."""
BASE: dict[str, Any] = {
    "data.val_fraction": 5 / 69,
    "train.precision": "float8",
    "train.eval_every": 0,
    "train.save_every": 0,
    "train.log_every": 50,
    "optim.decay_fraction": 1.0,
    "optim.weight_decay": 0.0,
}
"""What all runs have beside the recipe, which variants differ from; the last two it had when the rows were stored."""
UNIFORM = {"objective": "score-entropy", "noise.process": "uniform"}
VARIANTS: dict[str, dict[str, Any]] = {
    "base": {},
    "bfloat16": {"train.precision": "bfloat16"},
    "head dim 64": {"head_dim": 64},
    "score": {"objective": "score-entropy"},
    "mean, with time": {"objective": "mean"},
    "adamw 6e-4": {"optim.name": "adamw", "optim.lr": 6e-4},
    "adamw 1.5e-3": {"optim.name": "adamw", "optim.lr": 1.5e-3},
    "adamw 3e-3": {"optim.name": "adamw", "optim.lr": 3e-3},
    "adamw 6e-3": {"optim.name": "adamw", "optim.lr": 6e-3},
    "lr 5e-4": {"optim.lr": 5e-4},
    "lr 1e-3": {"optim.lr": 1e-3},
    "lr 2e-3": {"optim.lr": 2e-3},
    "lr 4e-3": {"optim.lr": 4e-3},
    "lr 8e-3": {"optim.lr": 8e-3},
    "batch 64": {"train.batch_size": 64},
    "batch 128": {"train.batch_size": 128},
    "batch 256": {"train.batch_size": 256},
    "batch 512": {"train.batch_size": 512},
    "width 512": {"model.width": 512, "head_dim": 128},
    "width 768": {"model.width": 768, "head_dim": 128},
    "width 1024": {"model.width": 1024, "head_dim": 128},
    "depth 4": {"model.depth": 4},
    "depth 12": {"model.depth": 12},
    "no n-grams": {"model.ngrams": 0},
    "bigrams": {"model.ngrams": 2},
    "trigrams": {"model.ngrams": 3},
    "no ema": {"optim.ema_decay": 0.0},
    "ema 0.998, no decay": {"optim.lr_schedule": "constant", "optim.ema_decay": 0.998},
    "ema 0.998": {"optim.ema_decay": 0.998},
    "cosine": {"optim.lr_schedule": "cosine"},
    "decay half": {"optim.decay_fraction": 0.5},
    "warmup 10": {"optim.warmup_steps": 10},
    "warmup 300": {"optim.warmup_steps": 300},
    "independent times": {"training": {"independent_times": True}},
    "low-noise": {"train.time_sampling": "low-noise"},
    "bell": {"train.time_sampling": "bell"},
    "weight decay": {"optim.weight_decay": 0.1},
    "beta2 0.95": {"optim.beta2": 0.95},
    "clip 10": {"optim.grad_clip": 10.0},
    "plain": {"network": {"plain": True}},
    "no zero init": {"network": {"random_branches": True}},
    "no norm, no zero init": {"model.embedding_norm": False},
    "x0": {"network": {"x0": True}},
    "u-net": {"network": {"unet": True}},
    "value embeddings": {"network": {"value_embeddings": True}},
    "conv input": {"network": {"conv": "input"}},
    "conv": {"network": {"conv": "all"}},
    "soft-cap 15": {"network": {"soft_cap": 15.0}, "training": {"soft_cap": 15.0}},
    "not fused": {"network": {}, "training": {"soft_cap": 0.0}},
    "weights 1/t": {"train.loss_weighting": 0.0},
    "weights 1": {"train.loss_weighting": 1.0},
    "complementary masks": {"training": {"complementary": True}},
    "adamw lr x 4": {"training": {"adamw_lr": 4.0}},
    "adamw lr x 1/4": {"training": {"adamw_lr": 0.25}},
    "adamw lr x 16": {"training": {"adamw_lr": 16.0}},
    "gated attention": {"network": {"gate": True}},
    "normalized muon": {"training": {"normalized_muon": True}},
    "split qkv": {"training": {"split_qkv": 1}},
    "split 6 heads": {"training": {"split_qkv": 6}},
    "uniform": UNIFORM,
    "uniform, geometric": {**UNIFORM, "noise.schedule": "geometric"},
    "uniform, low-noise": {**UNIFORM, "train.time_sampling": "low-noise"},
    "uniform, bell": {**UNIFORM, "train.time_sampling": "bell"},
    "uniform, mean": {"objective": "score-entropy", "noise.process": "uniform", "model.parameterization": "mean"},
}
STUDY = (
    *("base", "head dim 64", "value embeddings", "x0", "u-net", "soft-cap 15", "no zero init", "gated attention"),
    *("adamw 1.5e-3", "adamw 3e-3", "adamw 6e-3", "normalized muon", "lr 2e-3", "lr 8e-3", "weight decay"),
    *("batch 128", "batch 512", "no ema", "ema 0.998, no decay", "independent times", "low-noise", "bell"),
    *("score", "mean, with time", "weights 1/t", "weights 1", "warmup 10", "warmup 300", "decay half", "cosine"),
)
"""The variants of ``--equal-time``."""
SLOWER = (
    *("base", "head dim 64", "value embeddings", "x0", "u-net", "soft-cap 15", "gated attention", "adamw 3e-3"),
    *("normalized muon", "batch 128", "batch 512", "score", "mean, with time"),
)
"""Those of them whose speed differs from the base's, but for other learning rates of AdamW, which have its speed."""


# Variants of the network -----------------------------------------------------------------------------------


class ShiftedSum(nn.Module):
    """A depthwise convolution over positions, as a sum of shifted copies; initialised to the identity."""

    def __init__(self, width: int, reach: int = 2) -> None:
        super().__init__()
        self.reach = reach
        self.taps_embed = nn.Parameter(torch.zeros(2 * reach + 1, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return x + Σ_j tap_j · x shifted by j."""
        taps, length = self.taps_embed.to(x.dtype), x.shape[1]
        padded = F.pad(x, (0, 0, self.reach, self.reach))
        return x + sum(taps[j] * padded[:, j : j + length] for j in range(2 * self.reach + 1))


class VariantBlock(ModernBlock):  # type: ignore[misc]  # final for users of the package
    """A block that also reads the embeddings x0 and the stream of an earlier block."""

    def __init__(self, width: int, heads: int, *rest: Any) -> None:
        super().__init__(width, heads, *rest)
        features = Variant.features
        self.x0: Tensor | None = None
        self.skip: Tensor | None = None
        self.stream: Tensor | None = None
        self.adds_skips = bool(features.get("unet"))
        self.gains = nn.Parameter(torch.tensor([1.0, 0.0])) if features.get("x0") else None
        self.skip_gain = nn.Parameter(torch.tensor(0.2)) if features.get("unet") else None
        self.value_gain = nn.Parameter(torch.zeros(width)) if features.get("value_embeddings") else None
        self.conv = ShiftedSum(width) if features.get("conv") == "all" else None
        self.gate_embed = nn.Parameter(torch.zeros(heads, width)) if features.get("gate") else None
        if features.get("random_branches"):
            self.out.bound, self.down.bound = width**-0.5, (4 * width) ** -0.5

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        branch: ResidualBranch | None,
        c: Tensor | None,
        context: AttentionContext,
        packed: PackedTokens | None = None,
    ) -> tuple[Tensor, ResidualBranch]:
        """Compute the block as `Block.forward` does, without dropout."""
        w = self.block_weights()
        dtype = compute_dtype(w.qkv.weight)
        backend = block_ops.select_backend(x.device.type, dtype)
        attention_adaln = mlp_adaln = attention_gate = mlp_gate = None
        if w.modulation is not None:
            shift1, scale1, attention_gate, shift2, scale2, mlp_gate = w.modulation(c).chunk(6, -1)
            attention_adaln, mlp_adaln = (shift1, scale1), (shift2, scale2)
        if branch is not None and (self.gains is not None or self.adds_skips):
            y = branch.y if branch.gate is None else branch.gate[:, None].to(branch.y.dtype) * branch.y
            x, branch = x + y, None
            if self.gains is not None and self.x0 is not None:
                gains = self.gains.to(x.dtype)
                x = gains[0] * x + gains[1] * self.x0
            self.stream = x
            if self.skip_gain is not None and self.skip is not None:
                x = x + self.skip_gain.to(x.dtype) * self.skip
        x, n, n_fp8 = backend.residual_norm_modulate(x, branch, w.norms[0], attention_adaln, dtype, None, self.use_fp8)
        if self.conv is not None:
            n, n_fp8 = self.conv(n), None
        q, k, v = backend.qkv_rotary(n, w.qkv.weight, self.heads, context.rotation, w.qk_scale, n_fp8)
        if self.value_gain is not None and self.x0 is not None:
            v = v + (self.value_gain * self.x0).to(v.dtype).view_as(v)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=context.mask, is_causal=context.causal)
        attended = attended.transpose(1, 2).flatten(-2)
        if self.gate_embed is not None:  # one gate per head, 1 at the start (Qiu et al. 2025, arXiv 2505.06708)
            gate = 2 * torch.sigmoid(F.linear(n, self.gate_embed.to(n.dtype)))
            attended = (attended.unflatten(-1, (self.heads, -1)) * gate[..., None]).flatten(-2)
        if packed is not None:
            x, attended = gather(x, packed), gather(attended, packed)
        branch = ResidualBranch(backend.linear(attended, w.out.weight), attention_gate)
        x, n, n_fp8 = backend.residual_norm_modulate(x, branch, w.norms[1], mlp_adaln, dtype, packed, self.use_fp8)
        y = backend.mlp(n, (w.up.weight, w.up.bias), w.down.weight, w.activation, n_fp8)
        return x, ResidualBranch(y, mlp_gate)


class Variant(Transformer):
    """The modern network with variants; all blocks but the last run as CUDA graphs, as they do without."""

    block_class, is_reference = VariantBlock, False
    features: ClassVar[dict[str, Any]] = {}

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.input_conv = ShiftedSum(options["width"]) if self.features.get("conv") == "input" else None
        # a graph needs the gradient of every weight: no gain where it has nothing to scale
        self.blocks[0].gains = None
        for block in self.blocks[: math.ceil(len(self.blocks) / 2)]:
            block.skip_gain = None

    def forward(self, *args: Any, **options: Any) -> Tensor:
        """Return the network's output, its logits capped by cap·tanh(·/cap) if there is a cap."""
        output, cap = super().forward(*args, **options), self.features.get("soft_cap")
        return output if cap is None else cap * torch.tanh(output / cap)

    def _first_blocks(
        self, h: Tensor, c: Tensor | None, context: AttentionContext
    ) -> tuple[Tensor, ResidualBranch | None]:
        """Run all blocks but the last, those in the second half with the stream of their counterpart."""
        x0, depth = h, len(self.blocks)
        c, branch = None if c is None else c.view_as(c), None
        for i, block in enumerate(self.blocks[:-1]):
            block.x0, block.skip = x0, self.blocks[depth - 1 - i].stream if i >= depth / 2 else None
            h, branch = block(h, branch, c, context)
        return h, branch

    def trunk(
        self,
        h: Tensor,
        sigma: Tensor,
        valid: Tensor | None,
        rotation: Rotation,
        packed: PackedTokens | None = None,
    ) -> Tensor:
        """Compute the hidden states from the embeddings."""
        h = h if self.input_conv is None else self.input_conv(h)
        self.blocks[-1].x0 = h
        return super().trunk(h, sigma, valid, rotation, packed)


@contextmanager
def network_features(features: dict[str, Any] | None) -> Iterator[None]:
    """Build the network with these features, if there are any."""
    if features is None:
        yield
        return
    before = setup.ARCHITECTURES["modern"]
    Variant.features = features
    setup.ARCHITECTURES["modern"] = Variant
    try:
        yield
    finally:
        setup.ARCHITECTURES["modern"] = before


# Variants of training --------------------------------------------------------------------------------------


class ComplementaryMasks(TrainingDataLoader):
    """Half as many sequences, each twice: what is masked in one copy is visible in the other."""

    def __getitem__(self, step: int) -> Batch:
        """Build the batch of a step under λ-DCE."""
        half = TrainingDataLoader(**{**vars(self), "batch_size": self.batch_size // 2})[step]
        other = torch.where(half.x_t == self.setup.process.vocab_size, half.x_0, self.setup.process.vocab_size)
        columns = (half.x_0, other, 1 - half.t, half.weight, half.valid, half.label)
        joined = (torch.cat(pair) for pair in zip(half[:-2], columns, strict=True))
        counts = torch.cat([half.loss_count, half.x_0.shape[1] - half.loss_count])
        return Batch._make((*joined, counts, 2 * half.tokens))


class StudyMuon(Muon):
    """Muon as it was when the rows of the study were stored, with what was added to it since as options."""

    normalized: ClassVar[bool] = False
    split: ClassVar[int] = 0
    """Into how many matrices queries, keys and values are each divided; 0: they are one matrix."""

    def __init__(self, groups: list[dict[str, Any]], **options: Any) -> None:
        groups = [{**g, "parts": max(1, self.split * g["parts"])} if g["parts"] > 1 else g for g in groups]
        super().__init__(groups, beta2=0.95 if self.normalized else None, **options)


def _set_learning_rate(optimizers: list[torch.optim.Optimizer], lr: float, factor: float) -> None:
    for each in optimizers:
        for group in each.param_groups:
            group["lr"] = lr * (factor if isinstance(each, torch.optim.AdamW) else 1)


@contextmanager
def training_features(features: dict[str, Any]) -> Iterator[None]:
    """Train with these features, if there are any."""
    before = optimizer.set_learning_rate, trainer_module.TrainingDataLoader, trainer_module.fused_loss
    stratified = batches.stratified
    if factor := features.get("adamw_lr"):
        optimizer.set_learning_rate = functools.partial(_set_learning_rate, factor=factor)
    if features.get("complementary"):
        trainer_module.TrainingDataLoader = ComplementaryMasks  # type: ignore[misc]
    optimizer_class = optimizer.Muon
    StudyMuon.normalized, StudyMuon.split = bool(features.get("normalized_muon")), features.get("split_qkv", 0)
    optimizer.Muon = StudyMuon  # type: ignore[misc,assignment]
    if features.get("independent_times"):
        batches.stratified = lambda count, generator: torch.rand(count, generator=generator)
    if "soft_cap" in features:
        trainer_module.fused_loss = lambda *_: None  # type: ignore[assignment]
    try:
        yield
    finally:
        optimizer.set_learning_rate, trainer_module.TrainingDataLoader, trainer_module.fused_loss = before
        batches.stratified, optimizer.Muon = stratified, optimizer_class  # type: ignore[misc]


# Runs ------------------------------------------------------------------------------------------------------


def merged(
    variant: dict[str, Any], options: dict[str, Any], args: argparse.Namespace, seed: int, steps: int | None
) -> RunConfig:
    """Return the configuration of a run: for so many steps, or for ``args.seconds`` if None."""
    values = {**BASE, **options, **{k: v for k, v in variant.items() if k not in FEATURES}}
    head_dim = values.pop("head_dim", None)
    sets = [f"{name}={value}" for name, value in values.items()]
    config = merge_config({"sources": [args.file[0]], "seed": seed}, recipe=args.recipe, sets=sets)
    if head_dim is not None:
        config.model.heads = config.model.width // head_dim
    config.budget.steps, config.budget.minutes = steps, None if steps else args.seconds / 60
    return config


def train(config: RunConfig, variant: dict[str, Any], sequences: int) -> dict[str, Any]:
    """Train once; return bounds in bits per character and counts."""
    config.train.eval_sequences = 1
    free_memory(config_device())
    rates: list[float] = []

    def on_event(kind: str, record: dict[str, Any]) -> None:
        if "tokens_per_second" in record:
            rates.append(record["tokens_per_second"])

    with (
        distributed.process_group() as ranks,
        network_features(variant.get("network")),
        training_features(variant.get("training", {})),
        tempfile.TemporaryDirectory() as folder,
    ):
        prepared = prepare_data(config)
        trainer = Trainer(config, *open_datasets(config, lambda: prepared, ranks), ranks)
        started = time.perf_counter()
        loop._train(trainer, Path(folder), [], lambda record: None, on_event)
        wall = time.perf_counter() - started
        bounds = {}
        for name, model in (("ema", trainer.ema_model), ("last", trainer.model)):
            trainer.network.eval()
            bounds[name] = validation.validation_bound(
                lambda valid, label, model=model: trainer.bind(model, valid, label),
                trainer.setup,
                trainer.validation_blocks,
                ranks,
                count=sequences,
                batch_size=config.train.batch_size,
                seed=0,
            )
        ids = validation.sequence_ids(trainer.validation_blocks, sequences)
        bits = {name: trainer.validation_blocks.bits_per_char(bound.nats, ids) for name, bound in bounds.items()}
    state = trainer.state
    return {
        "bits": bits["ema"],
        "bits_last_weights": bits["last"],
        "stderr": bounds["ema"].stderr / math.log(2),
        "steps": state.step,
        "tokens": state.tokens,
        "seconds": state.seconds,
        "wall": wall,
        "tokens_per_second": statistics.median(rates) if rates else None,
        "rates": [round(rate) for rate in rates[:: max(1, len(rates) // 12)]],
        "parameters": sum(p.numel() for p in trainer.network.parameters()),
    }


def table(results: list[dict[str, Any]]) -> None:
    """Print, for each set of common options, the mean of every variant and its difference from the base over seeds."""

    def common(record: dict[str, Any]) -> str:
        return " ".join([*(f"{k}={v}" for k, v in record["options"].items()), record.get("commit", "")]).strip()

    for options, group in itertools.groupby(sorted(results, key=common), key=common):
        print(f"\n{options}" if options else "")
        _group_table(list(group))


def _group_table(results: list[dict[str, Any]]) -> None:
    base = {r["seed"]: r["bits"] for r in results if r["variant"] == "base"}
    groups = {name: [r for r in results if r["variant"] == name] for name in {r["variant"]: None for r in results}}
    print(f"{'variant':26s} {'bits/char':>9s} {'last':>7s} {'M chars':>8s} {'M/s':>6s}   difference from base, by seed")
    for name, runs in sorted(groups.items(), key=lambda group: statistics.mean(r["bits"] for r in group[1])):
        bits, last, tokens = (statistics.mean(r[k] for r in runs) for k in ("bits", "bits_last_weights", "tokens"))
        rate = statistics.mean(r["tokens_per_second"] or 0 for r in runs)
        differences = [r["bits"] - base[r["seed"]] for r in runs if r["seed"] in base and name != "base"]
        text = " ".join(f"{d:+.4f}" for d in differences)
        if len(differences) > 1:
            error = statistics.stdev(differences) / math.sqrt(len(differences))
            text += f"   mean {statistics.mean(differences):+.4f} ± {error:.4f}"
        print(f"{name:26s} {bits:9.4f} {last:7.4f} {tokens / 1e6:8.1f} {rate / 1e6:6.3f}   {text}", flush=True)


def main() -> None:
    """Train all variants and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="+", help="the text; with --table, files of results")
    parser.add_argument("--table", action="store_true", help="print the table of earlier results")
    parser.add_argument("--only", help="names of variants, with ; between them; a + b joins two")
    parser.add_argument("--recipe", default="text8", help="the configuration that variants differ from")
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--steps", type=int, help="steps per run, instead of seconds")
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--speeds", type=Path, help="JSON file of tokens per second by variant, written by --steps")
    parser.add_argument("--equal-time", type=int, help="steps of the base; of a variant, in proportion to its speed")
    parser.add_argument("--part", default="0/1", help="k/n: every n-th run from the k-th on, for n processes")
    parser.add_argument("--sequences", type=int, default=4096, help="held-out sequences")
    parser.add_argument("--set", action="append", default=[], help="configuration of all variants, as in optim.lr=1e-3")
    parser.add_argument("--json", type=Path, help="append a record of each run to this file")
    parser.add_argument("--until", type=float, default=math.inf, help="start no run later than this many seconds")
    args = parser.parse_args()
    if args.table:
        table([json.loads(line) for file in args.file for line in Path(file).read_text().splitlines()])
        return
    options = dict(item.split("=", 1) for item in args.set)
    default = VARIANTS if args.speeds is None else SLOWER if args.equal_time is None else STUDY
    names = args.only.split(";") if args.only else list(default)
    speeds: dict[str, float] = json.loads(args.speeds.read_text()) if args.speeds and args.speeds.exists() else {}
    if args.equal_time is not None and "base" not in speeds:
        parser.error("--equal-time needs --speeds with the speed of the base; measure it with --steps 40 first")
    results, started, compiled = [], time.perf_counter(), set[str]()
    part, parts = map(int, args.part.split("/"))
    runs = list(itertools.product(map(int, args.seeds.split(",")), names))[part::parts]
    for seed, name in runs:
        if time.perf_counter() - started + args.seconds > args.until:
            print("no time for", seed, name, file=sys.stderr)
            continue
        variant = joined_variant(name)
        steps = args.steps
        if args.equal_time is not None:
            batch = merged({}, options, args, seed, 1).train.batch_size
            alike = "adamw 3e-3" if variant.get("optim.name") == "adamw" else name
            ratio = speeds.get(alike, speeds["base"]) / speeds["base"]
            steps = round(args.equal_time * ratio * batch / variant.get("train.batch_size", batch))
        config = merged(variant, options, args, seed, steps)
        try:
            if name not in compiled and steps is None:
                train(merged(variant, options, args, seed, 3), variant, 8)
                compiled.add(name)
            result = train(config, variant, args.sequences)
        except (ValueError, RuntimeError) as error:
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            continue
        record = {"variant": name, "seed": seed, "recipe": args.recipe, "options": options, **result}
        record["config"] = asdict(config)
        results.append(record)
        print(
            f"{name:26s} seed {seed}: {result['bits']:.4f} ± {result['stderr']:.4f} (last weights "
            f"{result['bits_last_weights']:.4f}), {result['tokens'] / 1e6:.1f}M in {result['seconds']:.1f} s "
            f"({result['wall']:.1f}), {(result['tokens_per_second'] or 0) / 1e6:.3f}M/s",
            file=sys.stderr,
            flush=True,
        )
        if args.json:
            with args.json.open("a") as file:
                file.write(json.dumps(record) + "\n")
        if args.speeds and args.equal_time is None and result["tokens_per_second"]:
            speeds[name] = result["tokens_per_second"]
            args.speeds.write_text(json.dumps(speeds, indent=1) + "\n")
    table(results)


def joined_variant(name: str) -> dict[str, Any]:
    """Return the configuration and features of a variant, or of several joined by +."""
    parts = [VARIANTS[part] for part in name.split(" + ")]
    variant: dict[str, Any] = {k: v for part in parts for k, v in part.items() if k not in FEATURES}
    for kind in FEATURES:
        if any(kind in part for part in parts):
            variant[kind] = {k: v for part in parts for k, v in part.get(kind, {}).items()}
    return variant


def config_device() -> str:
    """Return the device of runs."""
    return "cuda" if torch.cuda.is_available() else "cpu"


if __name__ == "__main__":
    main()
