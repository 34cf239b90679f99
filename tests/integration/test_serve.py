"""``sedd serve``: OpenAI's client, streams, refusals, keys, limits, and the same texts as the command line."""

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import openai
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from prometheus_client.parser import text_string_to_metric_families
from runs import SMALL, Sedd, ok
from schemathesis.checks import not_a_server_error
from serving import Site, site, tiny_model

from sedd import api
from sedd.serve import Limits, build_app

LOADED = tiny_model(labels=("x", "y"))


@pytest.fixture(scope="module")
def served() -> Iterator[Site]:
    with site(build_app(LOADED, "tiny", Limits(rows=8, steps=100, draws=16, body=5000, timeout=30.0))) as found:
        yield found


@pytest.fixture
def client(served: Site) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def offline(template: str, **settings: Any) -> list[str]:
    return [text.text for text in api.Model(LOADED).infill(template, **settings)]


# OpenAI's client -------------------------------------------------------------------------------------------


def test_openai_completions_are_the_texts_of_infill(client: openai.OpenAI) -> None:
    """Prompt and suffix around the tokens to fill; n texts; the same seed gives what `Model.infill` gives."""
    done = client.completions.create(
        model="tiny", prompt="abc", suffix="fed", max_tokens=10, n=3, seed=5, temperature=0.8, top_p=0.9
    )
    expected = offline("abc{10}fed", count=3, seed=5, temperature=0.8, top_p=0.9)
    assert [f"abc{choice.text}fed" for choice in done.choices] == expected
    assert done.usage
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (6, 30)
    assert client.models.list().data[0].id == client.models.retrieve("tiny").id == "tiny"


def test_openai_several_prompts_echo_and_extra_settings(client: openai.OpenAI) -> None:
    extra = {"steps": 7, "sampler": "tweedie", "label": "y", "guidance": 2.0}
    done = client.completions.create(
        model="tiny", prompt=["ab", "cde"], max_tokens=5, n=2, seed=3, echo=True, extra_body=extra
    )
    texts = api.Model(LOADED).infill(["ab{5}", "cde{5}"], 2, seed=3, **extra)
    assert [choice.text for choice in done.choices] == [text.text for text in texts]
    assert [choice.index for choice in done.choices] == [0, 1, 2, 3]


def test_openai_stream_sends_the_text_from_left_to_right(client: openai.OpenAI) -> None:
    """Only text that stays: the parts together are the whole reply."""
    extra = {"sampler": "ordered", "options": {"direction": "forward"}, "steps": 10}
    options: dict[str, Any] = {"model": "tiny", "prompt": "ab", "max_tokens": 30, "seed": 2, "extra_body": extra}
    whole = client.completions.create(**options).choices[0].text
    parts = list(client.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert "".join(part.choices[0].text for part in parts if part.choices) == whole
    assert sum(bool(part.choices and part.choices[0].text) for part in parts) == 10
    assert parts[-1].usage
    assert parts[-1].usage.completion_tokens == 30
    assert parts[-2].choices[0].finish_reason == "length"


def test_openai_logprobs_are_those_of_the_draws(client: openai.OpenAI) -> None:
    """One token per step: by the chain rule they add up to log p along that order. Likelier tokens come first."""
    extra = {"sampler": "ordered", "steps": "inf", "options": {"direction": "forward"}}
    options: dict[str, Any] = {"model": "tiny", "prompt": "ab", "max_tokens": 6, "seed": 2, "extra_body": extra}
    [choice] = client.completions.create(**options, logprobs=2, echo=True).choices
    assert choice.logprobs
    assert choice.logprobs.tokens == list(choice.text)
    assert choice.logprobs.text_offset == list(range(8))
    found = choice.logprobs.token_logprobs
    assert found
    assert found[:2] == [None, None]
    bound = api.Model(LOADED).bound(choice.text[2:], given="ab", estimator="forward")[0]
    assert sum(found[2:]) == pytest.approx(-bound.nats, abs=1e-4)
    for top in (choice.logprobs.top_logprobs or [])[2:]:
        assert top
        assert list(top.values()) == sorted(top.values(), reverse=True)


def test_openai_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="unknown field best_of"):
        client.completions.create(model="tiny", prompt="a", best_of=2)
    with pytest.raises(openai.NotFoundError, match="this server has 'tiny'"):
        client.completions.create(model="gpt-9", prompt="a")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="tiny", prompt="a", temperature=-1)


