"""What every request passes before it is parsed: host, API key, size of the body; and the headers of every reply."""

import asyncio
import contextlib
import hmac
import re
import time
from pathlib import Path
from typing import final

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sedd.files import read_text
from sedd.serve.errors import RequestError
from sedd.serve.metrics import Metrics
from sedd.terminal import warn

BODY_SECONDS = 30  # time in which a request's body must have arrived
DISCARDED, DISCARD_SECONDS = 2**26, 5
"""Bytes of a rejected body that are read, and the time for it, before the connection is closed."""
CLIENT = "sedd.client"  # the entry of a request's scope that names its client: by its API key, or by its address
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:]+)(?::[0-9]*)?")


@final
class Guard:
    """ASGI middleware: rejects before anything is parsed, names the client, and counts requests.

    Requests must have one of the ``keys``, if there are any, except for `/health` and the files of the page. ``hosts``
    are the names under which the server may be addressed, against DNS rebinding; None: any.
    """

    def __init__(
        self, app: ASGIApp, metrics: Metrics, max_body: int, keys: frozenset[str], hosts: frozenset[str] | None
    ) -> None:
        self.app, self.metrics, self.max_body = app, metrics, max_body
        self.keys, self.hosts = [key.encode() for key in keys], hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status, more = time.perf_counter(), 500, True

        async def receive_part() -> Message:
            nonlocal more
            message = await receive()
            more = message.get("more_body", False)  # not at the end of the body, or when the client has gone
            return message

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status, headers = message["status"], MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            headers = Headers(scope=scope)
            self._check(scope, headers)
            body = await self._read(receive_part, headers)
        except RequestError as error:
            await _reject(error, receive_part if more else None, send_with_headers)
        else:
            if body is not None:
                whole = [{"type": "http.request", "body": body, "more_body": False}]

                async def receive_again() -> Message:
                    return whole.pop() if whole else await receive()  # what follows is a disconnect

                await self.app(scope, receive_again, send_with_headers)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self.metrics.requests.labels(route, str(status)).inc()
            self.metrics.seconds.labels(route).observe(time.perf_counter() - started)

    def _check(self, scope: Scope, headers: Headers) -> None:
        """Name the client; reject another host's name, and a request without a key, where one is needed."""
        key, host, path = self._key(headers.get("authorization", "")), headers.get("host", ""), scope["path"]
        scope[CLIENT] = f"key {key!r}" if key else f"address {(scope.get('client') or [''])[0]}"
        name = _HOST.fullmatch(host)
        if self.hosts is not None and (name is None or name[1].lower() not in self.hosts):
            known = ", ".join(sorted(self.hosts))
            raise RequestError("wrong_host", f"host is {host!r}; this server answers to {known}")
        is_open = path in ("/health", "/") or path.startswith("/page/")  # a key can be entered in the page
        if self.keys and not is_open and key is None:
            message = "this server needs an API key; send it as Authorization: Bearer KEY"
            raise RequestError("invalid_api_key", message, {"www-authenticate": "Bearer"})

    def _key(self, authorization: str) -> bytes | None:
        """Return the key of a header, if it is one of the server's."""
        kind, _, given = authorization.partition(" ")
        text = given.strip()
        sent = text.encode("latin-1"), text.encode()  # in UTF-8; in Latin-1, as browsers and http.client send it
        found = [key for key in self.keys for one in sent if hmac.compare_digest(one, key)]  # all, to take equal time
        return found[0] if kind.lower() == "bearer" and found else None

    async def _read(self, receive: Receive, headers: Headers) -> bytes | None:
        """Return the whole body, which is small; None if the client has gone."""
        declared, body, more = headers.get("content-length", "0"), bytearray(), True
        too_large = declared.isdecimal() and (len(declared) > 18 or int(declared) > self.max_body)
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while more and not too_large:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    body += message.get("body", b"")
                    more = message.get("more_body", False)
                    too_large = len(body) > self.max_body
        except TimeoutError:
            raise RequestError("timeout", f"the body did not arrive within {BODY_SECONDS} s") from None
        if too_large:
            reason = f"the body is larger than {self.max_body} bytes; send less text per request"
            raise RequestError("body_too_large", reason)
        return bytes(body)


async def _reject(error: RequestError, receive: Receive | None, send: Send) -> None:
    """Send an error, and close the connection when the rest of the body has been read, up to a limit.

    A connection that is closed earlier is reset, and the client may never see the error.
    """
    reply = error.reply()
    reply.headers["connection"] = "close"
    await send({"type": "http.response.start", "status": reply.status_code, "headers": reply.raw_headers})
    await send({"type": "http.response.body", "body": reply.body, "more_body": True})
    if receive:
        size, more = 0, True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DISCARD_SECONDS):
                while more and size <= DISCARDED:
                    message = await receive()
                    size, more = size + len(message.get("body", b"")), message.get("more_body", False)
    await send({"type": "http.response.body"})


def read_keys(file: Path | None) -> frozenset[str]:
    """Return the API keys of a file, one per line; none if there is no file."""
    if file is None:
        return frozenset()
    keys = frozenset(line.strip() for line in read_text(file).splitlines() if line.strip())
    if file.stat().st_mode & 0o077:
        warn(f"other users can read or change the keys in {file}; allow them to you alone: chmod 600 {file}")
    if not keys:
        raise ValueError(f"{file} holds no key; write one per line, or leave --api-key-file out")
    return keys
