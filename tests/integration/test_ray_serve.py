"""``examples/ray_serve.py`` on a real Ray of this machine: two replicas give the replies that one server gives."""

import importlib.util
import json
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from runs import Sedd, ok
from serving import ServerProcess, Site

pytestmark = [
    pytest.mark.verify,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: `make ray` runs this"),
]
EXAMPLE = Path(__file__).parents[2] / "examples/ray_serve.py"


@pytest.fixture
def replicas(words_run: Path, environment: dict[str, str], tmp_path: Path) -> Iterator[ServerProcess]:
    """Two replicas with a key."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (tmp_path / "keys").write_text("secret\n")
    sockets = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # whose paths must be short
    environment = {**environment, "RAY_TMPDIR": sockets, "RAY_USAGE_STATS_ENABLED": "0"}
    words = (words_run, "--replicas", 2, "--port", port, "--slots", 2, "--api-key-file", tmp_path / "keys")
    try:
        with ServerProcess(environment, EXAMPLE, *words) as server:
            server.site = server.site._replace(headers={"authorization": "Bearer secret"})
            yield server
            if server.process.poll() is None:
                server.stop()
    finally:
        shutil.rmtree(sockets, ignore_errors=True)


def tokens_by_replica(site: Site) -> dict[float, dict[str, float]]:
    """Return the counters of both replicas, by the time at which each was started."""
    found: dict[float, dict[str, float]] = {}
    end = time.monotonic() + 60
    while len(found) < 2 and time.monotonic() < end:
        families = text_string_to_metric_families(site.send("/metrics").body.decode())
        values = {s.name + s.labels.get("end", ""): s.value for family in families for s in family.samples}
        found[values["sedd_forwards_created"]] = values
    return found


def test_two_replicas_share_the_requests_and_give_the_same_texts(
    sedd: Sedd, words_run: Path, replicas: ServerProcess
) -> None:
    """Both work; seeds give the texts of `sedd infill`; streams, keys, refusals and disconnects as with one server.

    On SIGTERM what was accepted is answered, and the exit code is 0.
    """
    site = replicas.site
    offline = sedd("infill", words_run, "the {9} sat", "-n", "16", "--seed", "7", "--steps", "9", "--json")
    ok(offline)
    expected = [json.loads(line)["text"] for line in offline.stdout.splitlines()]
    request = {"template": "the {9} sat", "n": 16, "seed": 7, "steps": 9}
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda _: site.send("/v1/infill", request), range(24)))
    assert [reply.status for reply in replies] == [200] * 24
    assert all([choice["text"] for choice in reply.json["choices"]] == expected for reply in replies)
    counts = [values["sedd_generated_tokens_total"] for values in tokens_by_replica(site).values()]
    assert len(counts) == 2
    assert min(counts) > 0
    assert sum(counts) == 24 * 16 * 9

    events = site.send("/v1/infill", {**request, "n": 1, "diffusing": True}).events
    assert [name for name, _ in events] == ["start", *["step"] * (len(events) - 2), "end"]
    assert events[-1][1]["text"] == expected[0]
    assert site.send("/v1/models", headers={}).status == 401
    assert "default-src 'none'" in site.send("/", headers={}).headers["content-security-policy"]
    assert site.send("/v1/infill", {"template": "{3}", "step": 1}).json["error"]["message"].startswith("unknown field")

    long = {"template": "{32}", "steps": 1000, "sampler": "remask", "options": {"eta": 1.0}}
    body = json.dumps(long).encode()
    head = "POST /v1/infill HTTP/1.1\r\nhost: x\r\nauthorization: Bearer secret\r\ncontent-type: application/json"
    with socket.create_connection(("127.0.0.1", site.port)) as lost:
        lost.sendall(f"{head}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        while not any(values["sedd_rows_running"] for values in tokens_by_replica(site).values()):
            pass
    end = time.monotonic() + 30
    while not any(values.get("sedd_rows_totalcanceled") for values in tokens_by_replica(site).values()):
        assert time.monotonic() < end

    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(site.send, "/v1/infill", {**long, "steps": 200})
        while not any(values["sedd_rows_running"] for values in tokens_by_replica(site).values()):
            pass
        assert replicas.stop() == 0
        assert accepted.result().status == 200
    with pytest.raises(ConnectionRefusedError):
        site.send("/health")
