"""Generative quality on small distributions: samples of the judge's own distribution cost its entropy."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import tiny_judges
import torch

from sedd import exact, process, samplers
from sedd.evaluation import quality
from sedd.evaluation.quality import judges
from sedd.evaluation.quality.judge import Judge, count_tokens, score_samples
from sedd.evaluation.quality.metrics import compute_metrics
from sedd.evaluation.quality.samples import Sample, SampleSet
from sedd.exact import all_sequences

LENGTH = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 over a, b, c, ab and the start: 5⁴ rows of four tokens."""
    return tiny_judges.save(tmp_path_factory.mktemp("judge"), alphabet="abc")


def rows_of(judge: Judge) -> list[np.ndarray]:
    return list(all_sequences(judge.vocab_size, LENGTH).numpy())


def probabilities(judge: Judge) -> np.ndarray:
    return np.exp(-score_samples(judge, rows_of(judge), batch=256))


def test_the_costs_of_all_rows_are_a_distribution(folder: Path) -> None:
    """Σ e^−cost = 1 over all rows; where the first token is skipped, over all rows that begin alike."""
    scored, skipped = (judges.load_judge(str(folder), first_token=first) for first in ("scored", "skipped"))
    assert probabilities(scored).sum() == pytest.approx(1, abs=1e-5)
    assert probabilities(skipped).reshape(5, -1).sum(-1) == pytest.approx(np.ones(5), abs=1e-5)


def judged(judge: Judge, distribution: np.ndarray, draw: np.random.Generator, count: int = 4000) -> dict[str, float]:
    rows = rows_of(judge)
    drawn = [rows[i] for i in draw.choice(len(rows), count, p=distribution / distribution.sum())]
    return compute_metrics(drawn, score_samples(judge, drawn, batch=256), count_tokens(judge, drawn))


def test_samples_of_the_judges_own_distribution_cost_its_entropy(folder: Path) -> None:
    """Perplexity by token is exp(H/L) within 5 standard errors (false alarm 6e-7).

    The mutant, a hidden temperature of 0.7, lowers both the perplexity and the entropy by 20 standard errors or more.
    """
    judge, draw = judges.load_judge(str(folder), first_token="scored"), np.random.default_rng(0)
    distribution = probabilities(judge)
    right, cold = judged(judge, distribution, draw), judged(judge, distribution ** (1 / 0.7), draw)
    truth = math.exp(-(distribution * np.log(distribution)).sum() / LENGTH)
    value, stderr = right["gen_ppl_by_token"], right["stderr_gen_ppl_by_token"]
    assert abs(value - truth) < 5 * stderr
    assert cold["gen_ppl_by_token"] < truth - 20 * stderr
    assert cold["entropy_nats"] < right["entropy_nats"] - 20 * right["stderr_entropy_nats"]
    assert right["gen_ppl_by_sample"] > value


class ExactJudge(Judge):
    """A known distribution as a judge: a token costs what its prefix costs, less the cost of the prefix before it."""

    name, sha256, precision, context_length, skips_first_token = "exact", "", "float64", None, False

    def __init__(self, distribution: torch.Tensor) -> None:
        self.distribution, self.vocab_size = distribution, distribution.shape[0]

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.array([int(c) for c in text]) for text in texts]

    def decode(self, ids: object) -> str:
        return "".join(map(str, np.asarray(ids)))

    def token_nll(self, x: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        length = self.distribution.ndim
        prefixes = [torch.zeros(len(x), dtype=torch.float64)]
        for end in range(1, length + 1):
            tail = self.distribution.sum(tuple(range(end, length))) if end < length else self.distribution
            prefixes.append(-tail[tuple(x[:, :end].T)].log())
        return torch.stack(prefixes, -1).diff(dim=-1)

    def features(self, x: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        return x.float()


def test_samples_of_an_exact_score_have_the_perplexity_of_the_entropy() -> None:
    """Samples of an exact score without a grid have perplexity exp(H/L) under their own distribution, within 5 errors.

    Samples of a single large step have another distribution and are more than 5 standard errors off.
    """
    g = torch.Generator().manual_seed(3)
    p = torch.rand(3, 3, 3, generator=g, dtype=torch.float64) ** 4
    p = p / p.sum()
    distribution, noise = exact.Distribution(p), process.Absorbing(vocab_size=3)
    truth = math.exp(float(distribution.entropy()) / 3)

    def quality_of(steps: int | None) -> dict[str, float]:
        sampling_run = samplers.SamplingRun(
            exact.Score(distribution, noise), samplers.SamplingSettings("first-hitting", steps)
        )
        drawn = sampling_run.sample(samplers.empty(3000, 3), batch=500)
        texts = [Sample("".join(map(str, row.ids)), row.ids) for row in drawn]
        return quality.evaluate_samples(
            SampleSet(texts, "toy", facts=sampling_run.describe()), ExactJudge(p), batch=500
        )

    right, coarse = quality_of(None), quality_of(1)
    assert abs(right["gen_ppl_by_token"] - truth) < 5 * right["stderr_gen_ppl_by_token"]
    assert coarse["gen_ppl_by_token"] > truth + 5 * coarse["stderr_gen_ppl_by_token"]
    assert (right["steps"], right["draw_precision"]) == ("inf", "float64")
