"""Arrays of integers: learn the 288 Sudoku grids of 4 × 4 cells, generate grids, and solve a puzzle by infilling.

Each row of the array is a grid of sixteen numbers 0 … 3. All grids are equally likely, so the entropy is ln 288.
"""

import argparse
import itertools
import math
import tempfile
from pathlib import Path

import numpy as np

from sedd import data, samplers
from sedd.loading import load_model
from sedd.tokenizer import Integers
from sedd.training import loop
from sedd.training.config import BudgetConfig, DataConfig, ModelConfig, OptimConfig, RunConfig, TrainConfig

Array = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


def is_solved(grid: Array) -> bool:
    """Return whether every row, column and block has each number once."""
    cells = grid.reshape(4, 4)
    blocks = cells.reshape(2, 2, 2, 2).swapaxes(1, 2).reshape(4, 4)
    return all((np.sort(lines) == np.arange(4)).all() for lines in (cells, cells.T, blocks))


def all_grids() -> Array:
    """Return all valid grids, one per row."""
    lines = list(itertools.permutations(range(4)))
    pairs = [
        a + b for a in lines for b in lines if all(set(a[i : i + 2] + b[i : i + 2]) == set(range(4)) for i in (0, 2))
    ]
    grids = (np.array(upper + lower) for upper in pairs for lower in pairs)
    return np.array([grid for grid in grids if is_solved(grid)])


def main(out: Path, steps: int) -> None:
    """Write the array, train, compare the bound with the entropy, sample, and solve a puzzle."""
    grids = all_grids()
    np.save(out / "grids.npy", np.random.default_rng(0).permutation(np.repeat(grids, 20, axis=0)))
    config = RunConfig(
        data=DataConfig([str(out / "grids.npy")], tokenizer="ints:4", packing="lines"),
        model=ModelConfig(width=64, depth=3, heads=4, seq_len=16),
        optim=OptimConfig("muon", lr=1e-2, warmup_steps=20, ema_decay=0.98),
        budget=BudgetConfig(steps=steps),
        train=TrainConfig(batch_size=64, eval_every=0, eval_sequences=4000, save_every=0),
        objective="lambda-dce",
    ).resolved()
    data.prepare(config.data.sources, out / "data", Integers(size=4), packing="lines", length=16)
    end = loop.run(config, lambda: out / "data", out / "run", resume=False, on_event=lambda kind, record: None)
    print(f"{len(grids)} grids, entropy {math.log(len(grids)):.3f} nats")
    bound, error = (16 * end.validation[name] for name in ("bound", "bound_stderr"))
    print(f"validation bound {bound:.3f} ± {error:.3f} nats per grid")

    loaded = load_model(out / "run")
    settings = samplers.SamplingSettings(steps=None)  # one cell at a time
    sampling_run = samplers.SamplingRun(loaded.model, settings)
    samples = [np.array(row.ids) for row in sampling_run.sample(samplers.empty(100, 16))]
    print(f"{sum(map(is_solved, samples))} of 100 sampled grids are valid")
    puzzle = "0 {4} 2 {4} 1 {2} 3 {2}"
    ids = samplers.template.template_ids(puzzle, loaded.tokenizer)
    prompt = samplers.template.prompt_from_ids([ids] * 20)
    fillings = [np.array(row.ids) for row in sampling_run.sample(prompt)]
    solved = [grid for grid in fillings if is_solved(grid)]
    print(f"the puzzle {puzzle} is solved by {len(solved)} of 20 samples")
    for line in (solved or fillings)[0].reshape(4, 4):
        print("  ", *line)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=800, help="training steps")
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder), parser.parse_args().steps)
