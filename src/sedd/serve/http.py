"""Connections: deadlines, a cap on open ones, clients that close their side; and the signals that end a server.

uvicorn with the parser h11. uvicorn has no deadline for headers and no cap on connections: this module adds both.
"""

import asyncio
import contextlib
import errno
import resource
import signal
import socket
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, final

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from sedd.serve.errors import RequestError
from sedd.serve.limits import Limits
from sedd.terminal import warn

ACCEPTED, WAITING = 16, 1024
"""Connections that are accepted in one turn of the event loop, and those that the system lets wait for it."""
REFUSED, REFUSED_SECONDS = 64, 1.0
"""Rejected connections that may stay open until their clients have read why, and for how long."""
RESERVED = 64 + 4 * ACCEPTED + REFUSED
"""Files other than connections: the process's own, and connections that are not counted yet, or no more."""
UNREAD_SECONDS = 30  # time after which a connection is closed whose client reads nothing of what was sent
PROBE_SECONDS, MOST_PROBE_SECONDS = 0.1, 5.0
"""Time between the first two probes of whether a client that has closed its side still reads, and the longest."""
FORCED_SECONDS = 1.0  # time to read their replies that clients have after a second Ctrl-C
OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
QUIET_SECONDS = 60.0  # time between two messages that no connection could be accepted


def most_connections(wanted: int, files: int) -> int:
    """Return how many connections may be open in a process that may open so many files."""
    return wanted if files == resource.RLIM_INFINITY else max(1, min(wanted, max(files - RESERVED, files // 4)))


class Connection(H11Protocol):
    """A connection; those of a server share what is idle and what was rejected.

    At the limit, a new connection closes the one that has been idle for longest.
    """

    most: int  # those of a server
    header_seconds: float
    idle: "dict[Connection, asyncio.TimerHandle]"
    """Those without a request, in the order in which they began to wait for one, and their deadlines."""
    refused: "set[Connection]"

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        own = transport.get_extra_info("socket")
        if own is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * UNREAD_SECONDS)
        self._wait_or_not()
        if len(self.connections) > self.most and self.idle:
            next(iter(self.idle)).give_up(503, "too many connections are open; try again", "overloaded")

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._forget()
        self.refused.discard(self)

    def data_received(self, data: bytes) -> None:
        if self not in self.refused:
            super().data_received(data)
            self._wait_or_not()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._wait_or_not()

    @property
    def _answers(self) -> bool:
        return bool(self.cycle and not self.cycle.response_complete)

    def _wait_or_not(self) -> None:
        """Set the deadline of a request that has not arrived; none while one is answered."""
        if self._answers or self.transport.is_closing():
            self._forget()
        elif self not in self.idle:
            reason = f"the headers did not arrive within {self.header_seconds:g} s"
            self.idle[self] = self.loop.call_later(self.header_seconds, self.give_up, 408, reason, "timeout")

    def _forget(self) -> None:
        if timer := self.idle.pop(self, None):
            timer.cancel()

    def give_up(self, status: int, message: str, code: str) -> None:
        """Close a connection without a request; if one was to be expected, with an error."""
        self._forget()
        self._unset_keepalive_if_required()
        self.connections.discard(self)
        has_begun = bool(self.conn.trailing_data[0])
        if not has_begun and (self.cycle or status == 408):
            self.transport.close()
            return
        if len(self.refused) >= REFUSED:
            self.transport.abort()
            return
        self.refused.add(self)
        headers = {"connection": "close"} | ({"retry-after": "1"} if status == 503 else {})
        reply = RequestError(code, message, headers, status=status).reply()
        start = h11.Response(status_code=status, headers=[*self.server_state.default_headers, *reply.raw_headers])
        for event in (start, h11.Data(data=bytes(reply.body)), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.write_eof()
        self.loop.call_later(REFUSED_SECONDS, self.transport.close)  # at once would reset what has not been read

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection open: a client that has sent its request may close its side."""
        if not self._answers or self.cycle.more_body or self.scope["http_version"] != "1.1":
            return False
        self.cycle.keep_alive = False
        self._probe(PROBE_SECONDS)
        return True

    def _probe(self, seconds: float) -> None:
        """Send an interim response again and again: it is answered by a reset if the client has closed both sides.

        RFC 9110, section 15.2: clients ignore those that they do not expect.
        """
        if self._answers and not (self.cycle.response_started or self.transport.is_closing()):
            probe = h11.InformationalResponse(status_code=100, headers=[], reason="Continue")
            self.transport.write(self.conn.send(probe) or b"")
            self.loop.call_later(seconds, self._probe, min(2 * seconds, MOST_PROBE_SECONDS))


@final
class HttpServer(uvicorn.Server):
    """A server that SIGTERM, SIGHUP and Ctrl-C end when all is answered, and a second Ctrl-C at once."""

    def __init__(self, app: FastAPI, limits: Limits) -> None:
        most = most_connections(limits.connections, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        shared = {"most": most, "header_seconds": limits.header_seconds, "idle": {}, "refused": set()}
        config = uvicorn.Config(
            app,
            http=type("Connection", (Connection,), shared),
            loop="asyncio",
            ws="none",
            log_level="error",
            access_log=False,
            server_header=False,
            backlog=ACCEPTED,
            timeout_graceful_shutdown=int(limits.timeout) + 1,
        )
        super().__init__(config)
        self.engine = app.state.engine
        self.is_forced = False  # whether requests were canceled by a second Ctrl-C
        self._loop: asyncio.AbstractEventLoop | None = None
        self._quiet_until = 0.0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._on_error)
        await super().startup(sockets)
        for listener in sockets or []:
            listener.listen(WAITING)

    def _on_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Report an error of the event loop; once a while if it cannot accept connections, which it tries again."""
        error = context.get("exception")
        if self.should_exit and isinstance(error, ValueError) and "_start_serving" in context["message"]:
            return  # it tries again, and the server listens no more
        if not isinstance(error, OSError) or error.errno not in OUT_OF_RESOURCES:
            loop.default_exception_handler(context)
        elif loop.time() >= self._quiet_until:
            self._quiet_until = loop.time() + QUIET_SECONDS
            warn(f"no connection can be accepted ({error.strerror}); allow more open files, or fewer connections")

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle SIGHUP too, unless it is ignored, as nohup sets it."""
        with super().capture_signals():
            in_main = threading.current_thread() is threading.main_thread()  # the only thread that may
            before = signal.getsignal(signal.SIGHUP)
            if in_main and before is not signal.SIG_IGN:
                signal.signal(signal.SIGHUP, self.handle_exit)
            yield
            if in_main:
                signal.signal(signal.SIGHUP, before)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End when all is answered; at the second Ctrl-C, cancel what is not. A third one kills the process."""
        if self.should_exit and sig == signal.SIGINT and self._loop:
            self.is_forced = True
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            self._loop.call_soon_threadsafe(self._cancel)
        self.should_exit = True

    def _cancel(self) -> None:
        """Answer all requests with status 503; close the connections whose clients do not read that."""
        self.engine.cancel()
        for connection in self.server_state.connections:
            asyncio.get_running_loop().call_later(FORCED_SECONDS, connection.transport.abort)
