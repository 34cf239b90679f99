"""Answers to requests: rows for the engine, replies as a whole or as a stream, likelihoods."""

import asyncio
import json
import math
import time
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar, final

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from fastapi.sse import EventSourceResponse, format_sse_event

from sedd import evaluation, sampling_settings
from sedd.card_facts import CardFacts
from sedd.loading import LoadedModel
from sedd.model import Bounds, Model
from sedd.samplers import default_sampler_name
from sedd.serve import schema
from sedd.serve.engine import Engine, Overloaded
from sedd.serve.fill import Choice, Fill, Prefix, TextConverter
from sedd.serve.guard import CLIENT, error_body
from sedd.serve.jobs import Call, Edit, Event, Failed, Finished, Job, Step
from sedd.serve.limits import Limits
from sedd.serve.metrics import Metrics

Given = TypeVar("Given")
Made = TypeVar("Made")
STATUS = {"deadline_exceeded": 408, "canceled": 503, "non_finite": 500, "internal_error": 500, "invalid_request": 400}
SILENT_SECONDS = 0.5
"""A stream without final text sends a comment so often."""
LISTED = 5
"""Probable tokens that an edit lists."""
LONG = 2**14
"""Characters of a request from which on its texts are encoded in a thread: the event loop must go on."""
UNREAD = 2**18
"""Edits of a request that may wait until its client reads them."""


