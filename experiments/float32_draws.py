"""Float32 draws at 50,257 tokens, where the model and the judge are exact: what they do to generative perplexity.

python experiments/float32_draws.py --out float32-draws.json        about 8 minutes on one CPU core

The tokens of a sequence are independent, with probabilities p_k ∝ 1/(k + 2.7) by rank k, as words have (Zipf 1949), and
the denoiser knows them. So ancestral sampling is exact at any number of steps, and the perplexity of its samples under
p itself is exp(H), H the entropy of p, whatever the number of steps. By the exponential race in float32 of published
samplers (`categorical.legacy_fp32`) it falls with the number of steps: a token whose probability in one step is below
about 6e-8, the resolution of its random numbers near 1, is hardly ever drawn.
"""

import argparse
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from quality_curves import PRECISIONS, draw_precision
from study_runs import Results
from torch import Tensor, nn

from sedd.parameterization import MeanModel
from sedd.process import Absorbing
from sedd.samplers.grid import Ancestral
from sedd.samplers.model import SamplingModel

VOCABULARY = 50_257
STEPS = (16, 64, 256, 1024, 4096)


def zipf(vocabulary: int) -> Tensor:
    """Return log p_k of p_k ∝ 1/(k + 2.7), k = 1 … vocabulary."""
    return (-torch.log(torch.arange(1, vocabulary + 1, dtype=torch.float64) + 2.7)).log_softmax(0)


class Unigram(nn.Module):
    """A network whose output is log p at every position: its hidden state is 1, its head has one column."""

    depends_on_sigma = False

    def __init__(self, log_p: Tensor) -> None:
        super().__init__()
        self.head = nn.Linear(1, len(log_p) + 1, bias=False)
        with torch.no_grad():
            self.head.weight.copy_(torch.cat([log_p, log_p.new_zeros(1)])[:, None])  # the mask's output is not used

    def hidden(self, x: Tensor, sigma: Tensor, valid: Tensor | None = None, packed: Any = None) -> Tensor:
        """Return 1 at every position."""
        return self.head.weight.new_ones(*x.shape, 1)

    def forward(self, x: Tensor, sigma: Tensor, valid: Tensor | None = None, **options: Any) -> Tensor:
        """Return log p at every position."""
        output: Tensor = self.head(self.hidden(x, sigma))
        return output


def draw(log_p: Tensor, steps: int, precision: str, count: int, seed: int) -> Tensor:
    """Draw ``count`` tokens by ancestral sampling in so many steps."""
    model = SamplingModel(MeanModel(Unigram(log_p), Absorbing(len(log_p))), fused=False)
    with draw_precision(precision):
        return Ancestral().sample(model, 1, count, seed=seed, steps=steps)[0]


def measure(log_p: Tensor, steps: int, precision: str, count: int, seed: int) -> dict[str, Any]:
    """Return the mean of −log p of the tokens drawn, its standard error and the distinct tokens."""
    start = time.perf_counter()
    drawn = draw(log_p, steps, precision, count, seed)
    nats = -log_p[drawn]
    return {
        "steps": steps,
        "draws": precision,
        "nats_per_token": round(nats.mean().item(), 4),
        "stderr": round(nats.std().item() / math.sqrt(count), 4),
        "rarest_rank": int(drawn.max()) + 1,
        "seconds": round(time.perf_counter() - start, 1),
    }


def table_lines(record: dict[str, Any]) -> list[str]:
    """Return the table of the results page: perplexity of the samples under the true probabilities, by steps."""
    rows = record["rows"].values()
    steps = sorted({row["steps"] for row in rows})
    lines = [
        f"| perplexity under the true probabilities; steps: | {' | '.join(map(str, steps))} |",
        "|---" * (len(steps) + 1) + "|",
    ]
    for precision in PRECISIONS:
        found = {row["steps"]: row for row in rows if row["draws"] == precision}
        cells = [_cell(found[n]) if n in found else "" for n in steps]
        lines.append(f"| {precision} draws | {' | '.join(cells)} |")
    truth = f"The perplexity of the data is {math.exp(record['entropy_nats']):,.0f}, whatever the number of steps."
    return [*lines, "", truth]


def _cell(row: dict[str, Any]) -> str:
    perplexity = math.exp(row["nats_per_token"])
    return f"{perplexity:,.0f} ± {perplexity * row['stderr']:,.0f}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all rows, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file of results; rows that are there are kept")
    parser.add_argument("--steps", default=",".join(map(str, STEPS)), help="numbers of steps, with commas between them")
    parser.add_argument("--count", type=int, default=256, help="tokens per row")
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    log_p, results = zipf(args.vocabulary), Results(args.out)
    entropy = -(log_p.exp() * log_p).sum().item()
    results.describe(vocabulary=args.vocabulary, tokens=args.count, entropy_nats=entropy, seed=args.seed)
    for steps in map(int, args.steps.split(",")):
        for precision in PRECISIONS:
            if (name := f"{steps} steps, {precision} draws") not in results:
                results.store(name, measure(log_p, steps, precision, args.count, args.seed))
    print("\n".join(table_lines(results.record)))


if __name__ == "__main__":
    main()
