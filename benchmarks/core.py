"""Time of losses and categorical draws on this machine at vocabulary 50,257, beside straightforward implementations.

make bench                                     a table
.venv/bin/python benchmarks/core.py --json     a record, as kept in benchmarks/results/
"""

import argparse
import json
import platform
import subprocess
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from sedd import divergence, draws
from sedd.process import Absorbing, Process, Uniform, at_token

N, POSITIONS, ROWS = 50_257, 256, 256


def milliseconds(f: Callable[[], object]) -> float:
    """Return the median of repeated runs over two seconds."""
    return (
        Timer("f()", globals={"f": f}, num_threads=torch.get_num_threads()).blocked_autorange(min_run_time=2).median
        * 1e3
    )


def loss_cases(process: Process) -> dict[str, Callable[[], object]]:
    """Return loss and gradient in closed form, and with the ratio of every entry computed."""
    generator = torch.Generator().manual_seed(0)
    x_0 = torch.randint(N, (1, POSITIONS), generator=generator)
    sigma = torch.tensor([0.7])
    x_t = process.corrupt(x_0, sigma, generator)
    log_score = torch.randn(1, POSITIONS, process.num_states, generator=generator, requires_grad=True)
    y, diagonal = torch.arange(process.num_states), x_t[..., None]

    def backward(loss: Tensor) -> Tensor:
        return torch.autograd.grad(loss.sum(), log_score)[0]

    def dense() -> Tensor:
        P = process.transition(y, x_0[..., None], sigma)
        ratio = P / at_token(P, x_t)[..., None]
        entries = log_score.exp() - ratio * log_score + divergence.K(ratio)
        rates = process.rates_into(x_t, torch.float32).scatter(-1, diagonal, 0)
        return backward(rates * entries)

    return {
        "closed form": lambda: backward(process.score_entropy(log_score, x_t, x_0, sigma)),
        "ratios written out": dense,
    }


def draw_cases() -> dict[str, Callable[[], object]]:
    """Return draws of one token per row: ours, the float32 Gumbel race, torch's multinomial."""
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(ROWS, N, generator=generator).softmax(-1)
    x = torch.zeros(ROWS, dtype=torch.long)
    stay = (0.01 * p).index_fill(1, torch.tensor([0]), 0.99)
    return {
        "draw": lambda: draws.sample(p, generator),
        "step, one row in a hundred moves": lambda: draws.sample_next(x, stay, draws.uniforms((ROWS, 2), generator)),
        "legacy_fp32 (wrong distribution)": lambda: draws.legacy_fp32(p, generator),
        "torch.multinomial": lambda: torch.multinomial(p, 1, generator=generator),
    }


def main() -> None:
    """Measure everything and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON record")
    as_json = parser.parse_args().json
    groups = {
        f"score entropy and gradient, uniform, {POSITIONS} positions": loss_cases(Uniform(N)),
        f"score entropy and gradient, absorbing, {POSITIONS} positions": loss_cases(Absorbing(N)),
        f"draws, {ROWS} rows": draw_cases(),
    }
    measured = {group: {name: milliseconds(f) for name, f in cases.items()} for group, cases in groups.items()}
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    about = {
        "command": "python benchmarks/core.py --json",
        "commit": commit.stdout.strip(),
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "vocabulary": N,
    }
    if as_json:
        print(json.dumps({**about, "milliseconds": measured}, indent=1))
        return
    print("  ".join(f"{key}: {value}" for key, value in about.items()))
    for group, cases in measured.items():
        print(f"\n{group}")
        first = next(iter(cases.values()))
        for name, ms in cases.items():
            print(f"  {name:28s} {ms:9.2f} ms   {ms / first:6.2f} × the first")


if __name__ == "__main__":
    main()
