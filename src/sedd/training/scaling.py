"""Expected bits per character of a run on text, from runs that were measured.

    bits = E + A N^−α + B C^−β

N is the number of weights of the blocks, C the characters of training, repeated ones counted. The measured runs are
those of benchmarks/results/scaling.jsonl: on text8 and Shakespeare, in characters, bytes and byte-pair encoding. Runs
in byte-pair encoding with n-gram embeddings and a loss weighting, as runs without a recipe are on a CPU, learn faster;
they have a formula of their own with the same exponents, from benchmarks/results/scaling-sized.jsonl.

Reference: the form is that of Hoffmann et al. 2022, "Training Compute-Optimal Large Language Models", arXiv 2203.15556.
"""

import math
from typing import NamedTuple

from sedd.training.config import RunConfig

RANGE = 1.5
"""How far outside the measured weights, characters and characters per weight a run may be, as a factor."""
MAX_PASSES = 10.0
"""Passes over the data from which repeated characters are expected to be worth less."""
OBJECTIVES = ("score-entropy", "lambda-dce", "t-dce", "any-order")


class Formula(NamedTuple):
    """E + A N^−α + B C^−β, fitted to runs of one kind, and the least and the most that they had."""

    e: float
    a: float
    alpha: float
    b: float
    beta: float
    error: float
    """Root mean square of the errors for runs that were left out of the fit."""
    weights: tuple[float, float]
    characters: tuple[float, float]
    characters_per_weight: tuple[float, float]

    def expected_bits(self, weights: int | float, characters: int | float, available: int | float) -> float | None:
        """Return the expected bits per character, or None where nothing comparable was measured.

        Args:
            available: Characters of the data, NaN if unknown; many passes over it are not comparable.
        """
        values = weights, characters, characters / weights
        ranges = self.weights, self.characters, self.characters_per_weight
        is_near = all(low / RANGE <= value <= high * RANGE for value, (low, high) in zip(values, ranges, strict=True))
        if not is_near or characters > MAX_PASSES * available:
            return None
        return self.e + self.a * math.pow(weights, -self.alpha) + self.b * math.pow(characters, -self.beta)


GENERAL = Formula(
    *(1.1008, 2.6752, 0.25, 35.065, 0.20),
    error=0.13,
    weights=(98_304, 56_623_104),
    characters=(256_000, 474_873_856),
    characters_per_weight=(16_449_536 / 56_623_104, 4_096_000 / 98_304),
)
SIZED = Formula(
    *(1.3981, 2.9896, 0.25, 16.155, 0.20),
    error=0.14,
    weights=(98_304, 1_327_104),
    characters=(1_176_003, 8_376_078),
    characters_per_weight=(2_352_005 / 1_327_104, 5_709_988 / 98_304),
)


def formula_of(config: RunConfig) -> Formula | None:
    """Return the formula of runs of this kind; None if there is none.

    Measured were text, absorbing noise, and objectives whose value is the bound.
    """
    tokenizer = config.data.tokenizer.partition(":")[0]
    is_text = config.data.packing == "packed" and tokenizer in ("bytes", "chars", "bpe")
    if config.network or not is_text or config.noise.process != "absorbing" or config.objective not in OBJECTIVES:
        return None
    is_sized = tokenizer == "bpe" and config.model.ngrams and config.train.loss_weighting
    return SIZED if is_sized else GENERAL


def is_prose(text: str) -> bool:
    """Whether a text is one in words, of letters with spaces between them, as DNA and molecules are not."""
    letters, spaces = sum(map(str.isalpha, text)), sum(map(str.isspace, text))
    return letters + spaces > 0.75 * len(text) and 0.05 * len(text) < spaces < 0.35 * len(text)
