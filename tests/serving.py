"""A small model behind the engine or behind HTTP, and requests to it."""

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fastapi import FastAPI

from sedd.exact import Distribution, Score
from sedd.loading import LoadedModel
from sedd.serve.engine import Engine
from sedd.serve.http import HttpServer
from sedd.serve.jobs import Failed, Finished, Job, Row, Step
from sedd.serve.limits import Limits
from sedd.tokenizer import Characters
from sedd.training.config import RunConfig
from sedd.training.setup import build_model, build_network, build_setup


def tiny_model(
    objective: str = "lambda-dce", process: str = "absorbing", labels: tuple[str, ...] = (), length: int = 40
) -> LoadedModel:
    """A network with random weights over the letters a to f."""
    config = RunConfig(objective=objective)
    config.noise.process, config.model.seq_len = process, length
    config.model.width, config.model.depth, config.model.heads, config.model.cond_dim = 16, 2, 2, 8
    tokenizer = Characters(alphabet="abcdef")
    setup = build_setup(config.resolved(), tokenizer.vocab_size)
    network = build_network(config, setup, len(labels)).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for parameter in network.parameters():
        parameter.normal_(0, 0.3, generator=generator)
    model = build_model(config, network, setup)
    return LoadedModel(model, network, *setup, tokenizer, config, Path("tiny"), labels)


def exact_model(distribution: Distribution, process: str = "absorbing") -> LoadedModel:
    """The exact score of a distribution over the first letters of the alphabet."""
    tokenizer = Characters(alphabet="abcdef"[: distribution.vocab_size])
    loaded = tiny_model(process=process, length=distribution.length)
    setup = build_setup(loaded.config, tokenizer.vocab_size)
    score: Any = Score(distribution, setup.process)
    return replace(loaded, model=score, process=setup.process, tokenizer=tokenizer)


class Served(NamedTuple):
    """How each row of a job ended, and its steps."""

    ends: list[Finished | Failed]
    steps: list[list[Step]]

    @property
    def ids(self) -> list[list[int] | None]:
        return [end.ids if isinstance(end, Finished) else None for end in self.ends]


class Collector:
    """Collects the events of a job; ``wait`` until all rows have ended."""

    def __init__(self, rows: Sequence[Row], seconds: float = 60, **options: Any) -> None:
        self.ends: dict[int, Finished | Failed] = {}
        self.steps: list[list[Step]] = [[] for _ in rows]
        self.ended = threading.Event()
        self.job = Job(list(rows), time.monotonic() + seconds, self._on_event, **options)

    def _on_event(self, place: int, event: Step | Finished | Failed) -> None:
        if isinstance(event, Step):
            self.steps[place].append(event)
            return
        self.ends[place] = event
        if len(self.ends) == len(self.job.rows):
            self.ended.set()

    def wait(self) -> Served:
        assert self.ended.wait(60)
        return Served([self.ends[i] for i in range(len(self.job.rows))], self.steps)


@contextmanager
def running(loaded: LoadedModel, limits: Limits | None = None) -> Iterator[Engine]:
    engine = Engine(loaded, limits or Limits())
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[tuple[str, Any]]:
        """Server-sent events: their names and data."""
        found = []
        for block in self.body.decode().strip().split("\n\n"):
            fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
            if (data := fields.get("data")) is None:
                continue  # a comment that keeps the connection open
            found.append((fields.get("event", ""), data if data == "[DONE]" else json.loads(data)))
        return found


def read_all(connection: socket.socket) -> bytes:
    """Read until the server closes the connection."""
    connection.settimeout(60)
    received = b""
    while part := connection.recv(2**16):
        received += part
    return received


class Site(NamedTuple):
    """A server's address and engine."""

    port: int
    engine: Engine
    headers: dict[str, str]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def connect(self, content: bytes = b"") -> socket.socket:
        """Open a connection and send bytes."""
        connection = socket.create_connection(("127.0.0.1", self.port))
        connection.sendall(content)
        return connection

    def send(self, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Reply:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        content = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        kind = {} if body is None else {"content-type": "application/json"}
        sent = self.headers if headers is None else headers
        connection.request("GET" if body is None else "POST", path, content, {**kind, **sent})
        reply = connection.getresponse()
        found = Reply(reply.status, {k.lower(): v for k, v in reply.getheaders()}, reply.read())
        connection.close()
        return found


def post(path: str, body: Any, headers: str = "") -> bytes:
    """Return a request as bytes."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    kind = f"content-type: application/json\r\ncontent-length: {len(content)}\r\n{headers}"
    return f"POST {path} HTTP/1.1\r\nhost: x\r\n{kind}\r\n".encode() + content


@contextmanager
def site(app: FastAPI, headers: dict[str, str] | None = None, limits: Limits | None = None) -> Iterator[Site]:
    """Serve an application in a thread; ``headers`` are sent with requests that have none."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = HttpServer(app, limits or Limits())
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    here = Site(listener.getsockname()[1], app.state.engine, headers or {})
    try:
        while here.send("/ready").status != 200:
            pass
        yield here
    finally:
        server.should_exit = True
        thread.join()


class ServerProcess:
    """A server in a process of its own, which prints its address on stderr; killed at the end of a `with` block."""

    def __init__(self, environment: dict[str, str], *words: object) -> None:
        command = [sys.executable, *map(str, words)]
        self.process = subprocess.Popen(command, env=environment, stderr=-1, text=True)
        self.printed: list[str] = []
        """Lines on stderr after the address."""
        self.site = Site(self._port(), None, {})  # type: ignore[arg-type]

    def _port(self) -> int:
        assert self.process.stderr
        printed = ""
        for line in self.process.stderr:
            printed += line
            if found := re.search(r"^serving .* at http://127.0.0.1:(\d+)", line):
                self.reader = threading.Thread(target=self._read, daemon=True)  # the pipe must not fill
                self.reader.start()
                return int(found[1])
        raise AssertionError(printed)

    def _read(self) -> None:
        assert self.process.stderr
        for line in self.process.stderr:
            self.printed.append(line)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(60)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> "ServerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.reader.join()
        assert self.process.stderr
        self.process.stderr.close()


def sedd_serve(environment: dict[str, str], *words: object) -> ServerProcess:
    """``sedd serve``; at any free port, unless the words name one."""
    port = () if "--port" in words else ("--port", 0)
    return ServerProcess(environment, "-m", "sedd", "serve", *words, *port)
