"""What the generated reference pages say in prose, and what no program states: replies, events and errors over HTTP.

tests/docs/test_reference.py compares their fields with those of real replies, and the codes with those in the source.
"""

CLI = """
This page lists all commands with their arguments, options, types and defaults, as `--help` after a command does.
Data goes to stdout and everything else to stderr, where commands that need a model state first,
what they do. The exit code is 0 on success, 2 for arguments or data that it rejects and 1 for other
failures; a run that a signal stops ends with 128 and its number. An option without a default in its table is unset;
*flag* means that it takes no value."""

CLI_END = """
Guides: [Training](../guides/training.md) · [Sampling and infilling](../guides/sampling.md) · [Likelihood and
perplexity](../guides/likelihood.md) · [Serving](../guides/serve.md). Keys of `--set`: [Configuration
keys](configuration.md). From Python: [Python API](../guides/python.md)."""

KEYS = """
This page lists every key of a training run with its type, allowed values, default and meaning, as
`sedd.training.config` has them. [Configuration](../guides/configuration.md) shows how to set them and which source
wins."""

DEFAULTS = """
Defaults are written as in a run's `config.json`; `null` means that the value is chosen when the run starts, or
that there is none. Names that other packages register are allowed too: [Writing a network, a process, an
objective, a sampler or a kernel](../guides/extend.md)."""

SAMPLER_OPTIONS = """
A sampler is chosen when sampling, not in training: `sedd sample run --sampler theta --option theta=0.4`, or
`options` in Python and over HTTP. What each one does: [Samplers](../concepts/samplers.md)."""

EXAMPLE = "sedd train book.txt --out wide --recipe tiny --steps 2 --set model.width=192 --set noise.options.eps=1e-4"
SECTIONS = {
    "data": ("Data", "What is read, and how: [Data and tokenizers](../guides/data.md)."),
    "noise": ("Noise", "What the processes and schedules are: [Mathematics](../mathematics.md)."),
    "model": ("Network", "What the parts are: [The network](../concepts/network.md)."),
    "optim": ("Optimizer", "Optimizer, learning-rate schedule, gradient clipping, and the average of the weights."),
    "budget": ("Budget", "Training stops at the first limit that is reached; without any, after 1000 steps."),
    "train": (
        "Training",
        "How a step is computed, and what is done every so many steps; an interval of 0 switches it off.",
    ),
}
"""Heading of each section of the configuration, and the line below it."""


INTRODUCTION = """\
# HTTP interface: routes, fields, events and errors of `sedd serve`

NOTE

This page lists what a server accepts and returns: requests as in its OpenAPI document (`GET /openapi.json`), replies,
events of streams, errors. [Serving](../guides/serve.md) explains how to start one, and what it guarantees.

```python
from pathlib import Path

from fastapi.testclient import TestClient

import sedd
from sedd.serve.app import build_app

Path("book.txt").write_text("It was the best of times, it was the worst of times. " * 100)
model = sedd.train("book.txt", out="book", recipe="tiny", steps=1)
with TestClient(build_app(model.loaded, "book")) as client:
    print(client.post("/v1/tokenize", json={"text": "It"}).json())
    reply = client.post("/v1/infill", json={"template": "It was {4} times.", "seed": 1, "temprature": 0.5})
print(reply.status_code, reply.json()["error"]["message"])
```

```text
{'tokens': [{'id': 73, 'text': 'I'}, {'id': 116, 'text': 't'}]}
400 unknown field temprature; leave it out
```"""

RULES = """
Requests are JSON. With `--api-key-file`, every route but `/health` and the files of the page needs the header
`Authorization: Bearer KEY`. Unknown fields are refused, and so are numbers written as text or as
`true`. A limit of the server (`--max-steps`, `--max-texts`) may be below that of a field."""

EVERY = "Those of `/v1/completions`, `/v1/infill` and `/v1/score`."
SAMPLING = (
    "Those of `/v1/completions` and `/v1/infill`, as of `sedd sample`. Options: [Configuration keys](configuration.md)."
)

