"""The HTTP interface: OpenAI's client, streams, refusals, keys, limits, and the same texts as `Model.infill`."""

import json
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from serving import Site, post, site, tiny_model

import sedd
from sedd.serve import guard
from sedd.serve.app import build_app
from sedd.serve.limits import Limits

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
    return [text.text for text in sedd.Model(LOADED).infill(template, **settings)]


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
    texts = sedd.Model(LOADED).infill(["ab{5}", "cde{5}"], 2, seed=3, **extra)
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
    bound = sedd.Model(LOADED).bound(choice.text[2:], given="ab", estimator="forward")[0]
    assert sum(found[2:]) == pytest.approx(-bound.nats, abs=1e-4)
    for top in (choice.logprobs.top_logprobs or [])[2:]:
        assert top
        assert list(top.values()) == sorted(top.values(), reverse=True)


@pytest.mark.parametrize("stop", ["d", ["fa", "ce", "ed"]], ids=str)
def test_openai_stop_ends_the_text_before_it(client: openai.OpenAI, stop: str | list[str]) -> None:
    """Whole, streamed and after an echo, in which it is not looked for; log-probabilities are of what is shown."""
    extra = {"sampler": "ordered", "options": {"direction": "forward"}, "steps": 30}
    options: dict[str, Any] = {"model": "tiny", "prompt": "dced", "max_tokens": 30, "n": 6, "extra_body": extra}
    options |= {"seed": 2, "temperature": 3}
    whole = [choice.text for choice in client.completions.create(**options).choices]
    stops = [stop] if isinstance(stop, str) else stop
    expected = [text[: min([text.find(s) for s in stops if s in text], default=30)] for text in whole]
    assert {len(text) == 30 for text in expected} >= {False}
    stopped = client.completions.create(**options, stop=stop, logprobs=1).choices
    assert [choice.text for choice in stopped] == expected
    assert all((choice.finish_reason == "stop") == (len(choice.text) < 30) for choice in stopped)
    assert ["".join(choice.logprobs.tokens or []) for choice in stopped if choice.logprobs] == expected
    echoed = client.completions.create(**options, stop=stop, echo=True).choices
    assert [choice.text for choice in echoed] == [f"dced{text}" for text in expected]
    parts, ends = [""] * 6, [""] * 6
    for event in client.completions.create(**options, stop=stop, stream=True):
        [choice] = event.choices
        parts[choice.index] += choice.text
        ends[choice.index] = choice.finish_reason or ""
    assert parts == expected
    assert ends == [choice.finish_reason for choice in stopped]


def test_openai_fields_that_change_nothing_are_accepted(client: openai.OpenAI) -> None:
    plain = client.completions.create(model="tiny", prompt="a", seed=1, n=2)
    extra: Any = {"metadata": {"a": "b"}, "store": True}
    full = client.completions.create(
        model="tiny",
        prompt="a",
        seed=1,
        n=2,
        best_of=2,
        user="someone",
        logit_bias={},
        logprobs=None,
        stop=None,
        presence_penalty=0,
        frequency_penalty=0.0,
        extra_body=extra,
    )
    assert [choice.text for choice in full.choices] == [choice.text for choice in plain.choices]


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("best_of", 3, "give 1"),
        ("presence_penalty", 0.5, "equal to 0"),
        ("frequency_penalty", -1, "equal to 0"),
        ("logit_bias", {"5": 1}, "at most 0"),
        ("stop", ["a", "b", "c", "d", "e"], "up to 4"),
        ("stop", "", "1 to 1024"),
    ],
)
def test_openai_fields_that_would_change_something_are_refused(
    client: openai.OpenAI, field: str, value: Any, allowed: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=f"{field}.*{allowed}"):
        client.completions.create(model="tiny", prompt="a", **{field: value})


def test_openai_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="unknown field temprature"):
        client.completions.create(model="tiny", prompt="a", extra_body={"temprature": 2})
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
            listed = dict(edit["alternatives"])
            assert edit["probability"] == pytest.approx(listed.get(edit["text"], 1 - sum(listed.values())), abs=1e-6)
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
        many = server.send("/v1/infill", {**request, "sampler": "gibbs", "options": {"sites": 10_000}})
        assert many.status == 400
        assert "40005 calls of the network; at most 4096" in many.json["error"]["message"]


