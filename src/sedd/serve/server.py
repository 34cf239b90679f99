"""Answers to requests: rows for the engine, replies as a whole or as a stream, likelihoods."""

import asyncio
import json
import math
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any, TypeVar, final

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from fastapi.sse import EventSourceResponse, format_sse_event

from sedd import evaluation, sampling_settings
from sedd.card_facts import CardFacts
from sedd.model import Model
from sedd.samplers import default_sampler_name
from sedd.serve import schema
from sedd.serve.engine import Engine
from sedd.serve.errors import RequestError
from sedd.serve.fill import Fill, Prefix, TextConverter
from sedd.serve.guard import CLIENT
from sedd.serve.jobs import Call, Edit, Failed, Finished, Job, Row, Step

Given = TypeVar("Given")
Made = TypeVar("Made")
Sampled = TypeVar("Sampled", bound=schema.Sampling)
Events = AsyncIterator[tuple[int, Any]]  # what the engine tells of a job, with the row's place, or the result of a call
SILENT_SECONDS = 0.5  # a stream without final text sends a comment so often
LISTED = 5  # probable tokens that an edit lists
LONG = 2**14  # bytes of a request from which on its texts are encoded in a thread: the event loop must go on
UNREAD = 2**18  # edits of a request that may wait until its client reads them


@final
class Server:
    """A model that is served by its id, with its engine."""

    def __init__(self, engine: Engine, name: str) -> None:
        self.engine, self.name, self.loaded, self.limits = engine, name, engine.loaded, engine.limits
        self.texts, self.created = TextConverter(self.loaded, self.limits), int(time.time())
        self.temperature = CardFacts.read(self.loaded.folder).temperature
        self.encoding = asyncio.Semaphore(1)
        self.samplers = [name for name in sampling_settings.SAMPLERS.names if self.texts.has_sampler(name)]

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.name:
            raise RequestError("model_not_found", f"model is {name!r}; this server has {self.name!r}")

    async def prepare(self, http: Request, encode: Callable[[Given], Made], request: Given) -> Made:
        """Encode the texts of a request; long ones in a thread, one request at a time."""
        if len(await http.body()) <= LONG:
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

    def head(self, kind: str) -> dict[str, Any]:
        return {"id": f"{kind}-{uuid.uuid4().hex}", "created": int(time.time()), "model": self.name}

    def submit(self, http: Request, request: schema.Request, rows: Sequence[Row | Call], **options: Any) -> Events:
        """Pass work to the engine and return its events; raise `RequestError` while there is too much."""
        deadline = time.monotonic() + min(request.timeout or math.inf, self.limits.timeout)
        inbox = Inbox(rows, deadline, http.scope[CLIENT], **options)
        self.engine.submit(inbox.job)
        return inbox.events(http)

    async def fill(self, http: Request, request: Sampled, convert: Callable[[Sampled], Fill], kind: str) -> Response:
        self.check_model(request.model)
        fill = await self.prepare(http, convert, request)
        logprobs = request.logprobs if isinstance(request, schema.CompletionRequest) else None
        streams = request.stream or request.diffusing
        if logprobs is not None and streams:
            raise ValueError("logprobs come with whole replies only; leave out stream")
        alternatives = LISTED if request.diffusing and request.details else logprobs
        rows, steps = [choice.row for choice in fill.choices], streams or logprobs is not None
        events = self.submit(http, request, rows, streams=steps, alternatives=alternatives)
        reply = Reply(self, fill, kind, events)
        if request.diffusing:
            return EventSourceResponse(reply.diffusing(request.details))
        if request.stream:
            options = getattr(request, "stream_options", None)
            return EventSourceResponse(reply.stream(bool(options and options.include_usage)))
        return JSONResponse(await reply.whole(logprobs))

    async def score(self, http: Request, request: schema.ScoreRequest) -> dict[str, Any]:
        self.check_model(request.model)
        texts, limits = [request.text] if isinstance(request.text, str) else request.text, self.limits
        if len(texts) > limits.rows:
            raise ValueError(f"the request has {len(texts)} texts; at most {limits.rows} are allowed")
        draws = request.draws or min(evaluation.SINGLE_TEXT.draws, limits.draws)
        if draws > limits.draws or draws % 2:
            raise ValueError(f"draws is {draws}; it must be an even number of at most {limits.draws}")
        characters = len(texts) * len(request.given) + sum(map(len, texts))
        if characters > limits.body:
            advice = f"at most {limits.body} are allowed: send fewer texts per request"
            raise ValueError(f"the texts have {characters} characters, each with what is given; {advice}")
        settings = request.model_dump(include={"given", "estimator", "label"}) | {"seed": request.seed or 0}
        bound = partial(Model(self.loaded).bound, texts, draws=draws, batch=limits.slots, **settings)
        length = self.loaded.config.model.seq_len  # other estimators than the bound call the network for each position
        cost = len(texts) * length * max(draws, length if request.estimator not in (None, "bound") else 0)
        call = Call(lambda proceed: bound(on_progress=lambda *_: proceed()), cost)
        [(_, bounds)] = [event async for event in self.submit(http, request, [call])]
        if isinstance(bounds, Failed):
            raise RequestError(*bounds)
        names = ("nats", "stderr", "tokens", "nats_per_token", "bits_per_char", "is_exact")
        scores = [{"index": i, **{name: getattr(bound, name) for name in names}} for i, bound in enumerate(bounds)]
        usage = dict.fromkeys(("prompt_tokens", "total_tokens"), sum(bound.tokens for bound in bounds))
        return {**self.head("score"), "object": "score", "scores": scores, "usage": usage}


