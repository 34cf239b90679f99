"""The application of `sedd serve` on several machines: a Ray Serve deployment with one model per replica.

    pip install -e '.[serve]' 'ray[serve]'
    python examples/ray_serve.py run --replicas 2                                    # this machine
    RAY_ADDRESS=auto python examples/ray_serve.py /shared/run --replicas 8 --gpus 1  # the cluster it is part of

Ray's proxy passes each request to one of the replicas. A replica is a process with its own engine, slots and queue, so
requests share forward passes within it. A reply with a seed is the same whichever replica gives it.
"""

import argparse
import signal
import sys
from pathlib import Path
from typing import Any

import ray
from ray import serve

from sedd.serve.guard import read_keys
from sedd.serve.limits import Limits


def build_deployment(model: str, limits: Limits, keys: frozenset[str], replicas: int, gpus: float) -> Any:
    """Build the deployment of the application."""

    def build_replica() -> Any:  # called in the process of a replica
        import sedd
        from sedd.serve.app import build_app

        return build_app(sedd.load(model).loaded, Path(model).name, limits, keys=keys)

    return serve.deployment(
        serve.ingress(build_replica)(),
        name="sedd",
        num_replicas=replicas,
        ray_actor_options={"num_cpus": 1, "num_gpus": gpus},
        # more than the engine takes: it forms the batches, and refuses with status 429
        max_ongoing_requests=2 * (limits.slots + limits.queue),
        graceful_shutdown_timeout_s=limits.timeout,
    ).bind()


def main() -> None:
    """Serve until SIGTERM or Ctrl-C."""
    parser = argparse.ArgumentParser(description="Serve a model by several replicas.")
    parser.add_argument("model", help="Folder of a model that all machines can read, or a name as for sedd serve.")
    parser.add_argument("--replicas", type=int, default=2, help="Processes that serve the model.")
    parser.add_argument("--gpus", type=float, default=0, help="GPUs per replica; by default none.")
    parser.add_argument("--host", default="127.0.0.1", help="Address of the proxy.")
    parser.add_argument("--port", type=int, default=8321)
    parser.add_argument("--api-key-file", type=Path, help="File of API keys, one per line.")
    parser.add_argument("--slots", type=int, default=Limits.slots, help="Texts that a replica generates at a time.")
    parser.add_argument("--queue", type=int, default=Limits.queue, help="Texts that may wait at a replica.")
    given = parser.parse_args()
    limits = Limits(slots=given.slots, queue=given.queue, timeout=45.0)  # at the end Ray waits for up to a minute
    model = str(Path(given.model).resolve()) if Path(given.model).exists() else given.model
    application = build_deployment(model, limits, read_keys(given.api_key_file), given.replicas, given.gpus)
    ray.init(include_dashboard=False)  # starts Ray here, or joins the cluster of RAY_ADDRESS
    serve.start(http_options={"host": given.host, "port": given.port})
    serve.run(application, name="sedd")
    print(f"serving {model} at http://{given.host}:{given.port}", file=sys.stderr, flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        signal.pause()
    except KeyboardInterrupt:
        serve.delete("sedd")  # the replicas answer what they have accepted; a cluster goes on


if __name__ == "__main__":
    main()
