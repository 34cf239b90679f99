"""Load on a server with random weights: one request at a time, many clients, and random arrivals.

python benchmarks/serve.py --clients 64 --seconds 8 --json
python benchmarks/serve.py --device cpu --length 32 --vocab 256 --steps 32

Clients connect over the loopback interface. Random arrivals come at half and at twice the throughput of many clients.
Latencies are to the end of a reply, and to the first edit of a stream. A request must get the same text with and
without other load; replies that differ are counted. Offline sampling is measured first, in the server's process.

Closed loop: every client sends its next request when it has its reply. Open loop: requests arrive at random (Poisson),
whether or not earlier ones are answered, so that the server can be loaded beyond its capacity.
"""

import http.client
import json
import multiprocessing
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch
from measure import build_parser, describe_machine, read_setting
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sample import SampleSetting, random_model
from train import TrainSetting

from sedd.extras import require_server
from sedd.loading import LoadedModel
from sedd.runtime.cuda_graphs import batch_bucket
from sedd.samplers import SamplingRun, SamplingSettings, blank_prompt
from sedd.serve.limits import Limits


@dataclass(frozen=True)
class ServeSetting:
    """The model to serve and the load."""

    model: SampleSetting
    """``batch`` is the number of slots."""
    clients: int = 32
    seconds: float = 10.0
    """Duration of each load."""

    def __post_init__(self) -> None:
        if self.clients < 1 or not self.seconds > 0:
            raise ValueError(f"clients {self.clients}, seconds {self.seconds}: both must be above 0")

    def body(self, seed: int, diffusing: bool = False) -> bytes:
        """Return a request for one text of full length."""
        request = {"seed": seed, "steps": self.model.steps, "sampler": self.model.sampler, "diffusing": diffusing}
        return json.dumps({**request, "template": f"{{{self.length}}}"}).encode()

    @cached_property
    def length(self) -> int:
        """Tokens per text."""
        m = self.model
        return TrainSetting(m.recipe, m.process, m.objective, length=m.length).run().model.seq_len


class Load(NamedTuple):
    """What a load led to."""

    variant: str
    tokens_per_second: float
    replies: int
    refused: int
    """Replies with status 429."""
    errors: int
    p50: float | None
    """Latency in milliseconds, from the request to the last byte of the reply."""
    p95: float | None
    p99: float | None
    first_edit: float | None
    """Median time to the first edit in milliseconds, of streams."""
    occupancy: float | None
    """Rows per forward pass."""
    skipped: float | None
    """Share of the steps of rows that needed no forward pass."""
    differing: int
    """Replies that differ from the one that the same request had without other load."""


@dataclass
class _Outcomes:
    """Replies of a load, collected from many threads."""

    texts: dict[int, str] = field(default_factory=dict)
    latencies: list[float] = field(default_factory=list)
    first_edits: list[float] = field(default_factory=list)
    refused: int = 0
    errors: int = 0


def measure_serving(setting: ServeSetting, on_offline: Callable[[float], None]) -> Iterator[Load]:
    """Start a server and measure one request at a time, many clients, and random arrivals below and above capacity.

    Args:
        setting: The model and the load.
        on_offline: Called with the tokens per second of ``sedd sample`` in the server's process.
    """
    require_server()
    with _server(setting) as (port, offline):
        on_offline(offline)
        alone = _closed_loop(setting, port, 1)
        texts, load = alone[0].texts, alone[1]
        yield load
        full = _closed_loop(setting, port, setting.clients, texts)[1]
        yield full
        capacity = full.tokens_per_second / setting.length
        yield _open_loop(setting, port, capacity / 2, "half of that rate", texts)
        yield _open_loop(setting, port, capacity * 2, "twice that rate", texts)