# Infilling, scores -----------------------------------------------------------------------------------------


def test_diffusing_streams_every_edit(served: Site) -> None:
    """The edits lead from the start to the end; details are there if wanted; progress is exact."""
    request = {"template": "ab{9}c{4}", "seed": 4, "steps": 6, "diffusing": True, "details": True}
    reply = served.send("/v1/infill", request)
    assert reply.headers["content-type"].startswith("text/event-stream")
    (first, start), *steps, (last, end) = reply.events
    assert (first, last, {name for name, _ in steps}) == ("start", "end", {"step"})
    tokens = [token["text"] for token in start["tokens"]]
    assert [text is None for text in tokens] == [not token["given"] for token in start["tokens"]]
    for number, (_, step) in enumerate(steps, 1):
        assert (step["nfe_done"], step["nfe_total"]) == (number, len(steps))
        for edit in step["edits"]:
            tokens[edit["position"]] = edit["text"]
            assert 0 <= edit["entropy"] <= 1.7918  # log 6
            assert len(edit["alternatives"]) == 5
            assert all(p >= q for (_, p), (_, q) in zip(edit["alternatives"], edit["alternatives"][1:], strict=False))
    assert "".join(tokens) == end["text"] == offline("ab{9}c{4}", seed=4, steps=6)[0]
    assert end["usage"]["network_calls"] == len(steps) == start["nfe_total"] - (start["nfe_total"] - len(steps))
    plain = served.send("/v1/infill", {**request, "details": False}).events[1][1]["edits"][0]
    assert set(plain) == {"position", "id", "text"}


def test_uniform_noise_streams_its_noise_first() -> None:
    loaded = tiny_model("mean", "uniform")
    with site(build_app(loaded, "noise")) as server:
        request = {"template": "ab{9}", "seed": 4, "steps": 5, "diffusing": True}
        (_, start), *steps, (_, end) = server.send("/v1/infill", request).events
        tokens = [token["text"] for token in start["tokens"]]
        for _, step in steps:
            for edit in step["edits"]:
                tokens[edit["position"]] = edit["text"]
        assert steps[0][1]["step"] == 0
        assert "".join(tokens) == end["text"]
        streamed = server.send("/v1/infill", {**request, "diffusing": False, "stream": True}).events
        assert [name if name == "[DONE]" else name["choices"][0]["text"] for _, name in streamed] == [
            end["text"],
            "[DONE]",
        ]
        refused = server.send("/v1/completions", {"prompt": "a", "logprobs": 1})
        assert (refused.status, "absorbing noise" in refused.json["error"]["message"]) == (400, True)


def test_score_is_the_bound(served: Site) -> None:
    reply = served.send("/v1/score", {"text": ["abcabc", "ffff"], "given": "ab", "draws": 16, "seed": 3})
    bounds = api.Model(LOADED).bound(["abcabc", "ffff"], given="ab", draws=16, seed=3)
    for found, bound in zip(reply.json["scores"], bounds, strict=True):
        assert found["nats"] == pytest.approx(bound.nats, abs=1e-5)
        assert found["stderr"] == pytest.approx(bound.stderr, abs=1e-5)
        assert (found["tokens"], found["is_exact"]) == (bound.tokens, False)


def test_tokens_and_models(served: Site) -> None:
    assert served.send("/v1/tokenize", {"text": "cab"}).json["tokens"][0] == {"id": 2, "text": "c"}
    [model] = served.send("/v1/models").json["data"]
    assert (model["length"], model["sampler"], model["labels"]) == (40, "first-hitting", ["x", "y"])
    assert "gibbs" not in model["samplers"]
    assert model["samplers"][0] == "first-hitting"