ROUTES = {
    "/v1/completions": "Generate up to `max_tokens` tokens after a prompt, or exactly so many before a suffix.",
    "/v1/infill": "Fill the gaps of templates.",
    "/v1/score": "Bound −log p of texts: [Likelihood and perplexity](../guides/likelihood.md).",
    "/v1/tokenize": "Split a text into tokens.",
}

_USAGE = {
    "usage.prompt_tokens": "Given tokens, each prompt or template counted once",
    "usage.completion_tokens": "Filled tokens of all texts, without padding",
    "usage.total_tokens": "Their sum",
    "usage.network_calls": "Calls of the network that were made for these texts",
}
_USAGE_OF_ONE = {
    "usage.prompt_tokens": "Given tokens",
    "usage.completion_tokens": "Filled tokens, without padding",
    "usage.total_tokens": "Their sum",
    "usage.network_calls": "Calls of the network that were made for this text",
}
_HEAD = {
    "id": "Id of the reply",
    "created": "Seconds since 1970",
    "model": "Id of the model",
    "object": "`text_completion`",
}
_CHOICE = {
    "choices[].index": "Number of the text: those of the first prompt first",
    "choices[].text": "The filled text; of a template, the whole text",
    "choices[].logprobs": "`null`, or for a request with `logprobs` an object: `tokens`, `token_logprobs`, "
    "`top_logprobs` (`null` for `logprobs` 0) and `text_offset`, lists with an entry per token",
    "choices[].finish_reason": "`stop` if the model or a string of `stop` ended the text, and for templates; "
    "`length` at `max_tokens`",
}
_FILLED = {**_HEAD, **_CHOICE, "seed": "The seed, also if the server drew it", **_USAGE}
_MODEL = {
    "id": "Id of the model",
    "object": "`model`",
    "created": "When the server started, in seconds since 1970",
    "owned_by": "`sedd`",
    "length": "Tokens per sequence",
    "process": "Noise process",
    "tokenizer": "Kind of the tokenizer",
    "labels": "Labels that requests may have; empty: none",
    "temperature": "The temperature that suits it, with which the page begins; that of requests is 1 by default",
    "sampler": "The default sampler",
    "samplers": "Samplers that fit the model",
    "limits.texts": "Most texts of a request",
    "limits.steps": "Most steps of a request",
    "limits.seconds": "Seconds within which a request is answered",
}

REPLIES = {
    "/v1/completions": _FILLED,
    "/v1/infill": {**_FILLED, "choices[].template": "The template that was filled"},
    "/v1/score": {
        "id": "Id of the reply",
        "object": "`score`",
        "created": "Seconds since 1970",
        "model": "Id of the model",
        "scores[].index": "Number of the text",
        "scores[].nats": "Upper bound on −log p of the text, in nats",
        "scores[].stderr": "Its standard error",
        "scores[].tokens": "Tokens of the text",
        "scores[].nats_per_token": "nats / tokens",
        "scores[].bits_per_char": "Bits per character; `null` where the tokens are not text",
        "scores[].is_exact": "Whether it is −log p itself, without a Monte Carlo error",
        "usage.prompt_tokens": "Tokens of all texts",
        "usage.total_tokens": "The same",
    },
    "/v1/tokenize": {"tokens[].id": "Id of the token", "tokens[].text": "Its text"},
    "/v1/models": {"object": "`list`", **{f"data[].{name}": meaning for name, meaning in _MODEL.items()}},
    "/health": {"status": "`ok`"},
    "/ready": {"status": "`ready` with status 200, or `stopped` with status 503"},
}
"""The fields of a reply by their paths; [] stands for each entry of a list."""

SAME = {"/v1/infill": "/v1/completions"}
"""Routes whose reply has the fields of another's, and more."""

