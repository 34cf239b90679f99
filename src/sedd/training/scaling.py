"""Expected bits per character of a run on text, from runs that were measured.

    bits = E + A N^−α + B C^−β

N is the number of weights of the blocks, C the characters of training, repeated ones counted. The measured runs are
those of benchmarks/results/scaling.jsonl: on text8 and Shakespeare, in characters, bytes and byte-pair encoding.

Reference: the form is that of Hoffmann et al. 2022, "Training Compute-Optimal Large Language Models", arXiv 2203.15556.
"""

import math

from sedd.config import RunConfig

MEASURED: tuple[tuple[int, int, float], ...] = (
    (98_304, 256_000, 4.0678),
    (98_304, 256_000, 4.1419),
    (98_304, 1_024_000, 3.3825),
    (98_304, 1_024_000, 3.4549),
    (98_304, 1_242_044, 3.1977),
    (98_304, 2_484_087, 2.8250),
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
    (393_216, 1_242_044, 3.0715),
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
)
"""Weights of the blocks, characters of training, bits per character."""
E, A, ALPHA, B, BETA = 1.0729, 0.67373, 0.15, 35.502, 0.20
ERROR = 0.14
"""Root mean square of the errors for runs that were left out of the fit."""
RANGE = 1.5
"""How far outside the measured weights, characters and characters per weight a run may be, as a factor."""
MAX_PASSES = 10.0
"""Passes over the data from which repeated characters are expected to be worth less."""
OBJECTIVES = ("score-entropy", "lambda-dce", "t-dce", "any-order")


def is_measured_kind(config: RunConfig) -> bool:
    """Whether a run is of the kind that was measured: text, absorbing noise, an objective whose value is the bound."""
    is_text = config.data.packing == "packed" and config.data.tokenizer.partition(":")[0] in ("bytes", "chars", "bpe")
    return is_text and config.noise.process == "absorbing" and config.objective in OBJECTIVES


def is_prose(text: str) -> bool:
    """Whether a text is one in words, of letters with spaces between them, as DNA and molecules are not."""
    letters, spaces = sum(map(str.isalpha, text)), sum(map(str.isspace, text))
    return letters + spaces > 0.75 * len(text) and 0.05 * len(text) < spaces < 0.35 * len(text)


def expected_bits(weights: int | float, characters: int | float, available: int | float) -> float | None:
    """Return the expected bits per character, or None where nothing comparable was measured.

    Args:
        weights: Weights of the blocks.
        characters: Characters of training.
        available: Characters of the data, NaN if unknown; many passes over it are not comparable.
    """
    ranges = (
        (weights, [size for size, _, _ in MEASURED]),
        (characters, [count for _, count, _ in MEASURED]),
        (characters / weights, [count / size for size, count, _ in MEASURED]),
    )
    is_near = all(min(measured) / RANGE <= value <= max(measured) * RANGE for value, measured in ranges)
    if not is_near or characters > MAX_PASSES * available:
        return None
    return E + A * math.pow(weights, -ALPHA) + B * math.pow(characters, -BETA)
