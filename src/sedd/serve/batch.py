"""In-flight batching: rows at different steps of different grids, seeds and samplers share each call of the network.

The network takes the noise level per row, and every random number is a function of a row's own seed, index, position
and step, so a row does not depend on the rows beside it. Rows with equal settings are drawn together, by the loop of
`samplers.loop`; all others share the forward pass only. The head runs at revealed positions alone.
"""

import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (the conventional name)

from sedd.draws import CounterRNG
from sedd.loading import LoadedModel
from sedd.runtime.cuda_graphs import batch_bucket
from sedd.samplers.loop import Prompt, Rows
from sedd.samplers.model import SamplingModel, SamplingStats
from sedd.sampling_settings import SamplingSettings
from sedd.serve.jobs import Edit, Event, Failed, Finished, Item, Row, Step

GRAIN = 16  # widths are multiples of it, or the model's sequence length
NON_FINITE = Failed("non_finite", "the network's output is not finite; its weights are damaged, or it overflowed")


def width_bucket(length: int, longest: int) -> int:
    """Return the width to which a row of ``length`` tokens is padded: one of 16, 32, 48, 64, 96, 128 …"""
    return min(longest, GRAIN * batch_bucket(-(-length // GRAIN)))


@dataclass
class Group:
    """Rows that are drawn together."""

    rows: Rows
    members: list[Item[Row]]
    labels: list[int]  # with which the network reads them: two with guidance


@dataclass
class SharedBatch:
    """Rows of one width that advance together, one call each per `advance`."""

    loaded: LoadedModel
    width: int  # tokens per row; shorter rows are padded
    padded: bool  # whether rows are shorter than the width; attention needs a mask then, so they have their own batch
    least: int = 1
    """Pad forward passes to this many rows and draw each row by itself, so that no shape depends on the other rows."""
    groups: dict[object, Group] = field(default_factory=dict)
    stats: SamplingStats = field(default_factory=SamplingStats)  # of one advance; with guidance a row has two calls
    skipped: int = 0  # rows that needed no forward pass in the last advance

    @property
    def members(self) -> list[Item[Row]]:
        return [member for group in list(self.groups.values()) for member in group.members]

    @torch.no_grad()
    def add(self, member: Item[Row]) -> list[Edit]:
        """Add a row and return its noise other than masks.

        Its plan and its noise are drawn on the CPU, where small operations take the least time.
        """
        row, settings = member.row, member.row.run.settings
        padding = (0, self.width - len(row.given))
        given = torch.tensor([row.given])
        valid = F.pad(torch.ones_like(given, dtype=torch.bool), padding) if self.padded else None
        rng = CounterRNG(settings.seed, torch.tensor([row.index]))
        model = SamplingModel(row.run.model, stats=self.stats)
        model.requires_finite = True
        rows = Rows(row.run.sampler, model, Prompt(F.pad(given, padding), valid), row.run.times, rng)
        warping = settings.temperature, settings.top_p, settings.top_k
        alone = id(member) if self.least > 1 else None
        key = (row.run.sampler, *warping, settings.label, settings.guidance, alone)
        if key in self.groups:
            self.groups[key].rows.extend(rows)
            self.groups[key].members.append(member)
        else:
            self.groups[key] = Group(rows, [member], self._labels(settings))
        noise = zip(row.given[row.text], rows.x[0].tolist(), strict=False)
        return [Edit(i, id) for i, (old, id) in enumerate(noise) if old < 0 and id < self.loaded.process.vocab_size]

    def _labels(self, settings: SamplingSettings) -> list[int]:
        none = len(self.loaded.labels)
        if settings.label is None or settings.guidance == 0:
            return [none]
        label = self.loaded.labels.index(settings.label)
        return [label] if settings.guidance == 1 else [none, label]

    def remove(self, gone: list[Item[Row]]) -> None:
        for key, group in list(self.groups.items()):
            kept = [i for i, member in enumerate(group.members) if member not in gone]
            if not kept:
                del self.groups[key]
            elif len(kept) < len(group.members):
                group.rows, group.members = group.rows.take(torch.tensor(kept)), [group.members[i] for i in kept]

    @torch.no_grad()
    def advance(self) -> list[tuple[Item[Row], Event]]:
        """Make one step of every row and return what happened; the rows that are done are removed."""
        self.stats.batch_calls = self.stats.row_calls = self.skipped = 0
        groups = list(self.groups.values())
        self._provide_hidden(groups)
        events = [event for group in groups for event in self._step(group)]
        self.remove([member for member, event in events if not isinstance(event, Step)])
        return events

    def _provide_hidden(self, groups: list[Group]) -> None:
        """Compute the hidden states that the rows of all groups need, by one forward pass."""
        inputs = [group.rows.inputs() for group in groups]
        length = max(x.shape[1] for _, (x, *_) in inputs)
        tokens, sigmas, masks, labels = [], [], [], []
        for group, (_, (x, sigma, valid)) in zip(groups, inputs, strict=True):
            for label in group.labels:
                tokens.append(F.pad(x, (0, length - x.shape[1])))
                sigmas.append(sigma)
                masks += [] if valid is None else [valid]
                labels += [label] * len(x)
        mask = torch.cat(masks) if masks else None
        hidden = self._hidden(torch.cat(tokens), torch.cat(sigmas), mask, labels)
        finite = hidden.isfinite().all(-1)
        finite = (finite if mask is None else finite | ~mask).all(-1)
        hidden, at = torch.where(finite[:, None, None], hidden, 0), 0
        for group, (index, (part, *_)) in zip(groups, inputs, strict=True):
            shape = len(group.labels), len(part)
            some = slice(at, at := at + len(group.labels) * len(part))
            members = group.members if index is None else [group.members[i] for i in index.tolist()]
            for member, is_finite in zip(members, finite[some].view(*shape).all(0).tolist(), strict=True):
                member.network_calls += len(group.labels)
                member.failed = None if is_finite else NON_FINITE
            self.skipped += len(group.members) - len(members)
            group.rows.provide(group.rows.x, index, hidden[some].unflatten(0, shape).movedim(0, 2).flatten(2))

    def _hidden(self, x: Tensor, sigma: Tensor, valid: Tensor | None, labels: list[int]) -> Tensor:
        if not (count := len(x)):
            return sigma.new_zeros(*x.shape, 1)
        self.stats.batch_calls, self.stats.row_calls = 1, count
        at = [*range(count), *[0] * (self.least - count)]
        label = torch.tensor(labels, device=x.device)[at]
        model = self.loaded.model.bind(label=label) if self.loaded.labels else self.loaded.model
        hidden: Tensor = model.hidden(x[at], sigma[at], None if valid is None else valid[at])
        return hidden[:count]

    def _step(self, group: Group) -> list[tuple[Item[Row], Event]]:
        """Draw the next tokens of a group, and return the events of its rows."""
        before, members, spent = copy.copy(group.rows), group.members, self.stats.row_calls
        self._advance(group)
        x, done, network_calls = group.rows.x, group.rows.done >= group.rows.calls, self.stats.row_calls - spent
        streams = any(member.job.streams for member in members)
        tokens = x.tolist() if streams or done.any() else []
        if streams:
            changed, steps, times = (x != before.x).tolist(), before.step.tolist(), before.now(before.times).tolist()
        events: list[tuple[Item[Row], Event]] = []
        for i, member in enumerate(members):
            row, job, details = member.row, member.job, list[Edit]()
            member.calls, member.network_calls = member.calls + 1, member.network_calls + network_calls // len(members)
            if job.alternatives is not None and not member.failed and not before.sampler.is_causal:
                try:
                    details = describe_edits(before, i, x[i], job.alternatives)
                except Exception as error:
                    member.failed = failure_of(error)
            if member.failed:
                events.append((member, member.failed))
                continue
            if job.streams:
                edits = details or [Edit(p, tokens[i][p]) for p, is_new in enumerate(changed[i]) if is_new]
                shown = [edit for edit in edits if edit.position < row.text.stop]
                events.append((member, Step(steps[i], times[i], member.calls, int(before.calls[i]), shown)))
            if done[i]:
                ids = tokens[i][row.text]
                is_text = min(ids) >= 0 and max(ids) < self.loaded.process.vocab_size  # a mask was drawn from NaN
                events.append((member, Finished(ids, member.network_calls) if is_text else NON_FINITE))
        return events

    def _advance(self, group: Group) -> None:
        """Draw a group; if that raises an error, draw its rows one by one, so that only the cause fails."""
        try:
            group.rows.advance()
        except Exception as error:
            if len(group.members) == 1:
                group.members[0].failed = group.members[0].failed or failure_of(error)
                return
            parts = [group.rows.take(torch.tensor([i])) for i in range(len(group.members))]
            for part, member in zip(parts, group.members, strict=True):
                self._advance(Group(part, [member], group.labels))
            group.rows = parts[0]
            for part in parts[1:]:
                group.rows.extend(part)


def failure_of(error: Exception) -> Failed:
    """Return the event of a row in which an error was raised."""
    if isinstance(error, FloatingPointError):
        return NON_FINITE
    if isinstance(error, ValueError):
        return Failed("invalid_request", str(error))
    return Failed("internal_error", f"{type(error).__name__}: {error}")


def describe_edits(rows: Rows, row: int, y: Tensor, count: int) -> list[Edit]:
    """Return what a step changed in one of ``rows``, its tokens now ``y``, with entropies and alternatives."""
    x, at = rows.x[row], (rows.x[row] != y).nonzero().squeeze(-1)
    if not len(at) or rows.states is None or not torch.equal(rows.seen[row], x):
        return []
    sigma = rows.now(rows.sigmas)[row].expand(len(at))
    p = rows.model.clean_probs_at(rows.states[row, at], x[at], sigma).double()
    p = p / p.sum(-1, keepdim=True)
    if not p.isfinite().all():
        raise FloatingPointError("probabilities are not finite")
    entropy, top = torch.special.entr(p).sum(-1), p.topk(min(count, p.shape[-1]), -1)
    log_prob = p.gather(-1, y[at].clamp_max(p.shape[-1] - 1)[:, None]).log().squeeze(-1)
    columns = at, y[at], entropy, log_prob, top.indices, top.values
    return [
        Edit(position, id, h, None if id >= p.shape[-1] else max(log, -1e4), list(zip(ids, values, strict=True)))
        for position, id, h, log, ids, values in zip(*(column.tolist() for column in columns), strict=True)
    ]