@contextmanager
def _server(setting: ServeSetting) -> Iterator[tuple[int, float]]:
    """Serve in another process; yields its port and the throughput of offline sampling there."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(setting, there))
    process.start()
    there.close()
    try:
        offline = here.recv()
        port = here.recv()
        while not _is_ready(port):
            if process.exitcode is not None:
                raise EOFError
            time.sleep(0.05)
        yield port, offline
    except EOFError:
        raise RuntimeError("the server's process has ended; its error is above") from None
    finally:
        process.terminate()
        process.join()


def _serve(setting: ServeSetting, pipe: Connection) -> None:
    from sedd.serve.app import build_app
    from sedd.serve.http import HttpServer

    loaded = random_model(setting.model)
    run = SamplingRun.of(loaded, SamplingSettings(sampler=setting.model.sampler, steps=setting.model.steps))
    prompt = blank_prompt(loaded, setting.model.batch, None).to(loaded.device)
    _capture_graphs(loaded, setting.model.batch)
    run.sample(prompt, setting.model.batch)
    start = time.perf_counter()
    run.sample(prompt, setting.model.batch)
    pipe.send(prompt.given.numel() / (time.perf_counter() - start))
    listener = socket.create_server(("127.0.0.1", 0))
    pipe.send(listener.getsockname()[1])
    limits = Limits(slots=setting.model.batch, queue=2 * setting.model.batch)
    HttpServer(build_app(loaded, "random", limits), limits).run(sockets=[listener])


def _capture_graphs(loaded: LoadedModel, rows: int) -> None:
    """Call the network with batches of every size that a server of so many slots pads to.

    Each captures a CUDA graph at its first call; under load that would be part of what is measured.
    """
    x = torch.zeros(rows, loaded.config.model.seq_len, dtype=torch.long, device=loaded.device)
    for count in {batch_bucket(count): count for count in range(1, rows + 1)}.values():
        loaded.model.hidden(x[:count], torch.ones(count, device=loaded.device))


def _is_ready(port: int) -> bool:
    try:
        return _get(port, "/ready")[0] == 200
    except OSError:
        return False


def _get(port: int, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", path)
    reply = connection.getresponse()
    status, body = reply.status, reply.read().decode()
    connection.close()
    return status, body


def _metrics(port: int) -> dict[str, float]:
    lines = [line.rsplit(" ", 1) for line in _get(port, "/metrics")[1].splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


def _send(
    setting: ServeSetting, connection: http.client.HTTPConnection, seed: int, streams: bool, to: _Outcomes
) -> None:
    """Send one request and record its reply."""
    started = time.perf_counter()
    try:
        connection.request("POST", "/v1/infill", setting.body(seed, streams), {"content-type": "application/json"})
        reply = connection.getresponse()
        if reply.status != 200:
            reply.read()
            to.refused, to.errors = to.refused + (reply.status == 429), to.errors + (reply.status != 429)
            return
        text = _read_events(reply, started, to) if streams else json.loads(reply.read())["choices"][0]["text"]
    except (OSError, http.client.HTTPException):
        to.errors += 1
        connection.close()
        return
    to.latencies.append(time.perf_counter() - started)
    to.texts[seed] = text


def _read_events(reply: http.client.HTTPResponse, started: float, to: _Outcomes) -> str:
    """Read a stream to its end; record when the first edit came."""
    text, waiting, kind = "", True, ""
    for line in reply:
        if line.startswith(b"event: "):
            kind = line[7:].strip().decode()
        elif line.startswith(b"data: ") and kind == "step" and waiting:
            to.first_edits.append(time.perf_counter() - started)
            waiting = False
        elif line.startswith(b"data: ") and kind == "end":
            text = json.loads(line[6:])["text"]
    return text


def _closed_loop(
    setting: ServeSetting, port: int, clients: int, expected: dict[int, str] | None = None
) -> tuple[_Outcomes, Load]:
    outcomes, numbers = _Outcomes(), iter(range(10**9))
    lock, end = threading.Lock(), time.perf_counter() + setting.seconds

    def client() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
        while time.perf_counter() < end:
            with lock:
                seed = next(numbers)
            _send(setting, connection, seed, False, outcomes)
        connection.close()

    name = "one at a time" if clients == 1 else f"{clients} clients"
    threads = [threading.Thread(target=client) for _ in range(clients)]
    return outcomes, _run(setting, port, name, threads, outcomes, expected)


def _open_loop(setting: ServeSetting, port: int, rate: float, name: str, expected: dict[int, str]) -> Load:
    outcomes, draw, at = _Outcomes(), random.Random(0), 0.0
    began = time.perf_counter()

    def request(seed: int, at: float) -> None:
        time.sleep(max(0.0, began + at - time.perf_counter()))
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
        _send(setting, connection, seed, True, outcomes)
        connection.close()

    threads: list[threading.Thread] = []
    while (at := at + draw.expovariate(rate)) < setting.seconds:
        threads.append(threading.Thread(target=request, args=(len(threads), at)))
    return _run(setting, port, name, threads, outcomes, expected)


def _run(
    setting: ServeSetting,
    port: int,
    name: str,
    threads: list[threading.Thread],
    outcomes: _Outcomes,
    expected: dict[int, str] | None,
) -> Load:
    before, start = _metrics(port), time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds, after = time.perf_counter() - start, _metrics(port)

    def grown(metric: str) -> float:
        return after[metric] - before[metric]

    rows, passes = grown("sedd_forward_rows_total"), grown("sedd_forwards_total")
    skipped = grown("sedd_forward_rows_skipped_total")
    known = expected or {}
    differing = sum(known.get(seed, text) != text for seed, text in outcomes.texts.items())
    p50, p95, p99 = (_quantile(outcomes.latencies, share) for share in (0.5, 0.95, 0.99))
    return Load(
        variant=name,
        tokens_per_second=len(outcomes.latencies) * setting.length / seconds,
        replies=len(outcomes.latencies),
        refused=outcomes.refused,
        errors=outcomes.errors,
        p50=p50,
        p95=p95,
        p99=p99,
        first_edit=_quantile(outcomes.first_edits, 0.5),
        occupancy=rows / passes if passes else None,
        skipped=skipped / (rows + skipped) if rows + skipped else None,
        differing=differing,
    )


def _quantile(values: list[float], share: float) -> float | None:
    """Return a quantile in milliseconds."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] * 1e3 if values else None


