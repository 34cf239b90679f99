"""What every request passes before it is parsed: host, API key, size of the body; and the headers of every reply."""

import asyncio
import contextlib
import hmac
import json
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sedd.files import read_text
from sedd.serve.metrics import Metrics
from sedd.terminal import warn

BODY_SECONDS = 30
"""Time in which a request's body must have arrived."""
DISCARDED, DISCARD_SECONDS = 2**26, 5
"""Bytes of a refused body that are read, and the time for it, before the connection is closed."""
CLIENT = "sedd.client"
"""The entry of a request's scope that names its client: by its API key, or by its address."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:]+)(?::[0-9]*)?")


def error_body(message: str, code: str | None, param: str | None = None, status: int = 400) -> dict[str, Any]:
    """Return an error in OpenAI's format."""
    kind = "invalid_request_error" if status < 500 and status != 429 else "server_error"
    kind = "rate_limit_error" if status == 429 else kind
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


@final
class Guard:
    """ASGI middleware: refuses before anything is parsed, names the client, and counts requests.

    Args:
        app: The application.
        metrics: Where requests are counted.
        max_body: Most bytes of a body.
        keys: API keys, of which a request must have one, except for `/health` and the files of the page; empty: none
            is needed.
        hosts: Names under which the server may be addressed, against DNS rebinding; None: any.
    """

    def __init__(
        self, app: ASGIApp, metrics: Metrics, max_body: int, keys: frozenset[str], hosts: frozenset[str] | None
    ) -> None:
        self.app, self.metrics, self.max_body = app, metrics, max_body
        self.keys, self.hosts = [key.encode() for key in keys], hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status = time.perf_counter(), 500

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                present = {name.lower() for name, _ in message["headers"]}
                added = [(k.encode(), v.encode()) for k, v in HEADERS.items() if k.encode() not in present]
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        try:
            await self._handle(scope, receive, send_with_headers)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self.metrics.requests.labels(route, str(status)).inc()
            self.metrics.seconds.labels(route).observe(time.perf_counter() - started)

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        key = self._key(headers.get("authorization", ""))
        scope[CLIENT] = f"key {key!r}" if key else f"address {(scope.get('client') or [''])[0]}"
        if self.hosts is not None and _host_name(headers.get("host", "")) not in self.hosts:
            message = f"host is {headers.get('host')!r}; this server answers to {', '.join(sorted(self.hosts))}"
            await refuse(send, 421, message, "wrong_host", receive=receive)
        elif self.keys and not _is_open(scope["path"]) and key is None:
            message = "this server needs an API key; send it as Authorization: Bearer KEY"
            await refuse(send, 401, message, "invalid_api_key", {"www-authenticate": "Bearer"}, receive)
        else:
            await self._with_body(scope, receive, send, headers)

    def _key(self, authorization: str) -> bytes | None:
        """Return the key of a header, if it is one of the server's."""
        kind, _, given = authorization.partition(" ")
        text = given.strip()
        sent = text.encode("latin-1"), text.encode()  # in UTF-8; in Latin-1, as browsers and http.client send it
        found = [key for key in self.keys for one in sent if hmac.compare_digest(one, key)]  # all, to take equal time
        return found[0] if kind.lower() == "bearer" and found else None

    async def _with_body(self, scope: Scope, receive: Receive, send: Send, headers: Mapping[str, str]) -> None:
        """Read the whole body, which is small, and pass it on."""
        declared = headers.get("content-length", "0")
        body, more = bytearray(), True
        too_large = declared.isdecimal() and (len(declared) > 18 or int(declared) > self.max_body)
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while more and not too_large:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return
                    body += message.get("body", b"")
                    more = message.get("more_body", False)
                    too_large = len(body) > self.max_body
        except TimeoutError:
            await refuse(send, 408, f"the body did not arrive within {BODY_SECONDS} s", "timeout", receive=receive)
            return
        if too_large:
            reason = f"the body is larger than {self.max_body} bytes; send less text per request"
            await refuse(send, 413, reason, "body_too_large", receive=receive if more else None)
            return
        passed = False

        async def receive_again() -> Message:
            nonlocal passed
            if passed:
                return await receive()  # a disconnect
            passed = True
            return {"type": "http.request", "body": bytes(body), "more_body": False}

        await self.app(scope, receive_again, send)


def _is_open(path: str) -> bool:
    """Return whether a path needs no key: health, and the files of the page, in which a key can be entered."""
    return path in ("/health", "/") or path.startswith("/page/")


def _host_name(host: str) -> str:
    """Return a host without its port; nothing if it is neither a name nor an address in brackets."""
    found = _HOST.fullmatch(host)
    return found[1].lower() if found else ""


async def refuse(
    send: Send,
    status: int,
    message: str,
    code: str,
    headers: Mapping[str, str] | None = None,
    receive: Receive | None = None,
) -> None:
    """Send an error and close the connection.

    Args:
        send: Of the request, as are the others.
        status: HTTP status.
        message: What was wrong.
        code: The error's code.
        headers: Further headers.
        receive: Discards the body that is still coming: a connection that is closed before it is read is reset, and
            the client may never see the error.
    """
    body = json.dumps(error_body(message, code, status=status)).encode()
    pairs = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [(k.encode(), v.encode()) for k, v in {**pairs, **(headers or {})}.items()],
        }
    )
    await send({"type": "http.response.body", "body": body, "more_body": True})
    if receive:
        await _discard(receive)
    await send({"type": "http.response.body"})


async def _discard(receive: Receive) -> None:
    """Read what a client still sends, up to a limit."""
    size = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_SECONDS):
            while size <= DISCARDED:
                message = await receive()
                size += len(message.get("body", b""))
                if not message.get("more_body", False):  # the end of the body, or the client has gone
                    return


def read_keys(file: Path | None) -> frozenset[str]:
    """Return the API keys of a file, one per line; none if there is no file."""
    if file is None:
        return frozenset()
    try:
        is_open = file.stat().st_mode & 0o077
    except OSError as error:
        raise ValueError(f"{file} could not be read: {error}") from None
    keys = frozenset(line.strip() for line in read_text(file).splitlines() if line.strip())
    if is_open:
        warn(f"other users can read or change the keys in {file}; allow them to you alone: chmod 600 {file}")
    if not keys:
        raise ValueError(f"{file} holds no key; write one per line, or leave --api-key-file out")
    return keys