# Refusals --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/infill", {"template": "a{3}", "step": 3}, ["unknown field step"]),
        ("/v1/infill", {"template": "abc"}, ["no gap"]),
        ("/v1/infill", {"template": "{41}"}, ["41 tokens", "up to 40"]),
        ("/v1/infill", {"template": "{3}", "n": 9}, ["9 texts", "at most 8"]),
        ("/v1/infill", {"template": ["{3}"] * 3, "n": 3}, ["9 texts", "at most 8"]),
        ("/v1/infill", {"template": "{3}", "steps": 101}, ["101 steps", "at most 100"]),
        ("/v1/infill", {"template": "{3}", "grid": ",".join(["0.5"] * 200)}, ["199 steps", "at most 100"]),
        ("/v1/infill", {"template": "{3}", "sampler": "gibbs"}, ["gibbs", "remask"]),
        ("/v1/infill", {"template": "{3}", "sampler": "nope"}, ["'nope'", "first-hitting"]),
        ("/v1/infill", {"template": "{3}", "label": "z"}, ["'z'", "x"]),
        ("/v1/infill", {"template": "a{3}z"}, ["'z'"]),
        ("/v1/infill", {"template": "{3}", "temperature": float("nan")}, ["temperature"]),
        ("/v1/completions", {"prompt": "a", "max_tokens": 41}, ["max_tokens is 41", "up to 40"]),
        ("/v1/completions", {"prompt": 5}, ["prompt"]),
        ("/v1/completions", {"prompt": "a", "logprobs": 1, "stream": True}, ["logprobs", "stream"]),
        ("/v1/score", {"text": "a", "draws": 3}, ["draws is 3", "even", "16"]),
        ("/v1/score", {"text": "a", "draws": 18}, ["draws is 18", "16"]),
        ("/v1/score", {"text": "a", "estimator": "guess"}, ["'guess'", "bound"]),
        ("/v1/score", {"text": ""}, ["empty"]),
    ],
)
def test_bad_requests_are_refused_in_a_sentence(served: Site, path: str, body: Any, words: list[str]) -> None:
    reply = served.send(path, body)
    assert reply.status == 400, reply.body
    error = reply.json["error"]
    assert error["type"] == "invalid_request_error"
    for word in words:
        assert word in error["message"]


def test_bodies_are_limited_before_they_are_parsed(served: Site) -> None:
    """By the declared length, and by what arrives if none is declared."""
    large = served.send("/v1/infill", b"[" * 5001)
    assert (large.status, large.json["error"]["code"]) == (413, "body_too_large")
    with socket.create_connection(("127.0.0.1", served.port)) as connection:
        head = "POST /v1/infill HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        chunk = f"{3000:x}\r\n{'[' * 3000}\r\n"
        connection.sendall((head + chunk + chunk).encode())
        assert b" 413 " in connection.recv(1000)
    assert served.send("/v1/infill", b"[" * 4000).status == 400  # nested too deeply to be parsed
    assert served.send("/v1/infill", b"\xff").status == 400


def test_no_document_of_another_site_can_use_the_server(served: Site) -> None:
    """No CORS, and a policy that allows the server's own scripts alone."""
    reply = served.send("/v1/models", headers={"origin": "https://example.com"})
    assert not [name for name in reply.headers if name.startswith("access-control")]
    policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    text = served.send("/v1/tokenize", b'{"text":"a"}', {"content-type": "text/plain"})  # needs no preflight
    assert text.status == 400
    with site(build_app(LOADED, "tiny", hosts=frozenset({"127.0.0.1"}))) as local:
        assert local.send("/health").status == 200
        assert local.send("/health", headers={"host": "rebound.example"}).status == 421


def test_every_route_but_health_and_the_page_needs_the_key() -> None:
    app = build_app(LOADED, "tiny", keys=frozenset({"secret", "other"}))
    with site(app, {"authorization": "Bearer secret"}) as server:
        paths = [route.path for route in app.routes]
        assert {"/health", "/openapi.json", "/v1/infill"} <= set(paths)
        for path in paths:
            for header in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic secret"}):
                without = {"/health": 200, "/": 200, "/page/{name}": 404}  # the page's files; none has that name
                assert server.send(path, headers=header).status == without.get(path, 401)
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="other", max_retries=0) as client:
            assert client.models.list().data
        with (
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0) as client,
            pytest.raises(openai.AuthenticationError, match="API key"),
        ):
            client.models.list()


# Load ------------------------------------------------------------------------------------------------------