READ = """
`GET /v1/models/{name}` returns one entry of `data` below. `GET /metrics` returns text in the format of
Prometheus."""

STREAM = """
With `"stream": true` the reply is a sequence of server-sent events without names, as OpenAI's clients expect.
Each holds `id`, `created`, `model`, `object`, `seed` and one entry of `choices`, whose `text` is what has
become final since the last event; `finish_reason` is `null` until the last one of a text. With
`"stream_options": {"include_usage": true}` one more event has an empty `choices` and the `usage`. The last line
is `data: [DONE]`. An error after the first event is an event too, in the format of errors below."""

EVENTS = """
With `"diffusing": true` the events have names. A text begins with `start`, goes on with any number of `step`,
and ends with `end` or `error`; events of several texts are mixed."""

EVENT_FIELDS = {
    "start": {
        "id": "Id of the reply",
        "created": "Seconds since 1970",
        "model": "Id of the model",
        "index": "Number of the text",
        "tokens[].id": "Id of a given token; `null` where one is to be drawn",
        "tokens[].text": "Its text, or `null`",
        "tokens[].given": "Whether it is given",
        "nfe_total": "Expected calls of the network",
        "length": "Number of `tokens`",
        "seed": "The seed",
    },
    "step": {
        "index": "Number of the text",
        "step": "Number of the step on the time grid, from 1; under uniform noise step 0 holds the noise",
        "t": "Time that it has reached, from 1 (noise) to 0 (data)",
        "nfe_done": "Calls of the network so far",
        "nfe_total": "Calls of the network in all",
        "edits[].position": "Position of a token that has changed, from 0",
        "edits[].id": "Its new id; `null` for a mask",
        "edits[].text": "Its new text; `null` for a mask",
        "edits[].entropy": "With `details`: entropy in nats of the distribution it was drawn from, or `null` where it "
        "was not computed",
        "edits[].probability": "With `details`: the probability that the token had, or `null`",
        "edits[].alternatives": "With `details`: the five most probable tokens, each with its probability, or `null`",
    },
    "end": {
        "index": "Number of the text",
        "text": "The text, as in a whole reply",
        "finish_reason": "`length` or `stop`",
        "infilled": "The text of the whole sequence, prompt and suffix included",
        **_USAGE_OF_ONE,
    },
    "error": {
        "index": "Number of the text",
        "message": "What went wrong",
        "code": "As in the table below",
    },
}
"""The fields of each event by their paths."""

ERROR_FORMAT = """
An error is `{"error": {"message": …, "type": …, "param": …, "code": …}}`, as OpenAI's. `message` states what
was given, what is allowed and what to do. `type` is `invalid_request_error`, `rate_limit_error` (status 429) or
`server_error` (500 and above). `param` names the field, where one is wrong."""

ERRORS = (
    (
        "invalid_request",
        "400",
        "A field is missing, unknown, of the wrong type or out of its range, or the body is not JSON",
    ),
    ("invalid_api_key", "401", "The API key is missing or wrong"),
    ("model_not_found", "404", "The server has another model"),
    ("", "404, 405", "There is no such route, or not with this method"),
    ("deadline_exceeded", "408", "The request was not finished within its `timeout`, or the server's"),
    ("timeout", "408", "The headers did not arrive within 10 seconds, or the body within 30"),
    ("body_too_large", "413", "The body has more than 1 MiB"),
    ("wrong_host", "421", "The server was addressed by a name that is not its own, see `--host`"),
    ("overloaded", "429", "The queue is full, or the work ahead would take too long; `Retry-After` is in seconds"),
    ("overloaded", "503", "Too many connections are open; `Retry-After` is in seconds"),
    ("non_finite", "500", "The output of the network was not finite"),
    ("internal_error", "500", "An error in the server; its message is in the reply"),
    ("canceled", "503", "The server stops"),
)
"""Code, status and cause; an empty code is null."""

END = "Guide: [Serving](../guides/serve.md). Python names: [sedd.serve](serve.md)."
