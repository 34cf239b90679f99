"""On a GPU: rows share forward passes by CUDA graphs, and what a row draws does not depend on the rows beside it."""

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn")  # an extra, which a machine with a GPU may lack
sys.path.insert(0, str(Path(__file__).parents[1]))
from sample import SampleSetting, random_model
from serving import Collector, running

from sedd.samplers import SamplingRun, SamplingSettings
from sedd.serve.jobs import Row
from sedd.serve.limits import Limits

pytestmark = pytest.mark.gpu
SMALL = SampleSetting(recipe="tiny", length=64, vocab_size=300, precision="bfloat16", device="cuda")


@pytest.mark.parametrize(
    ("objective", "samplers"),
    [("lambda-dce", ("first-hitting", "tweedie", "remask")), ("score-entropy", ("tweedie", "first-hitting"))],
)
def test_rows_draw_the_same_bits_at_any_load(objective: str, samplers: tuple[str, ...]) -> None:
    """With forward passes of one shape: many rows, of full length and padded, and the same rows one by one."""
    loaded = random_model(SampleSetting(**{**SMALL.__dict__, "objective": objective}))
    runs = [
        SamplingRun.of(loaded, SamplingSettings(sampler=sampler, steps=steps, seed=steps, temperature=1.2 - steps / 20))
        for sampler in samplers
        for steps in (5, 9)
    ]
    rows = [Row(run, [7] * 3 + [-1] * (length - 3), i) for run in runs for i, length in enumerate((64, 40, 64))]
    with running(loaded, Limits(slots=5, same_shape=True)) as engine:
        together = Collector(rows)
        engine.submit(together.job)
        expected = together.wait().ids
        assert None not in expected
        for row, ids in zip(rows, expected, strict=True):
            alone = Collector([row])
            engine.submit(alone.job)
            assert alone.wait().ids == [ids]
    model: Any = loaded.model
    if loaded.device.type == "cuda":
        assert {(rows, length) for rows, length, *_ in model.graphed._graphs} == {(6, 64), (6, 48)}  # five rows