def test_metrics_count_what_was_done(served: Site) -> None:
    def value(name: str, **labels: str) -> float:
        families = text_string_to_metric_families(served.send("/metrics").body.decode())
        samples = [s for family in families for s in family.samples if s.name == name]
        return sum(s.value for s in samples if labels.items() <= s.labels.items())

    names = ("sedd_generated_tokens_total", "sedd_forwards_total", "sedd_forward_rows_total")
    before = [value(name) for name in names]
    skipped = value("sedd_forward_rows_skipped_total")
    served.send("/v1/infill", {"template": "a{10}", "n": 4, "steps": "inf"})
    assert [value(name) - old for name, old in zip(names, before, strict=True)] == [40, 10, 40]
    served.send("/v1/infill", {"template": "a{2}", "sampler": "ancestral", "steps": 50})
    assert value("sedd_forward_rows_skipped_total") - skipped >= 40  # steps in which nothing has changed
    assert value("sedd_requests_total", route="/v1/infill", status="200") >= 2
    assert value("sedd_rows_running") == 0


def test_concurrent_replies_equal_those_served_alone(served: Site) -> None:
    requests = [
        {"template": f"ab{{{5 + i}}}c", "seed": i, "steps": 3 + i, "temperature": 1 - i / 40, "n": 1 + i % 3}
        for i in range(16)
    ]

    def texts(request: dict[str, Any]) -> list[str]:
        return [choice["text"] for choice in served.send("/v1/infill", request).json["choices"]]

    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(texts, requests))
    assert together == [texts(request) for request in requests]
    assert len({text for some in together for text in some}) > 20


def test_a_busy_server_refuses_and_a_late_reply_fails() -> None:
    """429 with Retry-After while the queue is full; 408 after the deadline; a lost client frees its slot."""
    with site(build_app(LOADED, "tiny", Limits(slots=1, queue=1, timeout=60.0))) as server:
        long = {"template": "{40}", "sampler": "remask", "steps": 1000, "options": {"eta": 1.0}}
        body = json.dumps(long).encode()
        kind = f"content-type: application/json\r\ncontent-length: {len(body)}"
        head = f"POST /v1/infill HTTP/1.1\r\nhost: x\r\n{kind}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", server.port)) as lost:
            lost.sendall(head.encode() + body)
            while not server.engine.running:
                pass
            with ThreadPoolExecutor() as pool:
                waiting = pool.submit(server.send, "/v1/infill", {"template": "a{3}"})
                while not server.engine.waiting:
                    pass
                refused = server.send("/v1/infill", {"template": "a{3}"})
                assert refused.status == 429
                assert int(refused.headers["retry-after"]) >= 1
                assert refused.json["error"]["type"] == "rate_limit_error"
                lost.close()
                assert waiting.result().status == 200  # the slot is free again
        ended = server.engine.metrics.rows.labels("canceled")._value.get()
        assert ended == 1
        late = server.send("/v1/infill", {**long, "timeout": 0.05})
        assert (late.status, late.json["error"]["code"]) == (408, "deadline_exceeded")
        stream = server.send("/v1/infill", {**long, "timeout": 0.05, "diffusing": True}).events
        assert stream[-1][0] == "error"
        assert stream[-1][1]["code"] == "deadline_exceeded"
        ordinary = server.send("/v1/infill", {**long, "timeout": 0.05, "stream": True}).events
        assert ordinary[-1][1]["error"]["code"] == "deadline_exceeded"
        assert server.engine.outstanding == 0


def test_a_failed_row_is_a_server_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with site(build_app(LOADED, "tiny")) as server:
        hidden = type(LOADED.model).hidden
        monkeypatch.setattr(type(LOADED.model), "hidden", lambda *a: hidden(*a) * float("nan"))
        reply = server.send("/v1/infill", {"template": "a{3}"})
        assert (reply.status, reply.json["error"]["code"]) == (500, "non_finite")


def test_fuzzing_the_schema_finds_no_server_error(served: Site) -> None:
    schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
    paths = set()
    for found in schema.get_all_operations():
        operation = found.ok()

        paths.add(operation.path)

        @settings(max_examples=15, suppress_health_check=list(HealthCheck), database=None)
        @given(case=operation.as_strategy())
        def check(case: Any) -> None:
            case.call_and_validate(checks=[not_a_server_error])

        check()
    assert {"/v1/infill", "/v1/completions", "/v1/score"} <= paths


# The command -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("served")


@pytest.fixture
def run(sedd: Sedd, shelf: Path, corpus: Path) -> Path:
    """A run of one step."""
    if not (shelf / "run").exists():
        ok(sedd("train", corpus, *SMALL, "--steps", "1", "--tokenizer", "chars", "--out", shelf / "run"))
    return shelf / "run"


