"""Ablations of the recipe text8 at equal time: differences from the recipe over seeds, and their significance.

The runs are those of `benchmarks/ablations.py --equal-time`; `results_page.py` writes the table.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from objectives import holm

HEADS = ("variant", "difference, bits per character", "p", "speed", "characters")
VARIANTS = {
    "head dim 64": "heads of 64 instead of 128",
    "value embeddings": "value embeddings",
    "x0": "residual and x₀ scalars",
    "u-net": "U-net skips",
    "soft-cap 15": "soft cap of 15 on the logits",
    "no zero init": "residual branches not initialised to 0",
    "gated attention": "gated attention",
    "adamw 1.5e-3": "AdamW, learning rate 1.5e-3",
    "adamw 3e-3": "AdamW, 3e-3",
    "adamw 6e-3": "AdamW, 6e-3",
    "normalized muon": "Muon with rows normalized (NorMuon)",
    "lr 2e-3": "learning rate 2e-3 instead of 4e-3",
    "lr 8e-3": "learning rate 8e-3",
    "weight decay": "weight decay 0.1",
    "batch 128": "batch of 128 instead of 256",
    "batch 512": "batch of 512",
    "no ema": "no EMA",
    "ema 0.998, no decay": "EMA of 0.998 instead of a decay of the learning rate",
    "independent times": "independent times instead of stratified ones",
    "low-noise": "times `low-noise`",
    "bell": "times `bell`",
    "score": "score entropy (`score`) instead of λ-DCE (`mean`)",
    "mean, with time": "`mean` with time conditioning",
    "weights 1/t": "loss weights 1/t, those of the bound, instead of t^−1/2",
    "weights 1": "loss weights 1",
    "warmup 10": "warm-up of 10 steps instead of 50",
    "warmup 300": "warm-up of 300 steps",
    "decay half": "decay in the second half instead of from the start",
    "cosine": "cosine decay instead of linear",
}
"""The variants in words."""


class Difference(NamedTuple):
    """The difference of a variant from the recipe; ``p`` is corrected for the number of variants."""

    variant: str
    mean: float
    stderr: float
    p: float
    characters: float


def differences(rows: Sequence[Mapping[str, Any]]) -> list[Difference]:
    """Return the differences of all variants from the base, the best first.

    Bits are a mean of the variant, an effect of the seed that all variants share, and an error, whose deviation is that
    of what is left without the two. All variants are compared with the same base, so its error counts once for each of
    them. Tests are Student's, two-sided, corrected by Holm's method.
    """
    from scipy import stats

    seeds = sorted({row["seed"] for row in rows})
    bits = {(row["variant"], row["seed"]): row["bits"] for row in rows}
    names = list(dict.fromkeys(row["variant"] for row in rows))
    if len(seeds) < 2 or "base" not in names or len(bits) < len(names) * len(seeds):
        raise ValueError("every variant and the base need the same two seeds or more; add those that are missing")
    means = {name: statistics.mean(bits[name, seed] for seed in seeds) for name in names}
    effects = {seed: statistics.mean(bits[name, seed] - means[name] for name in names) for seed in seeds}
    squares = sum((bits[n, s] - means[n] - effects[s]) ** 2 for n in names for s in seeds)
    freedom = (len(names) - 1) * (len(seeds) - 1)
    stderr = math.sqrt(squares / freedom * 2 / len(seeds))
    others = [name for name in names if name != "base"]
    found = [means[name] - means["base"] for name in others]
    p = holm([float(2 * stats.t.sf(abs(difference) / stderr, freedom)) for difference in found])
    characters = [statistics.mean(r["tokens"] for r in rows if r["variant"] == name) for name in others]
    cells = zip(others, found, p, characters, strict=True)
    return sorted((Difference(n, d, stderr, q, c) for n, d, q, c in cells), key=lambda row: row.mean)


def table_rows(record: Mapping[str, Any]) -> list[list[str]]:
    """Return the cells of the table."""
    speeds, cells = record["tokens_per_second"], []
    for row in differences(record["rows"]):
        speed = speeds[record["alike"].get(row.variant, row.variant)] / speeds["base"]
        p = f"{row.p:.2g}" if row.p >= 1e-4 else "< 0.0001"
        shown = f"**{p}**" if row.p < 0.05 else p
        difference = f"{row.mean:+.4f} ± {row.stderr:.4f}".replace("-", "−")
        cells.append([VARIANTS[row.variant], difference, shown, f"{speed:.2f}", f"{row.characters / 1e6:.1f}M"])
    return cells


def note(record: Mapping[str, Any]) -> str:
    """State how the runs were made."""
    base = [row for row in record["rows"] if row["variant"] == "base"]
    bits = statistics.mean(row["bits"] for row in base)
    return (
        f"One {record['machine']['name']}; `benchmarks/ablations.py` at {record['commit']}, {record['date']}. The "
        f"recipe `text8` in float8 at {record['network']}, {len(base)} seeds, {record['base_steps']} steps, "
        f"{base[0]['tokens'] / 1e6:.1f}M characters: {bits:.4f} bits per character, the bound on "
        f"{record['sequences']:,} held-out sequences, with the same noise in all runs. Speed is that of the variant at "
        f"{record['speed_network']}, the size of the recipe, over the recipe's; a variant was trained for as many "
        "steps as it makes there in the time of the recipe's steps. Variants of the network have no kernels of their "
        "own. Positive differences are worse. The deviation between seeds is taken to be the same in all rows; p is "
        "two-sided, by Student's t with Holm's correction for all rows. What holds for so short a run need not hold "
        "for a longer one."
    )
