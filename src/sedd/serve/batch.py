"""In-flight batching: rows at different steps of different grids, seeds and samplers share each call of the network.

The network takes the noise level per row, and every random number is a function of a row's own seed, index, position
and step, so a row does not depend on the rows beside it. Rows with equal settings are drawn together; all others share
the forward pass only. The head runs at revealed positions alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (the conventional name)

from sedd.draws import CounterRNG
from sedd.loading import LoadedModel
from sedd.runtime.cuda_graphs import batch_bucket
from sedd.samplers import GridSampler, Prompt, Sampler, SamplingModel, StepContext
from sedd.samplers.first_hitting import PlannedSampler
from sedd.samplers.loop import draw_from_hidden, initial_state
from sedd.samplers.run import SamplingRun
from sedd.serve.jobs import Edit, Event, Failed, Finished, Job, Row, Step

GRAIN = 16
"""Widths are multiples of it, or the model's sequence length."""
NON_FINITE = Failed("non_finite", "the network's output is not finite; its weights are damaged, or it overflowed")


def width_bucket(length: int, longest: int) -> int:
    """Return the width to which a row of ``length`` tokens is padded: one of 16, 32, 48, 64, 96, 128 …"""
    return min(longest, GRAIN * batch_bucket(-(-length // GRAIN)))


def is_shared(sampler: Sampler) -> bool:
    """Return whether rows of this sampler share forward passes.

    Samplers of other packages may not take one step number per row, and some have neither a grid nor a plan.
    """
    own = type(sampler).__module__.startswith("sedd.")
    return isinstance(sampler, PlannedSampler) or (isinstance(sampler, GridSampler) and own)


@dataclass
class Counts:
    """Work of one advance of a batch."""

    forwards: int = 0
    rows: int = 0
    """Rows of these forward passes; with guidance a sequence has two."""
    skipped: int = 0
    """Rows that needed no forward pass in their step."""


class ModelCall(NamedTuple):
    """A call of the model for a row."""

    sigma: float
    t: float
    s: float
    step: int
    """The number on the time grid."""


@dataclass(eq=False)
class BatchRow:
    """A row in a batch."""

    row: Row
    place: int
    """Its place in the job."""
    job: Job
    calls: list[ModelCall]
    is_planned: bool
    """Whether each call reveals positions of its own."""
    labels: list[int]
    """The labels with which the network reads it: two with guidance."""
    done: int = 0
    """Calls of the model so far."""
    network_calls: int = 0
    hidden: Tensor | None = None
    """The hidden states of its tokens, where they are still valid."""

    @property
    def draws_clean(self) -> bool:
        """Whether its next tokens are drawn from p(x_0 | x): planned ones, and those of the last step."""
        return self.is_planned or self.done == len(self.calls) - 1

    @property
    def key(self) -> tuple[object, ...]:
        """Rows with equal keys are drawn together."""
        run = self.row.run
        how = () if self.draws_clean else (run.name, tuple(sorted(run.settings.options.items())))
        settings = run.settings
        warping = settings.temperature, settings.top_p, settings.top_k
        return warping, settings.label, settings.guidance, how


class _Group(NamedTuple):
    """Rows that are drawn together."""

    members: list[int]
    at: Int[Tensor, " g"]
    sampler: GridSampler | None
    """None: tokens are drawn from p(x_0 | x)."""
    context: StepContext
    where: Bool[Tensor, "g L"]
    """Positions that may be drawn."""

    def part(self, place: int) -> "_Group":
        """Return the group of one of its rows."""
        index = torch.tensor([place], device=self.at.device)
        return _Group([self.members[place]], self.at[index], self.sampler, self.context.rows(index), self.where[index])


class SharedBatch:
    """Rows of one width that advance together, one step each per call of `advance`.

    Args:
        loaded: The model.
        width: Tokens per row; shorter rows are padded.
        padded: Whether rows are shorter than the width. Attention needs a mask then, so such rows have their own batch.
        least: Forward passes are padded to so many rows, and each row is drawn by itself, so that no shape depends on
            the other rows; 1: neither.
    """

    def __init__(self, loaded: LoadedModel, width: int, padded: bool, least: int = 1) -> None:
        self.loaded, self.width, self.padded, self.least = loaded, width, padded, least
        self.rows: list[BatchRow] = []
        self.counts = Counts()
        device = loaded.device
        self.x = torch.zeros(0, width, dtype=torch.long, device=device)
        self.free = torch.zeros(0, width, dtype=torch.bool, device=device)
        self.valid = torch.zeros(0, width, dtype=torch.bool, device=device)
        self.event = torch.zeros(0, width, dtype=torch.long, device=device)
        self.seed = torch.zeros(0, dtype=torch.long, device=device)
        self.index = torch.zeros(0, dtype=torch.long, device=device)

    # Rows come and go --------------------------------------------------------------------------------------

    @torch.no_grad()
    def add(self, row: Row, place: int, job: Job) -> Step:
        """Add a row and return its start, in which noise other than masks is edits.

        Its plan and its noise are drawn on the CPU, where small operations take the least time.
        """
        length, index = len(row.given), torch.tensor([row.index])
        prompt, rng = Prompt(torch.tensor([row.given])), CounterRNG(row.run.settings.seed, index)
        run, start = row.run, initial_state(row.run.model, prompt, rng).x
        plan = run.sampler.plan(run.model, prompt, run.times, rng)
        assert plan is not None
        levels = (level[0, : int(plan.calls[0])].tolist() for level in (plan.sigma, plan.t, plan.s, plan.step))
        calls = [ModelCall(*values) for values in zip(*levels, strict=True)]
        added = BatchRow(row, place, job, calls, plan.event is not None, self._labels(row))
        event = torch.full_like(start, -1) if plan.event is None else torch.where(prompt.blank, plan.event, -1)
        rest = (0, self.width - length)
        seed = torch.tensor([row.run.settings.seed])
        columns = F.pad(start, rest), F.pad(prompt.blank, rest), F.pad(torch.ones_like(prompt.blank), rest)
        values = [*columns, F.pad(event, rest, value=-1), seed, index]
        for name, value in zip(_COLUMNS, values, strict=True):
            setattr(self, name, torch.cat([getattr(self, name), value.to(self.x.device)]))
        self.rows.append(added)
        return Step(0, 1.0, 0, len(calls), visible_noise(row, start[0].tolist(), self.loaded.process.vocab_size))

    def remove(self, gone: list[BatchRow]) -> None:
        """Remove rows."""
        kept = [i for i, row in enumerate(self.rows) if row not in gone]
        if len(kept) < len(self.rows):
            self.rows = [self.rows[i] for i in kept]
            at = torch.tensor(kept, dtype=torch.long, device=self.x.device)
            for name in _COLUMNS:
                setattr(self, name, getattr(self, name)[at])

    def _labels(self, row: Row) -> list[int]:
        labels, settings = self.loaded.labels, row.run.settings
        if settings.label is None or settings.guidance == 0:
            return [len(labels)]
        label = labels.index(settings.label)
        return [label] if settings.guidance == 1 else [len(labels), label]

    # A step of every row -----------------------------------------------------------------------------------

    @torch.no_grad()
    def advance(self) -> list[tuple[BatchRow, Event]]:
        """Make one step of every row and return what happened; the rows that are done are removed."""
        self.counts = Counts()
        calls = [row.calls[row.done] for row in self.rows]
        sigma, t, s = (self._column([getattr(call, name) for call in calls]) for name in ("sigma", "t", "s"))
        groups = list(self._groups(t, s))
        hidden, finite = self._hidden(groups, sigma, t, s)
        y, failed = self.x.clone(), {i: NON_FINITE for i in range(len(self.rows)) if not finite[i]}
        details: dict[int, list[Edit]] = {}
        for group in groups:
            self._draw_safely(group, hidden, (sigma, t, s), y, failed, details)
        return self._finish_step(y, failed, details)

    def _column(self, values: list[float]) -> Float[Tensor, " b"]:
        return torch.tensor(values, dtype=torch.float64, device=self.x.device)

    def _groups(self, t: Tensor, s: Tensor) -> Iterator[_Group]:
        keys: dict[tuple[object, ...], list[int]] = {}
        for i, row in enumerate(self.rows):
            alone = (i,) if self.least > 1 else ()  # else the head's products have as many rows as all draw together
            keys.setdefault((*row.key, *alone), []).append(i)
        for members in keys.values():
            first, device = self.rows[members[0]], self.x.device
            at = torch.tensor(members, device=device)
            clean = first.draws_clean
            steps = [0 if self.rows[i].is_planned else self.rows[i].done + 1 for i in members]
            step = torch.tensor(steps, device=device)
            valid = self.valid[at] if self.padded else None
            rng = CounterRNG(self.seed[at], self.index[at])
            model = _model_of(first.row.run)
            free = self.free[at]
            context = StepContext(free, valid, rng, model, step)
            where = free & self.loaded.process.is_noisy(self.x[at])
            if clean:  # planned rows draw the positions of their event, those at their last step all that are left
                event = torch.tensor([self.rows[i].done for i in members], device=device)
                planned = (step == 0)[:, None]
                where = torch.where(planned, self.event[at] == event[:, None], where)
            sampler: Any = None if clean else first.row.run.sampler
            yield _Group(members, at, sampler, context, where)

    def _hidden(
        self, groups: list[_Group], sigma: Tensor, t: Tensor, s: Tensor
    ) -> tuple[dict[int, Tensor], list[bool]]:
        """Return the hidden states of all rows that need them, by one forward pass, and which rows are finite."""
        needed = [False] * len(self.rows)
        for group in groups:
            rows = (
                group.where.any(-1)
                if group.sampler is None
                else group.sampler.needs_model(self.x[group.at], t[group.at], s[group.at], group.context)
            )
            for i, is_needed in zip(group.members, rows.tolist(), strict=True):
                needed[i] = is_needed
        cached = {i: row.hidden for i, row in enumerate(self.rows) if needed[i] and row.hidden is not None}
        fresh = [i for i in range(len(self.rows)) if needed[i] and i not in cached]
        self.counts.skipped += len(self.rows) - len(fresh)
        hidden: dict[int, Tensor] = {i: states for i, states in cached.items() if states is not None}
        finite = [True] * len(self.rows)
        if fresh:
            self._forward(fresh, sigma, hidden, finite)
        return hidden, finite

    def _forward(self, fresh: list[int], sigma: Tensor, hidden: dict[int, Tensor], finite: list[bool]) -> None:
        pairs = [(i, label) for i in fresh for label in self.rows[i].labels]
        count, device = len(pairs), self.x.device
        pairs += pairs[:1] * (self.least - count)
        at = torch.tensor([i for i, _ in pairs], device=device)
        model = self.loaded.model
        if self.loaded.labels:
            model = model.bind(label=torch.tensor([label for _, label in pairs], device=device))
        states = model.hidden(self.x[at], sigma[at], self.valid[at] if self.padded else None)[:count]
        sound = (states.isfinite().all(-1) | ~self.valid[at[:count]]).all(-1)
        self.counts.forwards, self.counts.rows = self.counts.forwards + 1, self.counts.rows + count
        if not all(flags := sound.tolist()):
            states = torch.where(sound[:, None, None], states, 0)
        place = 0
        for i in fresh:
            size = len(self.rows[i].labels)
            hidden[i] = states[place] if size == 1 else torch.cat([*states[place : place + size]], -1)
            finite[i] = all(flags[place : place + size])
            self.rows[i].hidden, self.rows[i].network_calls = hidden[i], self.rows[i].network_calls + size
            place += size

    def _draw_safely(
        self,
        group: _Group,
        hidden: dict[int, Tensor],
        levels: tuple[Tensor, Tensor, Tensor],
        y: Tensor,
        failed: dict[int, Failed],
        details: dict[int, list[Edit]],
    ) -> None:
        """Draw a group; if that raises an error, draw its rows one by one, so that only the cause fails."""
        try:
            self._draw(group, hidden, levels, y, details)
        except Exception as error:
            if len(group.members) > 1:
                for place in range(len(group.members)):
                    self._draw_safely(group.part(place), hidden, levels, y, failed, details)
            else:
                failed.setdefault(group.members[0], failure_of(error))

    def _draw(
        self,
        group: _Group,
        hidden: dict[int, Tensor],
        levels: tuple[Tensor, Tensor, Tensor],
        y: Tensor,
        details: dict[int, list[Edit]],
    ) -> None:
        sigma, t, s = (level[group.at] for level in levels)
        x, model = self.x[group.at], _model_of(self.rows[group.members[0]].row.run)
        known = [hidden[i] for i in group.members if i in hidden]
        nothing = torch.zeros_like(known[0]) if known else torch.zeros(self.width, 1, device=x.device)
        states = torch.stack([hidden.get(i, nothing) for i in group.members])
        context = group.context._replace(model=model)
        if group.sampler is None:
            drawn = draw_from_hidden(states, x, sigma, group.where, context) if known else x
        else:
            model.prefetch(states)
            drawn = group.sampler.step(x, t, s, context)
        self.counts.forwards, self.counts.rows = self.counts.forwards + model.calls, self.counts.rows + model.rows
        y[group.at] = drawn
        for place, i in enumerate(group.members):
            row = self.rows[i]
            row.network_calls += model.rows // len(group.members)
            if row.job.alternatives is not None and i in hidden:
                details[i] = describe_edits(model, states[place], x[place], drawn[place], sigma[place], row.job)

    def _finish_step(
        self, y: Tensor, failed: dict[int, Failed], details: dict[int, list[Edit]]
    ) -> list[tuple[BatchRow, Event]]:
        """Store the new tokens, and return the events of all rows."""
        changed = y != self.x
        keeps_hidden = not self.loaded.model.depends_on_sigma
        stays = (~changed.any(-1)).tolist() if keeps_hidden else []
        watched = [row.job.streams or row.done + 1 == len(row.calls) for row in self.rows]
        tokens, moved = (y.tolist(), changed.tolist()) if any(watched) else ([], [])
        self.x = y
        events: list[tuple[BatchRow, Event]] = []
        for i, row in enumerate(self.rows):
            row.done += 1
            if i in failed:
                events.append((row, failed[i]))
                continue
            # a view would keep the states of all rows in memory
            row.hidden = row.hidden.clone() if row.hidden is not None and keeps_hidden and stays[i] else None
            if row.job.streams:
                edits = details.get(i) or [Edit(p, tokens[i][p]) for p, new in enumerate(moved[i]) if new]
                edits = row.row.in_text(edits)
                call = row.calls[row.done - 1]
                events.append((row, Step(call.step, call.t, row.done, len(row.calls), edits)))
            if row.done == len(row.calls):
                ids = tokens[i][row.row.text]
                events.append((row, finish_ids(ids, row.network_calls, self.loaded.process.vocab_size)))
        self.remove([row for row, event in events if not isinstance(event, Step)])
        return events


def _model_of(run: SamplingRun) -> SamplingModel:
    """Return the model of a run for one step."""
    model = SamplingModel(run.model)
    model.requires_finite = True
    return model


def failure_of(error: Exception) -> Failed:
    """Return the event of a row in which an error was raised."""
    if isinstance(error, FloatingPointError):
        return NON_FINITE
    if isinstance(error, ValueError):
        return Failed("invalid_request", str(error))
    return Failed("internal_error", f"{type(error).__name__}: {error}")


_COLUMNS = ("x", "free", "valid", "event", "seed", "index")


def finish_ids(ids: list[int], calls: int, vocab_size: int) -> Finished | Failed:
    """Return the last event of a row; a mask that is left was drawn from probabilities that are not numbers."""
    return Finished(ids, calls) if min(ids) >= 0 and max(ids) < vocab_size else NON_FINITE


def visible_noise(row: Row, x: list[int], vocab_size: int) -> list[Edit]:
    """Return the noise at open positions that is a token, as under uniform noise; masks are not."""
    given = row.given[row.text]
    return [Edit(i, x[i]) for i, id in enumerate(given) if id < 0 and x[i] < vocab_size]


def describe_edits(model: SamplingModel, hidden: Tensor, x: Tensor, y: Tensor, sigma: Tensor, job: Job) -> list[Edit]:
    """Return the changed tokens of a row with entropy, log-probability and the most probable tokens.

    Args:
        model: The model, guided and warped.
        hidden: The hidden states of the row at the start of the step.
        x: Its tokens at the start.
        y: Its tokens now.
        sigma: The noise level at the start.
        job: The job: how many tokens to list.
    """
    at = (x != y).nonzero().squeeze(-1)
    if not len(at):
        return []
    p = model.clean_probs_at(hidden[at], x[at], sigma.expand(len(at))).double()
    p = p / p.sum(-1, keepdim=True)
    if not p.isfinite().all():
        raise FloatingPointError("probabilities are not finite")
    entropy = torch.special.entr(p).sum(-1).tolist()
    top = p.topk(min(job.alternatives or 0, p.shape[-1]), -1)
    log_prob = p.gather(-1, y[at].clamp_max(p.shape[-1] - 1)[:, None]).log().squeeze(-1).tolist()
    columns = zip(
        at.tolist(), y[at].tolist(), entropy, log_prob, top.indices.tolist(), top.values.tolist(), strict=True
    )
    return [
        Edit(position, id, h, None if id >= p.shape[-1] else max(log, -1e4), list(zip(ids, values, strict=True)))
        for position, id, h, log, ids, values in columns
    ]
