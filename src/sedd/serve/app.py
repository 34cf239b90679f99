"""The HTTP interface: completions as OpenAI's, infilling, likelihoods, health and metrics."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException

from sedd import __version__
from sedd.loading import LoadedModel
from sedd.serve import schema
from sedd.serve.engine import Engine, Overloaded
from sedd.serve.guard import Guard, RequestError
from sedd.serve.limits import Limits
from sedd.serve.metrics import Metrics
from sedd.serve.page import add_page
from sedd.serve.server import Server

ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"description": "The request is refused, and why"},
    401: {"description": "The API key is missing or wrong"},
    404: {"description": "There is no such model"},
    408: {"description": "The deadline has passed"},
    413: {"description": "The body is too large"},
    429: {"description": "The server is busy; Retry-After is in seconds"},
}
LONGEST_MESSAGE = 1000
REPLIES: dict[int | str, dict[str, Any]] = {
    **ERRORS,
    200: {"content": {"application/json": {}, "text/event-stream": {}}, "description": "The reply, or its events"},
}


def build_app(
    loaded: LoadedModel,
    name: str,
    limits: Limits | None = None,
    *,
    keys: frozenset[str] = frozenset(),
    hosts: frozenset[str] | None = None,
) -> FastAPI:
    """Build the application that serves a model; its lifespan starts and stops the engine.

    Args:
        name: The model's id in requests and replies.
        keys: API keys; empty: none is needed.
        hosts: Names under which the server may be addressed; None: any.
    """
    limits, metrics = limits or Limits(), Metrics()
    engine = Engine(loaded, limits, metrics)
    metrics.watch("sedd_rows_waiting", "Rows that wait for a slot", lambda: engine.waiting)
    metrics.watch("sedd_rows_running", "Rows in slots", lambda: engine.running)
    metrics.watch("sedd_outstanding_cost", "Tokens still to be read by the network", lambda: engine.outstanding)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine.start()
        yield
        await asyncio.to_thread(engine.stop)

    app = _App(title="sedd", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_middleware(Guard, metrics=metrics, max_body=limits.body, keys=keys, hosts=hosts)
    app.state.engine = engine
    errors = RequestError, Overloaded, TimeoutError, InterruptedError, HTTPException, RequestValidationError, ValueError
    for kind in errors:
        app.add_exception_handler(kind, _answer_error)
    _add_routes(app, Server(loaded, name, limits, metrics, engine))
    add_page(app)
    return app


class _App(FastAPI):
    def openapi(self) -> dict[str, Any]:
        """Leave out status 422, which FastAPI declares for every body; here such errors have 400."""
        document = super().openapi()
        for operations in document["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            document["components"]["schemas"].pop(name, None)
        return document


def _add_routes(app: FastAPI, server: Server) -> None:
    @app.get("/health")
    async def health() -> dict[str, str]:
        """Whether the process answers."""
        return {"status": "ok"}

    @app.get("/ready", responses={503: {"description": "The engine does not run"}})
    async def ready() -> Response:
        """Whether requests are accepted."""
        alive = server.engine.is_alive
        return JSONResponse({"status": "ready" if alive else "stopped"}, 200 if alive else 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Metrics in the format of Prometheus."""
        return Response(server.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The model that is served, and what may be chosen."""
        return {"object": "list", "data": [server.describe()]}

    @app.get("/v1/models/{name:path}", responses=ERRORS)
    async def model(name: str) -> dict[str, Any]:
        """One model."""
        server.check_model(name)
        return server.describe()

    @app.post("/v1/completions", responses=REPLIES)
    async def completions(request: schema.CompletionRequest, http: Request) -> Response:
        """Generate text after a prompt, or between a prompt and a suffix."""
        server.check_model(request.model)
        return await server.fill(http, request, await server.prepare(http, server.texts.completion, request), "cmpl")

    @app.post("/v1/infill", responses=REPLIES)
    async def infill(request: schema.InfillRequest, http: Request) -> Response:
        """Fill the gaps of templates: {8} is a gap of eight tokens."""
        server.check_model(request.model)
        return await server.fill(http, request, await server.prepare(http, server.texts.infill, request), "infill")

    @app.post("/v1/score", responses=ERRORS)
    async def score(request: schema.ScoreRequest, http: Request) -> dict[str, Any]:
        """Bound −log p of texts, with standard error."""
        server.check_model(request.model)
        return await server.score(http, request)

    @app.post("/v1/tokenize", responses=ERRORS)
    async def tokenize(request: schema.TokenizeRequest, http: Request) -> Response:
        """The tokens of a text."""
        return JSONResponse({"tokens": await server.prepare(http, server.texts.tokens, request.text)})


async def _answer_error(request: Request, error: Exception) -> Response:
    """Reply to an error in OpenAI's format."""
    match error:
        case RequestError():
            return error.reply()
        case Overloaded():
            return RequestError("overloaded", str(error), {"retry-after": str(error.retry_after)}).reply()
        case TimeoutError():
            return RequestError("deadline_exceeded", str(error)).reply()
        case InterruptedError():
            return RequestError("canceled", str(error)).reply()
        case HTTPException():  # there is no such route, or not with this method
            message = f"{error.detail}: {request.method} {request.url.path}"
            return RequestError(None, message, error.headers, status=error.status_code).reply()
        case RequestValidationError():
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"][1:] if isinstance(part, str)) or None
            message = "the body is not JSON" if first["type"] == "json_invalid" else first["msg"]
            if first["type"] == "value_error":
                message = str(first["ctx"]["error"])
            if first["type"] == "extra_forbidden":
                message = f"unknown field {field}; leave it out"
            elif field:
                message = f"{field}: {message}"
            return RequestError("invalid_request", _shorten(message), param=field and _shorten(field)).reply()
    return RequestError("invalid_request", _shorten(str(error))).reply()


def _shorten(message: str) -> str:
    """Cut the middle out of a message that repeats a long value."""
    return message if len(message) <= LONGEST_MESSAGE else f"{message[:400]} … {message[-400:]}"
