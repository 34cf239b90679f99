"""From a request to rows, and from finished rows to the reply."""

import math
import secrets
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

from sedd import samplers
from sedd.loading import LoadedModel
from sedd.samplers import Remask
from sedd.samplers.template import build_prompt, template_ids, without_stop
from sedd.sampling_settings import SamplingSettings
from sedd.serve.jobs import Edit, Finished, Row, Step
from sedd.serve.limits import Limits
from sedd.serve.schema import CompletionRequest, InfillRequest, Sampling

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
MOST_LISTED = 2**16  # most tokens of a reply that lists them


class Choice(NamedTuple):
    """One text of a reply."""

    row: Row
    span: slice  # the positions whose text is returned
    template: str | None = None
    echoed: int = 0  # how many of these tokens are the prompt
    stops: Sequence[str] = ()  # the text ends before the first of these after the prompt


class Fill(NamedTuple):
    """The texts that a request wants."""

    choices: list[Choice]
    seed: int
    prompt_tokens: int


class TextConverter:
    """The model's texts: requests into rows of tokens, and tokens into text."""

    def __init__(self, loaded: LoadedModel, limits: Limits) -> None:
        self.loaded, self.limits, self.longest = loaded, limits, loaded.config.model.seq_len
        self.text, self.token_text = loaded.tokenizer.decode, cache(self._token_text)

    def completion(self, request: CompletionRequest) -> Fill:
        self._check_caps(request)
        if request.max_tokens > self.longest:
            raise ValueError(f"max_tokens is {request.max_tokens}; this model generates up to {self.longest} tokens")
        if request.logprobs is not None and not self.loaded.process.only_masks:
            raise ValueError("logprobs need absorbing noise, under which every token is drawn once; leave them out")
        if request.best_of not in (None, 1, request.n):
            advice = f"leave it out, or give {request.n}"
            raise ValueError(f"best_of is {request.best_of}, and texts are not ranked; {advice}")
        gap, end, stops = [-1] * request.max_tokens, self._encode(request.suffix or ""), _as_list(request.stop or [])
        starts = [self._encode(prompt) for prompt in _as_list(request.prompt)]

        def choice(i: int, row: Row) -> Choice:
            given = len(starts[i])
            first = 0 if request.echo else given
            return Choice(row, slice(first, given + len(gap)), echoed=given - first, stops=stops)

        return self._fill(request, ([*start, *gap, *end] for start in starts), choice)

    def infill(self, request: InfillRequest) -> Fill:
        self._check_caps(request)
        templates = _as_list(request.template)
        rows = (template_ids(text, self.loaded.tokenizer, self.longest) for text in templates)
        return self._fill(request, rows, lambda i, row: Choice(row, row.text, templates[i]))

    def _check_caps(self, request: CompletionRequest | InfillRequest) -> None:
        """Reject what would multiply the work beyond the limits, before anything of that size is made."""
        texts = request.prompt if isinstance(request, CompletionRequest) else request.template
        rows, limits = len(_as_list(texts)) * request.n, self.limits
        if rows > limits.rows:
            raise ValueError(f"the request has {rows} texts, n times prompts; at most {limits.rows} are allowed")
        steps = max(request.grid.count(","), request.steps if isinstance(request.steps, int) else 0)
        if steps > limits.steps:
            raise ValueError(f"the request has {steps} steps; at most {limits.steps} are allowed")

    def _encode(self, text: str) -> list[int]:
        ids = self.loaded.tokenizer.encode(text)
        if len(ids) > self.longest:
            raise ValueError(f"a text has {len(ids)} tokens; the model takes up to {self.longest}")
        found: list[int] = ids.tolist()
        return found

    def tokens(self, text: str) -> list[dict[str, Any]]:
        ids = self.loaded.tokenizer.encode(text)
        if len(ids) > MOST_LISTED:
            raise ValueError(f"the text has {len(ids)} tokens; at most {MOST_LISTED} are listed: send a part of it")
        return [{"id": id, "text": self.token_text(id)} for id in ids.tolist()]

    def _fill(self, request: Sampling, rows: Iterable[list[int]], choice: Callable[[int, Row], Choice]) -> Fill:
        """Return the choices of rows; reject them at the first with which a request has too many tokens."""
        given, total, most = [], 0, max(self.limits.tokens, self.longest)
        for row in rows:
            if len(row) > self.longest:
                raise ValueError(f"a text has {len(row)} tokens with its gaps; the model takes up to {self.longest}")
            if (total := total + request.n * len(row)) > most:
                advice = f"at most {most} are allowed: send fewer texts per request"
                raise ValueError(f"the request has {total} tokens or more, over all texts; {advice}")
            given.append(row)
        greedy = request.temperature == 0
        default = min(SamplingSettings.steps or 1, self.limits.steps)
        settings = SamplingSettings(
            seed=secrets.randbits(31) if request.seed is None else request.seed,
            steps=None if request.steps == "inf" else request.steps or default,
            temperature=1.0 if greedy else request.temperature,
            top_k=1 if greedy else request.top_k,
            **{name: getattr(request, name) for name in ("sampler", "grid", "top_p", "options", "label", "guidance")},
        )
        run, prompt = samplers.SamplingRun.of(self.loaded, settings), build_prompt(given, self.loaded)
        padded = zip(prompt.given.tolist(), prompt.lengths.tolist(), prompt.text_lengths.tolist(), strict=True)
        choices = [
            choice(i, Row(run, ids[:length], i * request.n + j, kept))
            for i, (ids, length, kept) in enumerate(padded)
            for j in range(request.n)
        ]
        calls, most = max(choice.row.total_calls for choice in choices), 4 * self.limits.steps
        if calls > most:
            advice = "choose fewer steps, or other options of the sampler"
            raise ValueError(f"a text needs {calls} calls of the network; at most {most} are allowed: {advice}")
        return Fill(choices, settings.seed, sum(len(ids) - ids.count(-1) for ids in given))

    def has_sampler(self, name: str) -> bool:
        try:
            samplers.SamplingRun.of(self.loaded, SamplingSettings(sampler=name))
        except ValueError:
            return False
        return True

    def show(self, choice: Choice, ids: list[int]) -> tuple[str, str]:
        """Return the text of a finished row, without what follows a stop string, and OpenAI's ``finish_reason``.

        It is ``stop`` where the model or a stop string ended the text, and for templates; ``length`` at the limit.
        """
        row = ids[choice.span]
        whole = self.text(row)
        text = without_stop(whole, choice.stops, len(self.text(row[: choice.echoed])))
        ends = choice.template is not None or self._text_tokens(row) < len(row) or len(text) < len(whole)
        return text, "stop" if ends else "length"

    def _text_tokens(self, row: list[int]) -> int:
        """Return the number of tokens before the padding at the end."""
        return next((i for i in range(len(row), 0, -1) if row[i - 1] != self.loaded.learned_pad), 0)

    def is_text(self, id: int) -> bool:
        """Return whether an id is a token of a text: no padding, and not to be drawn."""
        return 0 <= id < self.loaded.tokenizer.vocab_size and id != self.loaded.learned_pad

    def usage(self, fill: Fill, finished: dict[int, Finished]) -> dict[str, int]:
        """Return the tokens, without padding, and the network calls of a reply, given the ends of its choices."""
        rows = [(fill.choices[place].row.given, event.ids) for place, event in finished.items()]
        filled = sum(open < 0 and self.is_text(id) for given, ids in rows for open, id in zip(given, ids, strict=False))
        return {
            "prompt_tokens": fill.prompt_tokens,
            "completion_tokens": filled,
            "total_tokens": fill.prompt_tokens + filled,
            "network_calls": sum(event.calls for event in finished.values()),
        }

    def _token_text(self, id: int) -> str | None:
        """Return the text of one token; None for a mask."""
        if id >= self.loaded.tokenizer.vocab_size:
            return None
        return self.text([id]) or self.loaded.tokenizer.tokens([id])[0]

    def describe_edit(self, edit: Edit, details: bool) -> dict[str, Any]:
        text = self.token_text(edit.id)
        record: dict[str, Any] = {"position": edit.position, "id": None if text is None else edit.id, "text": text}
        if details and text is not None:
            listed, log_prob = edit.alternatives, edit.log_prob
            record["entropy"], record["probability"] = edit.entropy, None if log_prob is None else math.exp(log_prob)
            record["alternatives"] = None if listed is None else [[self.token_text(id), p] for id, p in listed]
        return record

    def logprobs(self, choice: Choice, ids: list[int], drawn: dict[int, Edit], count: int) -> dict[str, Any]:
        """Return the log-probabilities of a completion in OpenAI's format; None for given tokens."""
        row, (text, _) = ids[choice.span], self.show(choice, ids)
        starts = [len(self.text(row[:i])) for i in range(self._text_tokens(row))]
        if len(text) < len(self.text(row)):  # a stop string has cut it
            starts = [start for start in starts if start < len(text)]
        places = [choice.span.start + i for i in range(len(starts))]
        tokens = [self.token_text(ids[i]) or "" for i in places]
        edits = [drawn.get(i) for i in places]
        tops = [
            {self.token_text(id) or "": _log(p) for id, p in (edit.alternatives or [])[:count]} if edit else None
            for edit in edits
        ]
        return {
            "tokens": tokens,
            "token_logprobs": [edit.log_prob if edit else None for edit in edits],
            "top_logprobs": tops if count else None,
            "text_offset": starts,
        }


