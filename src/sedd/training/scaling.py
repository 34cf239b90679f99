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

from sedd.config import RunConfig

RANGE = 1.5
"""How far outside the measured weights, characters and characters per weight a run may be, as a factor."""
MAX_PASSES = 10.0
"""Passes over the data from which repeated characters are expected to be worth less."""
OBJECTIVES = ("score-entropy", "lambda-dce", "t-dce", "any-order")


class Formula(NamedTuple):
    """E + A N^−α + B C^−β, fitted to runs of one kind."""

    e: float
    a: float
    alpha: float
    b: float
    beta: float
    error: float
    """Root mean square of the errors for runs that were left out of the fit."""
    measured: tuple[tuple[int, int, float], ...]
    """Weights of the blocks, characters of training, bits per character."""

    def expected_bits(self, weights: int | float, characters: int | float, available: int | float) -> float | None:
        """Return the expected bits per character, or None where nothing comparable was measured.

        Args:
            weights: Weights of the blocks.
            characters: Characters of training.
            available: Characters of the data, NaN if unknown; many passes over it are not comparable.
        """
        ranges = (
            (weights, [size for size, _, _ in self.measured]),
            (characters, [count for _, count, _ in self.measured]),
            (characters / weights, [count / size for size, count, _ in self.measured]),
        )
        is_near = all(min(measured) / RANGE <= value <= max(measured) * RANGE for value, measured in ranges)
        if not is_near or characters > MAX_PASSES * available:
            return None
        return self.e + self.a * math.pow(weights, -self.alpha) + self.b * math.pow(characters, -self.beta)


GENERAL = Formula(
    *(1.1008, 2.6752, 0.25, 35.065, 0.20),
    error=0.13,
    measured=(
        (98_304, 256_000, 4.0678),
        (98_304, 256_000, 4.1419),
        (98_304, 1_024_000, 3.3825),
        (98_304, 1_024_000, 3.4549),
        (98_304, 1_242_044, 3.3661),
        (98_304, 2_484_087, 2.9738),
        (98_304, 4_096_000, 3.0683),
        (147_456, 1_560_000, 3.2840),
        (147_456, 1_570_000, 3.2820),
        (147_456, 1_600_000, 3.3640),
        (147_456, 2_821_410, 2.9680),
        (147_456, 3_183_310, 3.0410),
        (147_456, 3_453_975, 2.9090),
        (331_776, 950_000, 3.4540),
        (393_216, 512_000, 3.6147),
        (393_216, 512_000, 4.1518),
        (393_216, 1_242_044, 3.2333),
        (393_216, 1_536_000, 3.2728),
        (393_216, 1_536_000, 3.5900),
        (393_216, 2_228_317, 2.9350),
        (589_824, 1_518_194, 3.0600),
        (786_432, 490_000, 3.6310),
        (786_432, 992_358, 3.4390),
        (786_432, 4_848_426, 2.8290),
        (1_327_104, 3_281_258, 2.7710),
        (1_327_104, 4_527_900, 2.7720),
        (25_165_824, 16_252_928, 2.4076),
        (25_165_824, 18_710_528, 2.4310),
        (25_165_824, 19_988_480, 2.3410),
        (25_165_824, 32_702_464, 2.2709),
        (25_165_824, 38_338_560, 2.1940),
        (25_165_824, 82_247_680, 2.0789),
        (25_165_824, 91_422_720, 2.0344),
        (25_165_824, 92_602_368, 2.0512),
        (25_165_824, 474_873_856, 1.7332),
        (56_623_104, 16_449_536, 2.3406),
        (56_623_104, 35_782_656, 2.2553),
        (56_623_104, 51_642_368, 2.1456),
    ),
)
SIZED = Formula(
    *(1.3981, 2.9896, 0.25, 16.155, 0.20),
    error=0.14,
    measured=(
        (98_304, 1_176_003, 2.6982),
        (98_304, 1_427_497, 2.4050),
        (98_304, 4_704_010, 2.4467),
        (98_304, 5_709_988, 2.1271),
        (589_824, 1_176_003, 2.6209),
        (589_824, 3_528_008, 2.4310),
        (589_824, 3_528_008, 2.4340),
        (589_824, 4_282_491, 2.1242),
        (1_327_104, 2_352_005, 2.4682),
        (1_327_104, 5_709_988, 2.0656),
        (1_327_104, 8_376_078, 2.3263),
    ),
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