def test_score_is_the_bound(served: Site) -> None:
    reply = served.send("/v1/score", {"text": ["abcabc", "ffff"], "given": "ab", "draws": 16, "seed": 3})
    bounds = sedd.Model(LOADED).bound(["abcabc", "ffff"], given="ab", draws=16, seed=3)
    for found, bound in zip(reply.json["scores"], bounds, strict=True):
        assert found["nats"] == pytest.approx(bound.nats, abs=1e-5)
        assert found["stderr"] == pytest.approx(bound.stderr, abs=1e-5)
        assert (found["tokens"], found["is_exact"]) == (bound.tokens, False)


def test_a_score_that_fails_in_the_server_is_answered_with_an_error(
    served: Site, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any, **options: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(sedd.Model, "bound", fail)
    reply = served.send("/v1/score", {"text": "abc"})
    error = reply.json["error"]
    assert (reply.status, error["type"], error["code"]) == (500, "server_error", "internal_error")
    assert "broken" in error["message"]
    assert "RuntimeError: broken" in capfd.readouterr().err  # with its traceback, for whoever runs the server
    monkeypatch.undo()
    assert served.send("/v1/score", {"text": "abc"}).status == 200  # the engine goes on


def test_tokens_and_models(served: Site) -> None:
    assert served.send("/v1/tokenize", {"text": "cab"}).json["tokens"][0] == {"id": 2, "text": "c"}
    [model] = served.send("/v1/models").json["data"]
    assert (model["length"], model["sampler"], model["labels"]) == (40, "first-hitting", ["x", "y"])
    assert model["temperature"] == 1  # no card states another
    assert "gibbs" not in model["samplers"]
    assert model["samplers"][0] == "first-hitting"


def test_the_temperature_of_the_card_is_stated_and_that_of_requests_is_one(tmp_path: Path) -> None:
    (tmp_path / "card.json").write_text('{"sample_metrics": {"temperature": 0.6}}')
    with site(build_app(replace(LOADED, folder=tmp_path), "warm")) as server:
        assert server.send("/v1/models").json["data"][0]["temperature"] == 0.6
        [reply] = server.send("/v1/infill", {"template": "a{9}", "seed": 1}).json["choices"]
        assert [reply["text"]] == offline("a{9}", seed=1)


# Refusals --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/infill", {"template": "a{3}", "step": 3}, ["unknown field step"]),
        ("/v1/infill", {"template": "abc"}, ["no gap"]),
        ("/v1/infill", {"template": "{41}"}, ["41 tokens", "40"]),
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
        with connect(server, "/v1/infill", long) as lost:
            wait_for(lambda: server.engine.running > 0)
            with ThreadPoolExecutor() as pool:
                waiting = pool.submit(server.send, "/v1/infill", {"template": "a{3}"})
                wait_for(lambda: server.engine.waiting > 0)
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


def connect(server: Site, path: str, body: dict[str, Any]) -> socket.socket:
    """Send a request whose reply is not read."""
    return server.connect(post(path, body))


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)  # the server's threads need the interpreter


def test_a_lost_stream_and_a_lost_score_end_at_once() -> None:
    """And a likelihood that takes too long fails with status 408, while other requests go on."""
    limits = Limits(slots=1, steps=10_000, draws=100_000, timeout=1e7)  # admitted however slow the machine is
    with site(build_app(LOADED, "tiny", limits)) as server:
        engine = server.engine
        stream = {"template": "{40}", "sampler": "remask", "steps": 10_000, "options": {"eta": 1.0}, "diffusing": True}
        with connect(server, "/v1/infill", stream) as lost:
            assert lost.recv(100)
            wait_for(lambda: engine.running == 1)
        wait_for(lambda: engine.running == 0)
        wait_for(lambda: engine.metrics.rows.labels("canceled")._value.get() == 1)  # counted after its slot is free
        score = {"text": "abcabc", "draws": 100_000}
        late = server.send("/v1/score", {**score, "timeout": 0.3})
        assert (late.status, late.json["error"]["code"]) == (408, "deadline_exceeded")
        with connect(server, "/v1/score", score):
            wait_for(lambda: engine.outstanding > 0)
            assert server.send("/v1/infill", {"template": "a{3}", "steps": 3}).status == 200
            assert engine.outstanding > 0
        wait_for(lambda: engine.outstanding == 0)