@final
class Reply:
    """The reply to a completion or an infilling."""

    def __init__(self, server: Server, fill: Fill, kind: str, events: Events) -> None:
        self.server, self.texts, self.fill, self.events = server, server.texts, fill, events
        self.head = {**server.head(kind), "seed": fill.seed}
        self.finished: dict[int, Finished] = {}

    def _choice(self, place: int) -> dict[str, Any]:
        choice = self.fill.choices[place]
        text, finish_reason = self.texts.show(choice, self.finished[place].ids)
        record = {"index": place, "text": text, "logprobs": None, "finish_reason": finish_reason}
        return record if choice.template is None else record | {"template": choice.template}

    async def whole(self, logprobs: int | None) -> dict[str, Any]:
        """Return the reply, with log-probabilities of the tokens and of so many others."""
        drawn: defaultdict[int, dict[int, Edit]] = defaultdict(dict)
        async for place, event in self.events:
            if isinstance(event, Failed):
                raise RequestError(*event)
            if isinstance(event, Finished):
                self.finished[place] = event
            else:
                drawn[place].update({edit.position: edit for edit in event.edits})
        choices = [self._choice(place) for place in range(len(self.fill.choices))]
        for place, choice in enumerate(self.fill.choices if logprobs is not None else ()):
            ids = self.finished[place].ids
            found = await asyncio.to_thread(self.texts.logprobs, choice, ids, drawn[place], logprobs or 0)
            choices[place]["logprobs"] = found
        usage = self.texts.usage(self.fill, self.finished)
        return {**self.head, "object": "text_completion", "choices": choices, "usage": usage}

    async def stream(self, with_usage: bool) -> AsyncIterator[bytes]:
        """Yield text that is final, in OpenAI's format."""
        prefixes, sent = [Prefix(self.texts, choice) for choice in self.fill.choices], time.monotonic()
        head = {**self.head, "object": "text_completion"}
        async for place, event in self.events:
            if time.monotonic() - sent > SILENT_SECONDS:  # what a client that has left does not take
                sent = time.monotonic()
                yield b":\n\n"
            if isinstance(event, Failed):
                yield _sse(RequestError(*event).body)
                return
            if isinstance(event, Finished):
                self.finished[place] = event
                record = self._choice(place)
                yield _sse({**head, "choices": [{**record, "text": prefixes[place].send(record["text"])}]})
            elif text := prefixes[place].update(event):
                choice = {"index": place, "text": text, "logprobs": None, "finish_reason": None}
                yield _sse({**head, "choices": [choice]})
        if with_usage:
            yield _sse({**head, "choices": [], "usage": self.texts.usage(self.fill, self.finished)})
        yield format_sse_event(data_str="[DONE]")

    async def diffusing(self, details: bool) -> AsyncIterator[bytes]:
        """Yield every edit: the events start, step and end of each text, or error."""
        started, seen, texts = time.perf_counter(), False, self.texts
        for place, choice in enumerate(self.fill.choices):
            row = choice.row
            known = [(id, texts.token_text(id)) if id >= 0 else (None, None) for id in row.given[row.text]]
            tokens = [{"id": id, "text": text, "given": id is not None} for id, text in known]
            start = {"index": place, "tokens": tokens, "nfe_total": row.total_calls, "length": len(tokens)}
            yield _sse({**self.head, **start}, "start")
        async for place, event in self.events:
            choice = self.fill.choices[place]
            if isinstance(event, Failed):
                yield _sse({"index": place, "message": event.message, "code": event.code}, "error")
            elif isinstance(event, Finished):
                self.finished[place] = event
                record = self._choice(place)
                end = {key: record[key] for key in ("index", "text", "finish_reason")}
                one = Fill([choice], self.fill.seed, sum(map(texts.is_text, choice.row.given)))
                yield _sse({**end, "infilled": texts.text(event.ids), "usage": texts.usage(one, {0: event})}, "end")
            else:
                if event.edits and not seen:
                    seen = True
                    self.server.engine.metrics.first_edit.observe(time.perf_counter() - started)
                edits = [texts.describe_edit(edit, details) for edit in event.edits]
                progress = {"nfe_done": event.calls, "nfe_total": event.total_calls}
                yield _sse({"index": place, "step": event.step, "t": event.t, **progress, "edits": edits}, "step")


