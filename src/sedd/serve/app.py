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
from sedd.serve.errors import RequestError, answer_error
from sedd.serve.guard import Guard
from sedd.serve.limits import Limits
from sedd.serve.page import add_page
from sedd.serve.server import Server

ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"description": "The request is refused, and why"},
    401: {"description": "The API key is missing or wrong"},
    404: {"description": "There is no such model"},
    408: {"description": "The deadline has passed"},
    413: {"description": "The body is too large"},
    429: {"description": "The server is busy; Retry-After is in seconds"},
    "default": {"description": "The server has failed, or is stopping"},  # with it, FastAPI declares no status 422
}
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
    engine = Engine(loaded, limits or Limits())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine.start()
        yield
        await asyncio.to_thread(engine.stop)

    app = FastAPI(title="sedd", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_middleware(Guard, metrics=engine.metrics, max_body=engine.limits.body, keys=keys, hosts=hosts)
    app.state.engine = engine
    for kind in (RequestError, HTTPException, RequestValidationError, ValueError):
        app.add_exception_handler(kind, answer_error)
    _add_routes(app, Server(engine, name))
    add_page(app)
    return app


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
        return Response(server.engine.metrics.text(), media_type="text/plain; version=0.0.4")

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
        return await server.fill(http, request, server.texts.completion, "cmpl")

    @app.post("/v1/infill", responses=REPLIES)
    async def infill(request: schema.InfillRequest, http: Request) -> Response:
        """Fill the gaps of templates: {8} is a gap of eight tokens."""
        return await server.fill(http, request, server.texts.infill, "infill")

    @app.post("/v1/score", responses=ERRORS)
    async def score(request: schema.ScoreRequest, http: Request) -> dict[str, Any]:
        """Bound −log p of texts, with standard error."""
        return await server.score(http, request)

    @app.post("/v1/tokenize", responses=ERRORS)
    async def tokenize(request: schema.TokenizeRequest, http: Request) -> Response:
        """The tokens of a text."""
        return JSONResponse({"tokens": await server.prepare(http, server.texts.tokens, request.text)})