def test_the_openapi_document_declares_the_statuses_that_are_sent(served: Site) -> None:
    """FastAPI's 422 is never sent: refusals have status 400."""
    document = served.send("/openapi.json").json
    posts = [path["post"]["responses"] for path in document["paths"].values() if "post" in path]
    assert posts
    assert all("400" in responses and "422" not in responses for responses in posts)
    assert "HTTPValidationError" not in json.dumps(document)


def test_a_body_must_arrive_in_time(served: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "BODY_SECONDS", 0.1)
    with socket.create_connection(("127.0.0.1", served.port)) as slow:
        slow.sendall(b"POST /v1/infill HTTP/1.1\r\nhost: x\r\ncontent-length: 50\r\n\r\n{")
        assert b" 408 " in slow.recv(1000)


def test_a_failed_row_is_a_server_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with site(build_app(LOADED, "tiny")) as server:
        hidden = type(LOADED.model).hidden
        monkeypatch.setattr(type(LOADED.model), "hidden", lambda *a: hidden(*a) * float("nan"))
        reply = server.send("/v1/infill", {"template": "a{3}"})
        assert (reply.status, reply.json["error"]["code"]) == (500, "non_finite")


SENSIBLE: dict[str, st.SearchStrategy[Any]] = {
    "model": st.none(),
    "timeout": st.none(),
    "template": st.sampled_from(["ab{3}c", ["{2}", "a{4}"]]),
    "prompt": st.sampled_from(["ab", ""]),
    "stop": st.sampled_from([None, "a", ["b", "cd"]]),
    **dict.fromkeys(("best_of", "presence_penalty", "frequency_penalty", "logit_bias"), st.none()),
    "suffix": st.sampled_from([None, "a"]),
    "max_tokens": st.integers(1, 20),
    "text": st.sampled_from(["abc", ["a", "bcd"]]),
    "given": st.sampled_from(["", "a"]),
    "draws": st.sampled_from([2, 16]),
    "estimator": st.sampled_from([None, "bound", "forward"]),
    "n": st.integers(1, 4),
    "steps": st.sampled_from([1, 7, "inf"]),
    "grid": st.sampled_from(["uniform", "cosine", "1,0.5,0"]),
    "label": st.sampled_from([None, "x"]),
    "sampler": st.sampled_from([None, "tweedie", "theta", "remask", "entropy"]),
    "options": st.dictionaries(st.sampled_from(["theta", "eta", "bound"]), st.floats(0, 10_000), max_size=1),
}
"""Fields whose arbitrary values are nearly always refused; with these the others are tried too."""


@pytest.mark.parametrize("examples", [15, pytest.param(300, marks=pytest.mark.verify)])
def test_fuzzing_the_schema_finds_no_server_error(served: Site, examples: int) -> None:
    """Bodies as the schema describes them, bodies that are not, and bodies with texts that the model can read."""
    schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
    statuses: Counter[tuple[str, int]] = Counter()

    def check(case: Any) -> None:
        statuses[case.operation.path, case.call_and_validate(checks=[not_a_server_error]).status_code] += 1

    def check_sensible(case: Any, data: st.DataObject) -> None:
        if isinstance(case.body, dict):
            case.body |= {name: data.draw(values) for name, values in SENSIBLE.items() if name in case.body}
        check(case)

    limit = settings(max_examples=examples, suppress_health_check=list(HealthCheck), database=None)
    for found in schema.get_all_operations():
        operation = found.ok()
        limit(given(case=operation.as_strategy())(check))()
        if operation.method == "post":
            valid = operation.as_strategy(generation_mode=GenerationMode.POSITIVE)
            limit(given(case=valid, data=st.data())(check_sensible))()
    for path in ("/v1/infill", "/v1/completions", "/v1/score"):
        assert statuses[path, 200]
        assert statuses[path, 400]


def test_prompts_and_replies_are_not_logged(
    served: Site, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Not in the log at any level, not in the metrics: of requests that are answered, refused or broken."""
    secret = "abcdefedcbaabcdef"
    with caplog.at_level(0):
        reply = served.send("/v1/completions", {"prompt": secret, "max_tokens": 8, "seed": 1})
        assert reply.status == 200
        text = reply.json["choices"][0]["text"]
        for body in ({"prompt": secret, "steps": 10**9}, {"prompt": f"{secret}€"}, f'{{"prompt": "{secret}"'.encode()):
            assert served.send("/v1/completions", body).status == 400
    written = "".join(capfd.readouterr()) + caplog.text + served.send("/metrics").body.decode()
    assert secret not in written
    assert text not in written