class RequestError(Exception):
    """A request that is answered with an error in OpenAI's format."""

    def __init__(self, status: int, message: str, code: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.headers = status, code, headers


class Server:
    """A model that is served, with its engine.

    Args:
        loaded: The model.
        name: Its id.
        limits: Limits on queue, time and requests.
        metrics: Counters.
        engine: Fills rows.
    """

    def __init__(self, loaded: LoadedModel, name: str, limits: Limits, metrics: Metrics, engine: Engine) -> None:
        self.loaded, self.name, self.limits, self.metrics, self.engine = loaded, name, limits, metrics, engine
        self.texts, self.created = TextConverter(loaded, limits), int(time.time())
        self.temperature = CardFacts.read(loaded.folder).temperature
        self.encoding = asyncio.Semaphore(1)
        self.samplers = [name for name in sampling_settings.SAMPLERS.names if self.texts.has_sampler(name)]

    def check_model(self, name: str | None) -> None:
        """Refuse another model's name."""
        if name is not None and name != self.name:
            raise RequestError(404, f"model is {name!r}; this server has {self.name!r}", "model_not_found")

    def deadline(self, timeout: float | None) -> float:
        """Return when a request must be answered."""
        return time.monotonic() + min(timeout or math.inf, self.limits.timeout)

    def submit(self, work: Job | Call) -> None:
        """Pass work to the engine; refuse it while there is too much."""
        try:
            self.engine.submit(work)
        except Overloaded as error:
            headers = {"retry-after": str(error.retry_after)}
            raise RequestError(429, str(error), "overloaded", headers) from None

    async def prepare(self, encode: Callable[[Given], Made], request: Given) -> Made:
        """Encode the texts of a request; long ones in a thread, one request at a time."""
        if _characters(request) <= LONG:
            return encode(request)
        async with self.encoding:
            return await asyncio.to_thread(encode, request)

    def describe(self) -> dict[str, Any]:
        """Return the model as `/v1/models` lists it, with what a client may choose."""
        config = self.loaded.config
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "sedd",
            "length": config.model.seq_len,
            "process": config.noise.process,
            "tokenizer": self.loaded.tokenizer.kind,
            "labels": list(self.loaded.labels),
            "temperature": self.temperature,
            "sampler": default_sampler_name(self.loaded.model),
            "samplers": self.samplers,
            "limits": {"texts": self.limits.rows, "steps": self.limits.steps, "seconds": self.limits.timeout},
        }

    # Filling -----------------------------------------------------------------------------------------------

    async def fill(self, http: Request, request: schema.Sampling, fill: Fill, kind: str) -> Response:
        """Answer a completion or an infilling, as a whole or as a stream."""
        logprobs = request.logprobs if isinstance(request, schema.CompletionRequest) else None
        if logprobs is not None and (request.stream or request.diffusing):
            raise RequestError(400, "logprobs come with whole replies only; leave out stream", "invalid_request")
        streams = request.stream or request.diffusing
        alternatives = logprobs if logprobs is not None else LISTED if request.diffusing and request.details else None
        inbox = _Inbox()
        job = Job(fill.rows, self.deadline(request.timeout), inbox.put, streams or logprobs is not None, alternatives)
        job.client, inbox.job = http.scope[CLIENT], job
        self.submit(job)
        events = _events(http, job, inbox)
        head = {"id": f"{kind}-{uuid.uuid4().hex}", "created": int(time.time()), "model": self.name}
        if request.diffusing:
            return EventSourceResponse(self._diffusing(events, fill, head, request.details))
        if request.stream:
            options = getattr(request, "stream_options", None)
            return EventSourceResponse(self._stream(events, fill, head, bool(options and options.include_usage)))
        return await self._whole(events, fill, head, logprobs)

    async def _whole(
        self, events: AsyncIterator[tuple[int, Event]], fill: Fill, head: dict[str, Any], logprobs: int | None
    ) -> Response:
        finished: dict[int, Finished] = {}
        drawn: dict[int, dict[int, Edit]] = {place: {} for place in range(len(fill.choices))}
        async for place, event in events:
            if isinstance(event, Failed):
                raise RequestError(STATUS[event.code], event.message, event.code)
            if isinstance(event, Finished):
                finished[place] = event
            else:
                drawn[place].update({edit.position: edit for edit in event.edits})
        choices = []
        for place, choice in enumerate(fill.choices):
            record = self._choice(place, choice, finished[place].ids)
            if logprobs is not None:
                found = finished[place].ids, drawn[place], logprobs
                record["logprobs"] = await asyncio.to_thread(self.texts.logprobs, choice, *found)
            choices.append(record)
        record = {**head, "object": "text_completion", "choices": choices, "seed": fill.settings.seed}
        return JSONResponse({**record, "usage": self.texts.usage(fill, finished)})

    def _choice(self, place: int, choice: Choice, ids: list[int]) -> dict[str, Any]:
        text, finish_reason = self.texts.show(choice, ids)
        record = {"index": place, "text": text, "logprobs": None, "finish_reason": finish_reason}
        return record if choice.template is None else record | {"template": choice.template}

    async def _stream(
        self, events: AsyncIterator[tuple[int, Event]], fill: Fill, head: dict[str, Any], with_usage: bool
    ) -> AsyncIterator[bytes]:
        """Send text that is final, in OpenAI's format."""
        prefixes = [Prefix(self.texts, choice) for choice in fill.choices]
        head, finished = {**head, "object": "text_completion", "seed": fill.settings.seed}, dict[int, Finished]()
        sent = time.monotonic()
        async for place, event in events:
            if time.monotonic() - sent > SILENT_SECONDS:  # what a client that has left does not take
                sent = time.monotonic()
                yield b":\n\n"
            if isinstance(event, Failed):
                yield _sse(error_body(event.message, event.code, status=STATUS[event.code]))
                return
            if isinstance(event, Finished):
                finished[place] = event
                record = self._choice(place, fill.choices[place], event.ids)
                yield _sse({**head, "choices": [{**record, "text": prefixes[place].finish(record["text"])}]})
            elif text := prefixes[place].update(event):
                choice = {"index": place, "text": text, "logprobs": None, "finish_reason": None}
                yield _sse({**head, "choices": [choice]})
        if with_usage:
            yield _sse({**head, "choices": [], "usage": self.texts.usage(fill, finished)})
        yield format_sse_event(data_str="[DONE]")

    async def _diffusing(
        self, events: AsyncIterator[tuple[int, Event]], fill: Fill, head: dict[str, Any], details: bool
    ) -> AsyncIterator[bytes]:
        """Send every edit: the events start, step and end of each text, or error."""
        started, seen = time.perf_counter(), False
        for place, choice in enumerate(fill.choices):
            yield _sse({**head, **self._start(place, choice), "seed": fill.settings.seed}, "start")
        async for place, event in events:
            row = fill.choices[place].row
            if isinstance(event, Failed):
                yield _sse({"index": place, "message": event.message, "code": event.code}, "error")
            elif isinstance(event, Finished):
                record = self._choice(place, fill.choices[place], event.ids)
                end = {key: record[key] for key in ("index", "text", "finish_reason")}
                one = Fill([fill.choices[place]], fill.settings, sum(map(self.texts.is_text, row.given)))
                whole = self.texts.text(event.ids)
                yield _sse({**end, "infilled": whole, "usage": self.texts.usage(one, {0: event})}, "end")
            else:
                if event.edits and not seen:
                    seen = True
                    self.metrics.first_edit.observe(time.perf_counter() - started)
                edits = [self.texts.describe_edit(edit, details) for edit in event.edits]
                progress = {"nfe_done": event.calls, "nfe_total": event.total_calls}
                yield _sse({"index": place, "step": event.step, "t": event.t, **progress, "edits": edits}, "step")

    def _start(self, place: int, choice: Choice) -> dict[str, Any]:
        row = choice.row
        tokens = [
            {"id": None, "text": None, "given": False}
            if id < 0
            else {"id": id, "text": self.texts.token_text(id), "given": True}
            for id in row.given[row.text]
        ]
        return {"index": place, "tokens": tokens, "nfe_total": row.total_calls, "length": len(tokens)}

    # Likelihood --------------------------------------------------------------------------------------------

    async def score(self, http: Request, request: schema.ScoreRequest) -> dict[str, Any]:
        """Bound −log p of texts."""
        texts = [request.text] if isinstance(request.text, str) else request.text
        if len(texts) > self.limits.rows:
            raise ValueError(f"the request has {len(texts)} texts; at most {self.limits.rows} are allowed")
        draws = request.draws or min(evaluation.SINGLE_TEXT.draws, self.limits.draws)
        if draws > self.limits.draws or draws % 2:
            raise ValueError(f"draws is {draws}; it must be an even number of at most {self.limits.draws}")
        characters = len(texts) * len(request.given) + sum(map(len, texts))
        if characters > self.limits.body:
            raise ValueError(
                f"the texts have {characters} characters, each with what is given; at most {self.limits.body} are "
                "allowed: send fewer texts per request"
            )
        model, loop = Model(self.loaded), asyncio.get_running_loop()
        done: asyncio.Future[object] = loop.create_future()

        def compute(proceed: Callable[[], None]) -> object:
            return model.bound(
                texts,
                given=request.given,
                draws=draws,
                seed=request.seed or 0,
                estimator=request.estimator,
                label=request.label,
                batch=self.limits.slots,
                on_progress=lambda *_: proceed(),
            )

        def on_done(result: object) -> None:
            loop.call_soon_threadsafe(_set_result, done, result)

        length = self.loaded.config.model.seq_len  # other estimators than the bound call the network for each position
        cost = len(texts) * length * max(draws, length if request.estimator not in (None, "bound") else 0)
        call = Call(compute, cost, self.deadline(request.timeout), on_done)
        call.client = http.scope[CLIENT]
        self.submit(call)
        gone = asyncio.ensure_future(_disconnected(http))
        waited: set[asyncio.Future[Any]] = {done, gone}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        call.canceled = True
        bounds = await done
        match bounds:
            case TimeoutError():
                raise RequestError(408, str(bounds), "deadline_exceeded")
            case InterruptedError():
                raise RequestError(503, str(bounds), "canceled")
            case Exception():
                raise bounds
        assert isinstance(bounds, Bounds)
        scores = [
            {
                "index": i,
                "nats": bound.nats,
                "stderr": bound.stderr,
                "tokens": bound.tokens,
                "nats_per_token": bound.nats_per_token,
                "bits_per_char": bound.bits_per_char,
                "is_exact": bound.is_exact,
            }
            for i, bound in enumerate(bounds)
        ]
        tokens = sum(bound.tokens for bound in bounds)
        record = {"id": f"score-{uuid.uuid4().hex}", "object": "score", "created": int(time.time()), "model": self.name}
        return {**record, "scores": scores, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}