class Prefix:
    """The part of a text that is final: the tokens before the first one that is still to be drawn."""

    def __init__(self, texts: TextConverter, choice: Choice) -> None:
        self.texts, self.choice, self.sent = texts, choice, ""
        self.ids: list[int] = choice.row.given[choice.span]
        self.first = choice.span.indices(len(choice.row.given))[0]
        self.is_final = texts.loaded.process.only_masks and not isinstance(choice.row.run.sampler, Remask)

    def update(self, event: Step) -> str:
        """Return the text that an event has made final."""
        if not self.is_final:
            return ""
        for edit in event.edits:
            if 0 <= edit.position - self.first < len(self.ids):
                self.ids[edit.position - self.first] = edit.id
        known = self.ids[: self.ids.index(-1)] if -1 in self.ids else self.ids
        text = self.texts.text(known).rstrip(INCOMPLETE)  # a character may need more tokens
        after = len(self.texts.text(self.ids[: self.choice.echoed]))
        return self.send(without_stop(text, self.choice.stops, after, may_go_on=True))

    def send(self, text: str) -> str:
        """Return what follows the text that was sent before."""
        if not text.startswith(self.sent):
            return ""
        new, self.sent = text[len(self.sent) :], text
        return new


def _as_list(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


def _log(p: float) -> float:
    return max(math.log(p), -1e4) if p > 0 else -1e4
