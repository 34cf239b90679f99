"""``sedd serve``: a model behind an HTTP interface."""

import contextlib
import signal
import socket
import sys
from pathlib import Path
from typing import Annotated

import typer

from sedd.cli.root import ModelDevice, Networks, OptionalModel, Precision, announce, app, count_of, model_name
from sedd.extras import require_server
from sedd.serve.limits import Limits
from sedd.terminal import visible, warn

FORCED = 130
"""Exit code after a second Ctrl-C, as of a program that SIGINT has killed."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@app.command()
def serve(
    model: OptionalModel = None,
    host: Annotated[str, typer.Option(help="Address to listen on; by default this machine alone can connect.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any that is free.")] = 8321,
    api_key_file: Annotated[
        Path | None, typer.Option(help="File of API keys, one per line; requests must then have one of them.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="The model's id in requests; by default the name of its folder.")
    ] = None,
    slots: Annotated[int, typer.Option(help="Texts that are generated at the same time.")] = Limits.slots,
    queue: Annotated[int, typer.Option(help="Texts that may wait; further requests are refused.")] = Limits.queue,
    timeout: Annotated[float, typer.Option(help="Seconds within which a request is answered.")] = Limits.timeout,
    max_steps: Annotated[int, typer.Option(help="Most sampling steps of a request.")] = Limits.steps,
    max_texts: Annotated[int, typer.Option(help="Most texts of a request.")] = Limits.rows,
    max_connections: Annotated[
        int, typer.Option(help="Most open connections; fewer where the process may not open so many files.")
    ] = Limits.connections,
    same_shape: Annotated[
        bool,
        typer.Option(
            "--same-shape",
            help="Pad every network call to the same number of rows: replies have the same bits at any load, and a "
            "single request takes as long as many.",
        ),
    ] = False,
    device: ModelDevice = None,
    network: Networks = None,
    precision: Precision = None,
) -> None:
    """Serve a model over HTTP: completions as OpenAI's clients send them, infilling, likelihoods.

    Requests share each call of the network, whatever their seeds, steps and samplers, and get the texts that `sedd
    sample` and `sedd infill` give with the same seed. It prints its address on stderr, and on SIGTERM, SIGHUP or Ctrl-C
    finishes what it has accepted; a second Ctrl-C cancels it.
    """
    assert model is not None  # its callback returns the default
    limits = Limits(slots, queue, timeout, max_texts, max_steps, connections=max_connections, same_shape=same_shape)
    require_server()
    with _listen(host, port) as listener:
        shown = f"[{host}]" if ":" in host else host
        address = f"http://{shown}:{listener.getsockname()[1]}"
        announce(f"loading {model_name(model)} for {address}, {count_of(slots, 'text')} at a time")
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