def _milliseconds(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f} ms"


ROWS: dict[str, Callable[[Load], str]] = {
    "tokens/s": lambda load: f"{load.tokens_per_second:,.0f}",
    "replies": lambda load: str(load.replies),
    "refused (429)": lambda load: str(load.refused),
    "errors": lambda load: str(load.errors),
    "latency p50": lambda load: _milliseconds(load.p50),
    "p95": lambda load: _milliseconds(load.p95),
    "p99": lambda load: _milliseconds(load.p99),
    "first edit p50": lambda load: _milliseconds(load.first_edit),
    "rows per pass": lambda load: f"{load.occupancy or 0:.1f}",
    "passes skipped": lambda load: f"{load.skipped or 0:.0%}",
    "differing": lambda load: str(load.differing),
}


def main() -> None:
    """Measure and print."""
    parser = build_parser(__doc__, SampleSetting, without=("batch", "repeats"))
    parser.add_argument("--clients", dest="batch", type=int, default=32, help="clients, and slots of the server")
    parser.add_argument("--seconds", type=float, default=10.0, help="duration of each of the four loads")
    args = parser.parse_args()
    model = read_setting(parser, args, SampleSetting)
    offline: list[float] = []
    loads = measure_serving(ServeSetting(model, model.batch, args.seconds), offline.append)
    measured = list(track(loads, "measuring", 4, console=Console(stderr=True), transient=True))
    if args.json:
        machine = describe_machine(model.device, model.precision)
        record = {"machine": machine._asdict(), "setting": model.__dict__, "offline_tokens_per_second": offline[0]}
        print(json.dumps({**record, "loads": [load._asdict() for load in measured]}))
        return
    table = Table("", *(load.variant for load in measured), box=None, pad_edge=False)
    for name, show in ROWS.items():
        table.add_row(name, *map(show, measured))
    alone, many = measured[:2]
    print(f"offline sampling, batch {model.batch}: {offline[0]:,.0f} tokens/s")
    print(
        f"{many.variant}: {many.tokens_per_second / offline[0]:.1%} of that, "
        f"{many.tokens_per_second / alone.tokens_per_second:.1f} times {alone.variant}"
    )
    Console().print(table)


if __name__ == "__main__":
    main()