@final
class Inbox:
    """Events of a request's work, from the engine's thread to the event loop.

    It cancels the work when the client goes, or reads too slowly.
    """

    def __init__(self, rows: Sequence[Row | Call], deadline: float, client: str = "", **options: Any) -> None:
        self.job = Job(rows, deadline, self.put, client, **options)
        self.loop, self.queue = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Any] | None]()
        self.sent = self.read = 0

    def put(self, place: int, event: object) -> None:
        self.sent += _size(event)
        if self.sent - self.read > UNREAD:
            self.job.canceled = True
        self.loop.call_soon_threadsafe(self.queue.put_nowait, (place, event))

    async def get(self) -> tuple[int, Any] | None:
        """Return the next event; None when the client has gone."""
        item = await self.queue.get()
        self.read += _size(item[1]) if item else 0
        return item

    async def events(self, http: Request) -> Events:
        """Yield the events until all rows, or the call, are done."""
        watcher, left = asyncio.ensure_future(self._watch(http)), len(self.job.rows)
        try:
            while left:
                if (item := await self.get()) is None:
                    raise RequestError("canceled", "the client has gone", status=499)
                yield item
                left -= not isinstance(item[1], Step)
        finally:
            self.job.canceled = True
            watcher.cancel()

    async def _watch(self, http: Request) -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass
        self.queue.put_nowait(None)


def _size(event: object) -> int:
    """Return how many plain edits take as much memory as an event."""
    return sum(1 + len(edit.alternatives or ()) for edit in event.edits) if isinstance(event, Step) else 0


def _sse(record: dict[str, Any], event: str | None = None) -> bytes:
    return format_sse_event(data_str=json.dumps(record), event=event)
