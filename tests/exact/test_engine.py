"""The engine of the server: what a row draws does not depend on the rows beside it, and failures stay alone."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import scipy.stats
import torch
from serving import Collector, Served, exact_model, running, site, tiny_model

from sedd.draws import CounterRNG
from sedd.exact import Distribution
from sedd.loading import LoadedModel
from sedd.samplers import Rows, SamplingRun, SamplingSettings, loop
from sedd.samplers.template import template_prompt
from sedd.serve import batch
from sedd.serve.app import build_app
from sedd.serve.engine import Engine
from sedd.serve.errors import RequestError
from sedd.serve.jobs import Failed, Item, Job, Row
from sedd.serve.limits import Limits

FALSE_ALARM = 1e-6
TEMPLATES = ["ab{20}c{5}", "{17}ffa"]
SAMPLERS: dict[str, tuple[LoadedModel, tuple[str, ...]]] = {
    "denoiser": (
        tiny_model("lambda-dce", labels=("x", "y")),
        ("first-hitting", "tweedie", "euler", "ancestral", "theta", "remask", "ordered", "confidence", "entropy"),
    ),
    "score": (tiny_model("score-entropy"), ("first-hitting", "tweedie", "remask")),
    "uniform": (tiny_model("mean", "uniform"), ("ancestral", "tweedie", "gibbs")),
}


def settings(kind: str) -> Iterator[SamplingSettings]:
    loaded, samplers = SAMPLERS[kind]
    for seed, sampler in enumerate(samplers):
        yield SamplingSettings(sampler=sampler, steps=5, seed=seed)
        yield SamplingSettings(sampler=sampler, steps=4, seed=seed + 100)  # drawn together with the one before
        yield SamplingSettings(sampler=sampler, steps=3, seed=2**40 + seed, grid="cosine", temperature=0.7)
    if loaded.labels:
        yield SamplingSettings(steps=4, label="x")
        yield SamplingSettings(steps=4, label="y", guidance=2.0, sampler="tweedie")
        yield SamplingSettings(steps=None, label="y", guidance=0.0)


def rows_and_ids(kind: str) -> tuple[list[Row], list[list[int]]]:
    """Rows of all samplers, and the tokens that ``sedd infill`` gives them."""
    loaded, rows, expected = SAMPLERS[kind][0], [], []
    for how in settings(kind):
        run, prompt = SamplingRun.of(loaded, how), template_prompt(TEMPLATES, loaded)
        expected += [sequence.ids for sequence in run.sample(prompt)]
        lengths = prompt.lengths.tolist()
        rows += [Row(run, prompt.given[i, :length].tolist(), i) for i, length in enumerate(lengths)]
    return rows, expected


def serve(kind: str, rows: list[Row], slots: int = 7, **options: Any) -> Served:
    """Fill rows seven at a time, so that they enter and leave at different steps."""
    with running(SAMPLERS[kind][0], Limits(slots=slots)) as engine:
        collector = Collector(rows, **options)
        engine.submit(collector.job)
        served = collector.wait()
        assert engine.outstanding == 0
        return served


@pytest.mark.parametrize("sampler", ["first-hitting", "ordered"])
def test_the_head_runs_at_revealed_positions_alone(sampler: str) -> None:
    """Of samplers that plan what they reveal: as often as there are tokens to draw, in any number of steps."""
    loaded, heads = SAMPLERS["denoiser"][0], []
    run = SamplingRun.of(loaded, SamplingSettings(sampler=sampler, steps=6))
    counted = loaded.network.head.register_forward_hook(lambda head, given, out: heads.append(len(given[0])))
    serve("denoiser", [Row(run, [-1] * 30, i) for i in range(3)])
    counted.remove()
    assert sum(heads) == 3 * 30
    assert len(heads) > 1


@pytest.mark.parametrize("kind", SAMPLERS)
def test_rows_of_all_samplers_in_one_batch_are_those_of_sedd_infill(kind: str) -> None:
    """Different samplers, steps, grids, seeds, temperatures and labels share forward passes and change no token."""
    rows, expected = rows_and_ids(kind)
    served = serve(kind, rows, streams=True, alternatives=2)
    assert served.ids == expected
    for row, end, steps in zip(rows, served.ends, served.steps, strict=True):
        x = list(row.given)
        for edit in (edit for step in steps for edit in step.edits):
            x[edit.position] = edit.id
        assert x == served.ids[rows.index(row)]  # the edits lead from the given tokens to the last ones
        assert steps[-1].calls <= steps[-1].total_calls
        assert not isinstance(end, Failed)


def same(values: torch.Tensor) -> torch.Tensor:
    """The value of the first row for all rows."""
    return values[:1].expand_as(values)


MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "one stream for all rows": lambda patch: patch.setattr(
        loop, "CounterRNG", lambda seed, rows: CounterRNG(seed, torch.zeros_like(rows))
    ),
    "the seed of the first row": lambda patch: patch.setattr(
        loop, "CounterRNG", lambda seed, rows: CounterRNG(same(seed), rows)
    ),
    "the step of the first row": lambda patch: patch.setattr(
        Rows, "step", property(lambda self: same(self.now(self.steps)))
    ),
    "the noise level of the first row": lambda patch: patch.setattr(
        batch.SharedBatch,
        "_hidden",
        lambda self, x, sigma, *rest, f=batch.SharedBatch._hidden: f(self, x, same(sigma), *rest),
    ),
    "padding is read": lambda patch: patch.setattr(
        batch.SharedBatch, "__init__", _without_padding(batch.SharedBatch.__init__)
    ),
}


def _without_padding(init: Callable[..., None]) -> Callable[..., None]:
    return lambda self, loaded, width, padded, least: init(self, loaded, width, False, least)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_row_that_reads_its_neighbours_is_noticed(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, expected = rows_and_ids("score")
    MUTANTS[mutant](monkeypatch)
    assert serve("score", rows).ids != expected


def test_every_forward_pass_has_the_same_shape_if_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, a matrix product may round differently in another number of rows."""
    loaded = SAMPLERS["score"][0]
    shapes: list[int] = []
    hidden = type(loaded.model).hidden

    def record(self: Any, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        shapes.append(len(x))
        return hidden(self, x, *rest)

    def record_head(self: Any, states: torch.Tensor) -> torch.Tensor:
        drawn.append(len(states))
        return head(self, states)

    drawn: list[int] = []
    head = type(loaded.model)._head
    monkeypatch.setattr(type(loaded.model), "hidden", record)
    monkeypatch.setattr(type(loaded.model), "_head", record_head)
    run = SamplingRun.of(loaded, SamplingSettings(steps=4))
    for same, found in ((True, {6}), (False, {1, 5})):
        shapes.clear()
        drawn.clear()
        with running(loaded, Limits(slots=6, same_shape=same)) as engine:
            for count in (1, 5):
                collector = Collector([Row(run, [-1] * 30, i) for i in range(count)])
                engine.submit(collector.job)
                collector.wait()
        assert set(shapes) >= found
        assert not same or set(shapes) == found
        assert (max(drawn) <= 30) == same  # positions that the head reads at once: those of one row


@pytest.mark.parametrize("sampler", ["first-hitting", "tweedie", "theta", "entropy"])
def test_a_row_that_is_not_finite_fails_alone(sampler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The network's output is NaN for rows with an f at the first position; all others stay as they are."""
    loaded = SAMPLERS["denoiser"][0]
    run, f = SamplingRun.of(loaded, SamplingSettings(sampler=sampler, steps=4)), loaded.process.vocab_size - 1
    rows = [Row(run, [f if i == 2 else 0, *[-1] * 9], i) for i in range(5)]
    healthy = serve("denoiser", rows).ids
    hidden = type(loaded.model).hidden

    def poison(self: Any, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        return torch.where((x[:, :1] == f)[..., None], torch.nan, hidden(self, x, *rest))

    monkeypatch.setattr(type(loaded.model), "hidden", poison)
    served = serve("denoiser", rows)
    assert served.ids == [None if i == 2 else ids for i, ids in enumerate(healthy)]
    assert [end.code for end in served.ends if isinstance(end, Failed)] == ["non_finite"]


class Gate:
    """Lets the network run once per `open`, so that a test decides when a step is made."""

    def __init__(self, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
        self._turn, self._arrived = threading.Semaphore(0), threading.Semaphore(0)
        hidden = type(loaded.model).hidden

        def wait(model: Any, *arguments: Any) -> torch.Tensor:
            self._arrived.release()
            assert self._turn.acquire(timeout=60)
            return hidden(model, *arguments)

        monkeypatch.setattr(type(loaded.model), "hidden", wait)

    def arrive(self) -> None:
        """Wait until the network is called."""
        assert self._arrived.acquire(timeout=60)

    def open(self, times: int = 1) -> None:
        self._turn.release(times)


@pytest.mark.parametrize("sampler", ["first-hitting", "entropy"])
@pytest.mark.parametrize("why", ["canceled", "deadline_exceeded"])
def test_a_row_leaves_at_the_next_step(why: str, sampler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the client has gone or the deadline has passed; a waiting row then has the slot."""
    loaded = SAMPLERS["denoiser"][0]
    gate = Gate(loaded, monkeypatch)
    how = SamplingSettings(sampler=sampler, steps=None, options={"bound": 0.0} if sampler == "entropy" else {})
    row = Row(SamplingRun.of(loaded, how), [-1] * 20, 0)
    first, second = Collector([row]), Collector([row])
    with running(loaded, Limits(slots=1)) as engine:
        engine.submit(first.job)
        gate.arrive()
        engine.submit(second.job)
        if why == "canceled":
            first.job.canceled = True
        else:
            first.job.deadline = 0.0
        gate.open()
        [end] = first.wait().ends
        assert isinstance(end, Failed)
        assert end.code == why
        gate.open(100)
        assert second.wait().ids != [None]


def test_a_burst_fills_slots_and_queue() -> None:
    """Before the engine has given a row its slot: as many rows are accepted as there are slots and places to wait."""
    loaded = SAMPLERS["denoiser"][0]
    row = Row(SamplingRun.of(loaded, SamplingSettings(steps=2)), [-1] * 4, 0)
    accepted = [Collector([row]) for _ in range(5)]
    with running(loaded, Limits(slots=3, queue=2)) as engine:
        with engine._condition:  # the engine cannot go on
            for collector in accepted:
                engine.submit(collector.job)
            with pytest.raises(RequestError, match="busy"):
                engine.submit(Collector([row]).job)
        assert all(collector.wait().ids != [None] for collector in accepted)


def test_work_is_admitted_by_its_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full queue refuses with a time to wait; so does a cost that would take longer than the deadline."""
    loaded = SAMPLERS["denoiser"][0]
    gate = Gate(loaded, monkeypatch)
    run = SamplingRun.of(loaded, SamplingSettings(sampler="tweedie", steps=10))
    row = Row(run, [-1] * 20, 0)
    assert row.cost == 10 * 20  # network calls times length
    with running(loaded, Limits(slots=1, queue=2, timeout=100.0)) as engine:
        first, others = Collector([row]), Collector([row, row])
        engine.submit(first.job)
        gate.arrive()
        engine.submit(others.job)
        assert engine.outstanding == 600
        with pytest.raises(RequestError, match="busy") as refused:
            engine.submit(Collector([row]).job)
        assert int(refused.value.headers["retry-after"]) >= 1
        gate.open(1000)
        first.wait()
        others.wait()
        assert engine.outstanding == 0
        engine.tokens_per_second = 1.0  # a cost of 200 takes 200 s now
        alone = Collector([row])
        engine.submit(alone.job)  # nothing else is there to wait for
        alone.wait()
        engine._costs[Item(row, 0, alone.job)], engine.tokens_per_second = 50, 1.0
        with pytest.raises(RequestError, match="busy") as refused:
            engine.submit(Collector([row]).job)
        assert refused.value.headers["retry-after"] == "60"  # 150 s, which is cut
        engine._costs.clear()


def test_clients_take_turns_at_slots() -> None:
    """Six rows of one client and one of another: the other's is the second to be done, not the last."""
    loaded = SAMPLERS["denoiser"][0]
    row = Row(SamplingRun.of(loaded, SamplingSettings(steps=2)), [-1] * 4, 0)
    ended: list[str] = []
    with running(loaded, Limits(slots=1)) as engine:
        collectors = {"many": Collector([row] * 6), "one": Collector([row])}
        for client, collector in collectors.items():
            collector.job.client = client
            on_event = collector.job.on_event
            collector.job.on_event = lambda *event, c=client, f=on_event: (ended.append(c), f(*event))
        with engine._condition:  # the engine cannot go on
            for collector in collectors.values():
                engine.submit(collector.job)
        served = {client: collector.wait() for client, collector in collectors.items()}
    assert ended == ["many", "one", *["many"] * 5]
    assert {tuple(ids or ()) for found in served.values() for ids in found.ids} == {tuple(served["one"].ids[0] or ())}


@pytest.mark.parametrize("slots", [1, 16])
def test_requests_of_one_client_take_turns_at_slots(slots: int) -> None:
    """A request of many rows leaves slots to another one, and the other's row does not wait for all of them."""
    loaded = SAMPLERS["denoiser"][0]
    long, short = (Row(SamplingRun.of(loaded, SamplingSettings(steps=2)), [-1] * length, 0) for length in (4, 3))
    many, one, ended = Collector([long] * 4 * slots), Collector([short]), list[str]()
    with running(loaded, Limits(slots=slots)) as engine:
        for name, collector in (("many", many), ("one", one)):
            on_event = collector.job.on_event
            collector.job.on_event = lambda *event, c=name, f=on_event: (ended.append(c), f(*event))
        with engine._condition:
            engine.submit(many.job)
            engine.submit(one.job)
        many.wait()
        one.wait()
    assert ended.index("one") <= slots


def test_a_request_leaves_slots_that_another_one_enters_at_once() -> None:
    loaded = SAMPLERS["denoiser"][0]
    row = Row(SamplingRun.of(loaded, SamplingSettings(steps=2)), [-1] * 4, 0)
    engine = Engine(loaded, Limits(slots=32))
    for client, rows, entered in (("a", 40, 28), ("a", 40, 2), ("b", 40, 2), ("c", 1, 0)):
        (job := Collector([row] * rows).job).client = client
        engine.submit(job)
        before = engine.running
        while engine.running < 32 and (waiting := engine._admit_next()):
            engine._enter(waiting)
        assert engine.running - before == entered


def test_a_client_that_fills_the_queue_leaves_others_their_share() -> None:
    """Of five places each of two clients may have two, although one has taken all; and each of three one."""
    loaded = SAMPLERS["denoiser"][0]
    row = Row(SamplingRun.of(loaded, SamplingSettings(steps=2)), [-1] * 4, 0)

    collectors: list[Collector] = []

    def job(client: str, rows: int = 1) -> Job:
        collectors.append(Collector([row] * rows))
        collectors[-1].job.client = client
        return collectors[-1].job

    with running(loaded, Limits(slots=3, queue=2)) as engine:
        with engine._condition:
            engine.submit(job("many", 5))
            with pytest.raises(RequestError, match="busy"):
                engine.submit(job("many"))
            with pytest.raises(RequestError, match="busy"):
                engine.submit(job("other", 3))
            engine.submit(job("other", 2))
            with pytest.raises(RequestError, match="busy"):
                engine.submit(job("other"))
            engine.submit(job("third"))
        for collector in collectors:
            if collector.job.client == "third" or len(collector.job.rows) in (5, 2):
                collector.wait()
        assert not engine._costs


def chi_square(texts: list[str], distribution: Distribution) -> float:
    """Return the p-value of texts over a and b under a distribution."""
    counts = torch.zeros(len(distribution.probabilities))
    for text in texts:
        counts[int(text.replace("a", "0").replace("b", "1"), 2)] += 1
    expected = distribution.probabilities * len(texts)
    assert expected.min() > 5
    return float(scipy.stats.chisquare(counts.double(), expected).pvalue)


def test_replies_have_the_distribution_of_the_model() -> None:
    """600 replies through HTTP with the exact score, by two requests at a time that share their steps; 8 sequences.

    One step instead of one token per step draws positions independently, and that is rejected at the same level.
    """
    p = torch.tensor([[[0.3, 0.02], [0.08, 0.1]], [[0.02, 0.2], [0.08, 0.2]]])
    distribution, seeds = Distribution(p), iter(range(8))
    with site(build_app(exact_model(distribution), "exact", Limits(slots=600, rows=300, queue=5000))) as server:

        def texts(steps: int | str, sampler: str) -> list[str]:
            request = {"template": "{3}", "n": 300, "seed": next(seeds), "steps": steps, "sampler": sampler}
            return [choice["text"] for choice in server.send("/v1/infill", request).json["choices"]]

        with ThreadPoolExecutor() as pool:
            right = pool.map(texts, ["inf", "inf"], ["first-hitting", "ordered"])
            wrong = pool.map(texts, [1, 1], ["first-hitting", "tweedie"])
        assert chi_square([text for part in right for text in part], distribution) > FALSE_ALARM
        assert chi_square([text for part in wrong for text in part], distribution) < FALSE_ALARM
