"""``sedd serve``: a model behind an HTTP interface."""

import contextlib
import signal
import socket
import sys
from pathlib import Path
from typing import Annotated

import typer

from sedd.cli import root
from sedd.extras import require_server
from sedd.serve.limits import Limits
from sedd.terminal import visible, warn

FORCED = 130
"""Exit code after a second Ctrl-C, as of a program that SIGINT has killed."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@root.command()
def serve(
    model: root.OptionalModel = None,
    *,
    host: str = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any that is free.")] = 8321,
    api_key_file: Path | None = None,
    name: str | None = None,
    slots: int = Limits.slots,
    queue: int = Limits.queue,
    timeout: float = Limits.timeout,
    max_steps: int = Limits.steps,
    max_texts: int = Limits.rows,
    max_connections: int = Limits.connections,
    same_shape: bool = False,
    device: str | None = None,
    network: list[str] | None = None,
    precision: str | None = None,
) -> None:
    """Serve a model over HTTP: completions as OpenAI's clients send them, infilling, likelihoods.

    Requests share each call of the network, whatever their seeds, steps and samplers, and get the texts that `sedd
    sample` and `sedd infill` give with the same seed. It prints its address on stderr, and on SIGTERM, SIGHUP or Ctrl-C
    finishes what it has accepted; a second Ctrl-C cancels it.

    Args:
        host: Address to listen on; by default this machine alone can connect.
        api_key_file: File of API keys, one per line; requests must then have one of them.
        name: The model's id in requests; by default the name of its folder.
        slots: Texts that are generated at the same time.
        queue: Texts that may wait; the server rejects further requests.
        timeout: Seconds within which a request is answered.
        max_steps: Most sampling steps of a request.
        max_texts: Most texts of a request.
        max_connections: Most open connections; fewer where the process may not open so many files.
        same_shape: Pad every network call to the same number of rows: replies have the same bits at any load, and a
            single request takes as long as many.
        device: cpu, cuda, cuda:N or mps; by default the GPU of CUDA if there is one.
    """
    assert model is not None  # its callback returns the default
    limits = Limits(slots, queue, timeout, max_texts, max_steps, connections=max_connections, same_shape=same_shape)
    require_server()
    with _listen(host, port) as listener:
        shown = f"[{host}]" if ":" in host else host
        address = f"http://{shown}:{listener.getsockname()[1]}"
        root.announce(f"loading {root.model_name(model)} for {address}, {root.count_of(slots, 'text')} at a time")
        from sedd.loading import load_model
        from sedd.runtime.device import resolve_device
        from sedd.serve.app import build_app
        from sedd.serve.guard import read_keys
        from sedd.serve.http import HttpServer

        keys = read_keys(api_key_file)
        loaded = load_model(model, device=str(resolve_device(device)), precision=precision)
        hosts = frozenset((*LOOPBACK, "[::1]")) if host in LOOPBACK else None
        application = build_app(loaded, name or model.resolve().name, limits, keys=keys, hosts=hosts)
        server = HttpServer(application, limits)
        if hosts is None and not keys:
            warn("every machine that can connect may use this server; --api-key-file makes it require a key")
        print(visible(f"serving {model} at {address}"), file=sys.stderr, flush=True)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # until the server handles it
        with contextlib.suppress(KeyboardInterrupt):
            server.run(sockets=[listener])
        if server.is_forced:
            warn("stopped by a second Ctrl-C; requests that were not answered have failed")
            raise typer.Exit(FORCED)


def _listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; refuse an address that cannot be used before the model is loaded."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise ValueError(
            f"cannot listen on {host}, port {port} ({error.strerror}); choose another --host or --port"
        ) from None
