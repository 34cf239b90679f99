"""What clients may do to a server: small requests for much memory, idle connections, many texts of one client."""

import asyncio
import json
import socket
import tracemalloc
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest
from serving import Site, post, read_all, site, tiny_model

from sedd.serve import http
from sedd.serve import server as server_module
from sedd.serve.app import build_app
from sedd.serve.fill import TextConverter
from sedd.serve.jobs import Edit, Step
from sedd.serve.limits import Limits
from sedd.serve.schema import CompletionRequest, InfillRequest
from sedd.tokenizer import Characters

LOADED = tiny_model()
HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
LONG = {"template": "{40}", "sampler": "remask", "steps": 1000, "options": {"eta": 1.0}}
MEGABYTE = 10**6


@pytest.fixture(scope="module")
def served() -> Iterator[Site]:
    with site(build_app(LOADED, "tiny", Limits(timeout=60.0))) as found:
        yield found


# Small requests for much memory ----------------------------------------------------------------------------

FIELDS = ",".join(f'"a{i}":[]' for i in range(80_000))
BODIES: dict[str, tuple[str, bytes | dict[str, Any], str]] = {
    "gaps": ("/v1/infill", {"template": "{2000000}" * 30}, "60000000 tokens"),
    "many gaps": ("/v1/infill", {"template": "a{1}" * 200_000}, "200000 tokens"),
    "a long gap": ("/v1/infill", {"template": f"{{{'9' * MEGABYTE}}}"}, "{99999"),
    "braces": ("/v1/infill", {"template": "{{" * 500_000 + "{1}"}, "character"),
    "suffix": ("/v1/completions", {"prompt": ["a"] * 64, "suffix": "b" * MEGABYTE}, "1000000 tokens"),
    "prompts": ("/v1/completions", {"prompt": ["a" * 15_000] * 64}, "15000 tokens"),
    "given": ("/v1/score", {"text": ["a"] * 64, "given": "b" * MEGABYTE}, "64000064 characters"),
    "texts": ("/v1/score", {"text": ["a" * 15_000] * 64}, "15000 tokens"),
    "tokens": ("/v1/tokenize", {"text": "a" * MEGABYTE}, "1000000 tokens"),
    "fields": ("/v1/tokenize", f"{{{FIELDS}}}".encode(), "80000 fields"),
    "options": ("/v1/infill", f'{{"template":"{{3}}","options":{{{FIELDS}}}}}'.encode(), "80000 fields"),
    "label": ("/v1/infill", {"template": "{3}", "label": "x" * MEGABYTE}, "label is"),
}