class Process:
    """``sedd serve`` in a process of its own."""

    def __init__(self, environment: dict[str, str], *words: object) -> None:
        command = [sys.executable, "-m", "sedd", "serve", *map(str, words), "--port", "0"]
        self.process = subprocess.Popen(command, env=environment, stderr=-1, text=True)
        assert self.process.stderr
        line = self.process.stderr.readline()
        found = re.search(r"http://127.0.0.1:(\d+)", line)
        assert found, line + self.process.stderr.read()
        self.site = Site(int(found[1]), None, {})  # type: ignore[arg-type]


def test_the_command_serves_the_texts_of_sedd_infill_and_drains(
    sedd: Sedd, run: Path, environment: dict[str, str]
) -> None:
    """SIGTERM: what was accepted is answered, nothing more is, and the exit code is 0."""
    offline = sedd("infill", run, "the {9} sat", "-n", "3", "--seed", "7", "--steps", "9", "--json")
    ok(offline)
    expected = [json.loads(line)["text"] for line in offline.stdout.splitlines()]
    server = Process(environment, run, "--name", "words", "--slots", "2")
    try:
        request = {"template": "the {9} sat", "n": 3, "seed": 7, "steps": 9, "model": "words"}
        reply = server.site.send("/v1/infill", request)
        assert [choice["text"] for choice in reply.json["choices"]] == expected
        answers: list[int] = []
        long = {"template": "{32}", "steps": 100, "sampler": "remask", "options": {"eta": 1.0}, "n": 3}
        thread = threading.Thread(target=lambda: answers.append(server.site.send("/v1/infill", long).status))
        thread.start()
        while b"sedd_rows_running 2.0" not in server.site.send("/metrics").body:
            pass
        server.process.send_signal(signal.SIGTERM)
        thread.join()
        assert answers == [200]
        assert server.process.wait(30) == 0
        with pytest.raises(ConnectionRefusedError):
            server.site.send("/health")
    finally:
        server.process.kill()
        server.process.communicate()


def test_the_command_refuses_before_the_model_is_loaded(sedd: Sedd, run: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for words, expected in (
            ((run, "--api-key-file", tmp_path / "keys"), "holds no key"),
            ((run, "--api-key-file", tmp_path / "none"), "could not be read"),
            ((run, "--port", port), f"port {port}"),
            ((run, "--slots", "0"), "slots is 0"),
            ((tmp_path / "nothing",), "holds no model"),
        ):
            done = sedd("serve", *words, before="import sedd.factory; sedd.factory.load_model = None")
            assert done.returncode == 2
            assert expected in done.stderr
            assert "Traceback" not in done.stderr


SOAK_SECONDS = 600


@pytest.mark.verify
@pytest.mark.timeout(SOAK_SECONDS + 300)
def test_ten_minutes_at_twice_the_capacity(run: Path, environment: dict[str, str]) -> None:
    """No error but 429, every accepted request answered, memory flat; a killed server leaves nothing behind."""
    server = Process(environment, run, "--slots", "8", "--queue", "16")
    statuses: Counter[int] = Counter()
    memory: list[int] = []
    end = time.monotonic() + SOAK_SECONDS

    def client(seed: int) -> None:
        while time.monotonic() < end:
            kind = seed % 4
            request = {"template": f"{{{8 * (kind + 1)}}}", "seed": seed, "steps": 8, "diffusing": kind == 3}
            reply = server.site.send("/v1/infill", request)
            statuses[reply.status] += 1
            if reply.status == 200 and kind == 3:
                assert reply.events[-1][0] == "end"

    try:
        with ThreadPoolExecutor(48) as pool:  # 24 rows fit
            clients = [pool.submit(client, seed) for seed in range(48)]
            while time.monotonic() < end:
                wait(clients, SOAK_SECONDS / 20)
                memory.append(int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1]))
            for done in clients:
                done.result()
        assert set(statuses) == {200, 429}
        metrics = server.site.send("/metrics").body.decode()
        assert "sedd_rows_running 0.0" in metrics
        assert "sedd_outstanding_cost 0.0" in metrics
        assert max(memory[10:]) < 1.05 * max(memory[3:10])
    finally:
        server.process.kill()
        server.process.communicate()
    again = Process(environment, run, "--slots", "8")
    try:
        assert again.site.send("/v1/infill", {"template": "{8}", "steps": 8}).status == 200
    finally:
        again.process.kill()
        again.process.communicate()
