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
from sedd.serve.engine import Engine
from sedd.serve.guard import Guard, error_body
from sedd.serve.limits import Limits
from sedd.serve.metrics import Metrics
from sedd.serve.page import add_page
from sedd.serve.server import RequestError, Server

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
        loaded: The model.
        name: Its id in requests and replies.
        limits: Limits on queue, time and requests.
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

    app = FastAPI(title="sedd", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_middleware(Guard, metrics=metrics, max_body=limits.body, keys=keys, hosts=hosts)
    app.state.engine = engine
    _add_error_handlers(app)
    _add_routes(app, Server(loaded, name, limits, metrics, engine))
    add_page(app)
    _declare_statuses(app)
    return app


def _declare_statuses(app: FastAPI) -> None:
    """Leave status 422 out of the OpenAPI document: FastAPI declares it for every body; refusals here have 400."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        document = generate()
        for operations in document["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            document.get("components", {}).get("schemas", {}).pop(name, None)
        return document

    app.openapi = openapi  # type: ignore[method-assign]


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
        return await server.fill(http, request, await server.prepare(server.texts.completion, request), "cmpl")

    @app.post("/v1/infill", responses=REPLIES)
    async def infill(request: schema.InfillRequest, http: Request) -> Response:
        """Fill the gaps of templates: {8} is a gap of eight tokens."""
        server.check_model(request.model)
        return await server.fill(http, request, await server.prepare(server.texts.infill, request), "infill")

    @app.post("/v1/score", responses=ERRORS)
    async def score(request: schema.ScoreRequest, http: Request) -> dict[str, Any]:
        """Bound −log p of texts, with standard error."""
        server.check_model(request.model)
        return await server.score(http, request)

    @app.post("/v1/tokenize", responses=ERRORS)
    async def tokenize(request: schema.TokenizeRequest) -> Response:
        """The tokens of a text."""
        return JSONResponse({"tokens": await server.prepare(server.texts.tokens, request.text)})


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(RequestError)
    async def request_error(request: Request, error: RequestError) -> JSONResponse:
        body = error_body(str(error), error.code, status=error.status)
        return JSONResponse(body, error.status, error.headers)

    @app.exception_handler(ValueError)
    async def value_error(request: Request, error: ValueError) -> JSONResponse:
        return JSONResponse(error_body(_shorten(str(error)), "invalid_request"), 400)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{error.detail}: {request.method} {request.url.path}"
        return JSONResponse(error_body(message, None, status=error.status_code), error.status_code, error.headers)

    @app.exception_handler(RequestValidationError)
    async def validation_error(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"][1:] if isinstance(part, str)) or None
        message = "the body is not JSON" if first["type"] == "json_invalid" else first["msg"]
        if first["type"] == "value_error":
            message = str(first["ctx"]["error"])
        if first["type"] == "extra_forbidden":
            message = f"unknown field {field}; leave it out"
        elif field:
            message = f"{field}: {message}"
        return JSONResponse(error_body(_shorten(message), "invalid_request", field and _shorten(field)), 400)


def _shorten(message: str) -> str:
    """Cut the middle out of a message that repeats a long value."""
    return message if len(message) <= LONGEST_MESSAGE else f"{message[:400]} … {message[-400:]}"