def run_alone(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine in a thread of its own: tests in a browser leave a running loop in this one."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()


@pytest.mark.parametrize("kind", BODIES)
def test_a_small_request_takes_little_memory(served: Site, kind: str) -> None:
    """Less than 48 MB above what it was, of which reading a body of 1 MB takes some; and the reply is short."""
    path, body, words = BODIES[kind]
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    tracemalloc.start()
    reply = served.send(path, content)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (reply.status, words in reply.json["error"]["message"]) == (400, True), reply.body[:1000]
    assert peak < 48 * 2**20
    assert len(reply.body) < 2000


def test_all_texts_of_a_request_together_are_limited(refuses: Callable[..., object]) -> None:
    """n times prompts: a single text may be as long as the model's, but two may have no more tokens than the limit."""
    limits = Limits(rows=2)
    length = limits.tokens // 2 + 1
    texts = TextConverter(tiny_model(length=length), limits)
    gap = f"{{{length}}}"
    assert len(texts.infill(InfillRequest(template=gap)).choices) == 1
    refuses(lambda: texts.infill(InfillRequest(template=gap, n=2)), str(2 * length), str(limits.tokens))
    refuses(lambda: texts.infill(InfillRequest(template=[gap, gap])), str(2 * length))
    refuses(lambda: texts.completion(CompletionRequest(prompt="a", max_tokens=length - 1, n=2)), str(2 * length))


def test_a_long_text_is_encoded_beside_other_requests(served: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    encode, arrived, go_on = Characters.encode_batch, Event(), Event()

    def wait(*arguments: Any) -> Any:
        arrived.set()
        assert go_on.wait(30)
        return encode(*arguments)

    monkeypatch.setattr(Characters, "encode_batch", wait)
    with ThreadPoolExecutor() as pool:
        long = pool.submit(served.send, "/v1/tokenize", {"text": "a" * 20_000})
        assert arrived.wait(30)
        assert served.send("/health").status == 200
        go_on.set()
        assert len(long.result().json["tokens"]) == 20_000


def test_a_client_that_does_not_read_its_stream_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "UNREAD", 100)
    steps = [Step(k, 0.5, k, 9, [Edit(place, 0) for place in range(30)]) for k in range(4)]

    async def cancels_at(read: int) -> int:
        inbox = server_module.Inbox([], 0.0)
        for number, step in enumerate(steps):
            inbox.put(0, step)
            await asyncio.sleep(0)
            if number < read:
                await inbox.get()
            if inbox.job.canceled:
                return number
        return len(steps)

    assert run_alone(cancels_at(0)) == 3
    assert run_alone(cancels_at(1)) == len(steps)


# Connections -----------------------------------------------------------------------------------------------


def test_headers_must_arrive_in_time() -> None:
    """Counted from the start of the connection, or the end of the last reply; however slowly they come."""
    with site(build_app(LOADED, "tiny"), limits=Limits(header_seconds=0.3)) as server:
        clients = [server.connect(sent) for sent in (b"", HEALTH[:20], HEALTH, HEALTH + HEALTH[:20])]
        slow = server.connect(HEALTH[:5])
        slow.settimeout(0.05)
        received, left = b"", iter(HEALTH[5:-4].decode() + 200 * "x")
        while not received:
            slow.sendall(next(left).encode())
            try:
                received = slow.recv(1000)
            except TimeoutError:
                continue
        assert b" 408 " in received
        silent, half, kept, second = (read_all(client) for client in clients)
        assert silent == b""
        assert half.startswith(b"HTTP/1.1 408 ")
        assert b"connection: close" in half.lower()
        assert kept.startswith(b"HTTP/1.1 200 ")
        assert kept.count(b"HTTP/1.1") == 1
        assert second.count(b"HTTP/1.1 200 ") == second.count(b"HTTP/1.1 408 ") == 1
        for client in (*clients, slow):
            client.close()


def test_silent_connections_make_room_and_busy_ones_do_not() -> None:
    """With three connections at most: a fourth closes the oldest silent one; while three are busy, it is refused."""
    with site(build_app(LOADED, "tiny", Limits(slots=1)), limits=Limits(connections=3)) as server:
        silent = [server.connect() for _ in range(9)]
        assert server.send("/health").status == 200  # after them
        for client in silent[:7]:
            reply = read_all(client).lower()
            assert reply.startswith(b"http/1.1 503 ")
            assert b"retry-after: 1\r\n" in reply
            assert b"connection: close\r\n" in reply
        busy = [server.connect(post("/v1/infill", {**LONG, "n": n})) for n in (1, 2, 3)]
        while server.engine.running + server.engine.waiting < 6:
            pass
        with server.connect(HEALTH) as refused:
            assert read_all(refused).startswith(b"HTTP/1.1 503 ")
        assert server.engine.metrics.rows.labels("canceled")._value.get() == 0
        for client in (*silent, *busy):
            client.close()


def test_a_listener_that_is_closed_before_it_is_tried_again_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    """As after too many open files, one second before the server ends."""
    server = http.HttpServer(build_app(LOADED, "tiny"), Limits())
    server.should_exit = True

    async def try_again() -> None:
        loop: Any = asyncio.get_running_loop()
        loop.set_exception_handler(server._on_error)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            loop.call_soon(loop._start_serving, None, listener)
        await asyncio.sleep(0)

    run_alone(try_again())
    assert not caplog.records


def test_the_cap_leaves_files_for_everything_else() -> None:
    assert http.most_connections(512, 1024) == http.most_connections(512, -1) == 512
    assert 100 < http.most_connections(10_000, 1024) < 1024 - 4 * http.ACCEPTED - http.REFUSED
    assert 0 < http.most_connections(512, 100) < 50


def test_a_client_may_close_its_side_before_the_reply(served: Site) -> None:
    request = {"template": "ab{20}", "seed": 1, "sampler": "remask", "steps": 50}
    texts = [served.send("/v1/infill", request).json["choices"][0]["text"]]
    for extra in ({}, {"stream": True}):
        with served.connect(post("/v1/infill", {**request, **extra})) as connection:
            connection.shutdown(1)
            *interim, reply = read_all(connection).split(b"HTTP/1.1 ")[1:]
            assert all(part.startswith(b"100 ") for part in interim)
            assert reply.startswith(b"200 ")
            texts.append(texts[0] if texts[0].encode() in reply else reply.decode())
    assert texts[0] == texts[1] == texts[2]


def test_a_body_that_is_too_large_gets_its_reply() -> None:
    """Also where the client reads only after it has sent everything; also without a key."""
    app = build_app(LOADED, "tiny", Limits(body=1000), keys=frozenset({"key"}))
    with site(app, {"authorization": "Bearer key"}) as server:
        chunk = f"{MEGABYTE:x}\r\n".encode() + b"[" * MEGABYTE + b"\r\n"
        head = b"POST /v1/infill HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n"
        for key, status in (("key", b" 413 "), ("none", b" 401 ")):
            authorization = f"authorization: Bearer {key}\r\n"
            for request in (
                post("/v1/infill", b"[" * 8 * MEGABYTE, authorization),
                head + authorization.encode() + b"\r\n" + 8 * chunk + b"0\r\n\r\n",
            ):
                with server.connect(request) as connection:
                    reply = read_all(connection)
                assert status in reply[:20]
                assert b"connection: close" in reply.lower()


# Fields, keys, names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["seed", "n", "steps", "timeout", "temperature", "top_k", "guidance"])
def test_true_and_false_are_no_numbers(served: Site, field: str) -> None:
    for value in (True, False, "1"):
        reply = served.send("/v1/infill", {"template": "{3}", field: value})
        assert (reply.status, reply.json["error"]["param"].partition(".")[0]) == (400, field)
    assert served.send("/v1/infill", {"template": "{3}", "options": {"eta": True}}).status == 400
    assert served.send("/v1/infill", {"template": "{3}", "steps": 8.0, "seed": 3.0}).status == 200


def test_the_metrics_have_the_type_that_the_openapi_document_declares(served: Site) -> None:
    declared = served.send("/openapi.json").json["paths"]["/metrics"]["get"]["responses"]["200"]["content"]
    assert set(declared) == {served.send("/metrics").headers["content-type"].partition(";")[0]} == {"text/plain"}


def test_keys_may_be_any_text() -> None:
    app = build_app(LOADED, "tiny", keys=frozenset({"schlüssel-鍵", "plain"}))
    with site(app, {"authorization": "Bearer plain"}) as server:
        keys = ("schlüssel-鍵", b" 200 "), ("schlüssel-鍵鍵", b" 401 "), ("schlussel", b" 401 "), ("plain", b" 200 ")
        for key, status in keys:
            sent = b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\nauthorization: Bearer "
            with server.connect(sent + key.encode() + b"\r\n\r\n") as connection:
                assert status in read_all(connection)[:20]
    with site(
        build_app(LOADED, "tiny", keys=frozenset({"schlüssel"})), {"authorization": "Bearer schlüssel"}
    ) as server:
        assert server.send("/v1/models").status == 200  # in Latin-1


def test_a_host_must_be_one_of_the_servers_names() -> None:
    names = frozenset({"127.0.0.1", "localhost", "::1", "[::1]"})
    with site(build_app(LOADED, "tiny", hosts=names)) as server:
        for host in ("127.0.0.1", "localhost:1", "LOCALHOST", "[::1]", "[::1]:8321"):
            assert server.send("/health", headers={"host": host}).status == 200
        for host in ("[::1].evil.com", "[::1]x:80", "localhost:80.evil.com", "localhost:80:80", "::1", "", "evil.com"):
            assert server.send("/health", headers={"host": host}).status == 421


# Fairness --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", ["two", "one"])
def test_clients_take_turns(served: Site, other: str) -> None:
    """Clients are told apart by their keys: eight long texts of one hold up neither another's text nor its own next."""
    app = build_app(LOADED, "tiny", Limits(slots=1), keys=frozenset({"one", "two"}))
    with site(app, {"authorization": f"Bearer {other}"}) as server:
        finished = server.engine.metrics.rows.labels("finished")._value
        with server.connect(post("/v1/infill", {**LONG, "n": 8, "steps": 100}, "authorization: Bearer one\r\n")):
            while not server.engine.running:
                pass
            request = {"template": "ab{9}", "seed": 3}
            text = server.send("/v1/infill", request).json["choices"][0]["text"]
            assert finished.get() < 8  # at most one of the other's, if nothing is slow
        assert text == served.send("/v1/infill", request).json["choices"][0]["text"]