def _characters(request: object) -> int:
    """Return the length of all texts of a request."""
    values = [request] if isinstance(request, str) else vars(request).values()
    texts = [[value] if isinstance(value, str) else value for value in values if isinstance(value, str | list)]
    return sum(len(text) for some in texts for text in some if isinstance(text, str))


def _set_result(future: "asyncio.Future[object]", result: object) -> None:
    if not future.done():  # the client may have gone
        future.set_result(result)


async def _disconnected(http: Request) -> None:
    """Wait until the client has gone."""
    while (await http.receive())["type"] != "http.disconnect":
        pass


@final
class _Inbox:
    """Events of a job, from the engine's thread to the event loop; cancels a job whose client reads too slowly."""

    def __init__(self) -> None:
        self.loop, self.queue = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Event] | None]()
        self.job: Job | None = None
        self.sent = self.read = 0

    def put(self, place: int, event: Event) -> None:
        """Pass an event on; called by the engine."""
        self.sent += _size(event)
        if self.job and self.sent - self.read > UNREAD:
            self.job.canceled = True
        self.loop.call_soon_threadsafe(self.queue.put_nowait, (place, event))

    async def get(self) -> tuple[int, Event] | None:
        """Return the next event; None when the client has gone."""
        item = await self.queue.get()
        self.read += _size(item[1]) if item else 0
        return item


def _size(event: Event) -> int:
    """Return how many plain edits take as much memory as an event."""
    return sum(1 + len(edit.alternatives or ()) for edit in event.edits) if isinstance(event, Step) else 0


async def _events(http: Request, job: Job, inbox: _Inbox) -> AsyncIterator[tuple[int, Event]]:
    """Yield the events of a job until all rows are done; cancel it when the client goes."""
    watcher = asyncio.ensure_future(_disconnected(http))
    watcher.add_done_callback(lambda task: inbox.queue.put_nowait(None))
    left = len(job.rows)
    try:
        while left:
            item = await inbox.get()
            if item is None:
                raise RequestError(499, "the client has gone", "canceled")
            yield item
            left -= not isinstance(item[1], Step)
    finally:
        job.canceled = True
        watcher.cancel()


def _sse(record: dict[str, Any], event: str | None = None) -> bytes:
    return format_sse_event(data_str=json.dumps(record), event=event)
