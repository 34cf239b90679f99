"""``sedd serve`` as a process: the texts of `sedd infill`, an orderly end, refusals; ten minutes of overload."""

import json
import os
import random
import resource
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import boxed
import pytest
from prometheus_client.parser import text_string_to_metric_families
from runs import Sedd, ok
from serving import ServerProcess, Site, sedd_serve

from sedd.serve.guard import read_keys


def test_the_command_serves_the_texts_of_sedd_infill_and_drains(
    sedd: Sedd, words_run: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    """With a key of the file. SIGTERM: what was accepted is answered, nothing more is, and the exit code is 0."""
    (tmp_path / "keys").write_text("secret\n\nother\n")
    offline = sedd("infill", words_run, "the {9} sat", "-n", "3", "--seed", "7", "--steps", "9", "--json")
    ok(offline)
    expected = [json.loads(line)["text"] for line in offline.stdout.splitlines()]
    words = ("--name", "words", "--slots", "2", "--api-key-file", tmp_path / "keys")
    with sedd_serve(environment, words_run, *words) as server:
        assert server.site.send("/v1/models").status == 401
        server.site = server.site._replace(headers={"authorization": "Bearer other"})
        request = {"template": "the {9} sat", "n": 3, "seed": 7, "steps": 9, "model": "words"}
        reply = server.site.send("/v1/infill", request)
        assert [choice["text"] for choice in reply.json["choices"]] == expected
        answers: list[int] = []
        long = {"template": "{32}", "steps": 100, "sampler": "remask", "options": {"eta": 1.0}, "n": 3}
        thread = threading.Thread(target=lambda: answers.append(server.site.send("/v1/infill", long).status))
        thread.start()
        while b"sedd_rows_running 2.0" not in server.site.send("/metrics").body:
            pass
        assert server.stop() == 0
        thread.join()
        assert answers == [200]
        with pytest.raises(ConnectionRefusedError):
            server.site.send("/health")


def test_a_lost_terminal_drains_and_files_that_run_out_are_reported_once(
    words_run: Path, environment: dict[str, str]
) -> None:
    """Connections that cannot be accepted wait for others to close. SIGHUP: what was accepted is answered."""
    with sedd_serve(environment, words_run, "--slots", 1) as server, ThreadPoolExecutor() as pool:
        assert server.site.send("/ready").status == 200
        files = len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (files + 2, 4096))
        silent = [server.site.connect() for _ in range(6)]
        while not any("open files" in line for line in list(server.printed)):
            pass
        waiting = pool.submit(server.site.send, "/health")
        for client in silent:
            client.close()
        assert waiting.result().status == 200
        answer = pool.submit(server.site.send, "/v1/infill", ENDLESS | {"steps": 400, "n": 4})
        while b"sedd_rows_running 1.0" not in server.site.send("/metrics").body:
            pass
        assert server.stop(signal.SIGHUP) == 0
        assert answer.result().status == 200
        server.reader.join()
        assert len(server.printed) == 1, "".join(server.printed)


def test_a_second_interrupt_answers_what_is_left_with_503(words_run: Path, environment: dict[str, str]) -> None:
    with sedd_serve(environment, words_run, "--slots", 1) as server, ThreadPoolExecutor() as pool:
        answers = [pool.submit(server.site.send, "/v1/infill", ENDLESS) for _ in range(3)]
        stream = pool.submit(server.site.send, "/v1/infill", ENDLESS | {"diffusing": True})
        while metric(server.site, "sedd_rows_running") + metric(server.site, "sedd_rows_waiting") < 4:
            pass
        server.process.send_signal(signal.SIGINT)
        while not _refuses(server.site):
            pass
        assert server.stop(signal.SIGINT) == 130
        assert [answer.result().status for answer in answers] == [503] * 3
        assert stream.result().events[-1][0] == "error"
        server.reader.join()
        assert "second Ctrl-C" in server.printed[-1]
        assert "Traceback" not in "".join(server.printed)


ENDLESS = {"template": "{32}", "sampler": "remask", "options": {"eta": 1.0}, "steps": 1024}


def _refuses(site: Site) -> bool:
    """Return whether no connection is accepted any more."""
    try:
        socket.create_connection(("127.0.0.1", site.port)).close()
    except ConnectionError:
        return True
    return False


def test_the_command_refuses_before_the_model_is_loaded(sedd: Sedd, words_run: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for words, expected in (
            ((words_run, "--api-key-file", tmp_path / "keys"), "holds no key"),
            ((words_run, "--api-key-file", tmp_path / "none"), "could not be read"),
            ((words_run, "--port", port), f"port {port}"),
            ((words_run, "--slots", "0"), "slots is 0"),
            ((tmp_path / "nothing",), "holds no model"),
        ):
            done = sedd("serve", *words, before="import sedd.loading; sedd.loading.load_model = None")
            assert done.returncode == 2
            assert expected in done.stderr
            assert "Traceback" not in done.stderr


def test_the_model_in_the_box_is_served_on_this_machine_alone_by_default(sedd: Sedd, tmp_path: Path) -> None:
    box = boxed.write_box(tmp_path / "models", "stories")
    before = f"os.environ['SEDD_MODELS'] = {str(box)!r}; import uvicorn; uvicorn.Server.run = lambda *a, **k: None"
    done = sedd("serve", "--port", "0", before=before)
    ok(done)
    assert "no model was named; using stories" in done.stderr
    assert f"serving {box / 'stories'} at http://127.0.0.1:" in done.stderr
    assert "every machine" not in done.stderr
    (tmp_path / "keys").write_text("secret")
    for words, is_open in (((), True), (("--api-key-file", tmp_path / "keys"), False)):
        elsewhere = sedd("serve", "--port", "0", "--host", "0.0.0.0", *words, before=before)
        assert ("every machine that can connect may use this server" in elsewhere.stderr) == is_open


# Ten minutes -----------------------------------------------------------------------------------------------

SOAK_SECONDS = float(os.environ.get("SEDD_SOAK_SECONDS", "600"))
PLACES = 8 + 16
"""Rows that run or wait."""


def soak_request(seed: int) -> dict[str, Any]:
    """One of four kinds: three lengths and a stream."""
    return {"template": f"{{{8 * (seed % 4 + 1)}}}", "seed": seed, "steps": 8, "diffusing": seed % 4 == 3}


def capacity(site: Site, seconds: float) -> float:
    """Return replies per second to as many clients as there are places."""
    end, replies = time.monotonic() + seconds, Counter[int]()

    def client(first: int) -> None:
        for seed in range(first, 10**9, PLACES):
            if time.monotonic() > end:
                return
            replies[site.send("/v1/infill", soak_request(seed)).status] += 1

    with ThreadPoolExecutor(PLACES) as pool:
        list(pool.map(client, range(PLACES)))
    assert set(replies) == {200}
    return replies[200] / seconds


def arrivals(rate: float, seconds: float) -> Iterator[tuple[int, float]]:
    """Yield the number and time of requests that come at random, from now on."""
    draw, at, start = random.Random(0), 0.0, time.monotonic()
    for number in range(10**9):
        at += draw.expovariate(rate)
        if at > seconds:
            return
        yield number, start + at


class Usage:
    """Memory, threads and open files of a process, twenty times during the load."""

    def __init__(self, pid: int) -> None:
        self.folder = Path(f"/proc/{pid}")
        self.samples: list[tuple[int, int, int]] = []

    def sample(self) -> None:
        pages = int((self.folder / "statm").read_text().split()[1])
        counts = (len(list((self.folder / name).iterdir())) for name in ("task", "fd"))
        self.samples.append((pages, *counts))  # type: ignore[arg-type]

    def check(self) -> None:
        """The second half needs no more than the first, after a start of three samples."""
        first, second = self.samples[3:10], self.samples[10:]
        for kind, slack in ((0, 1.05), (1, 1.0), (2, 2.0)):  # files: connections that happen to be open
            assert max(s[kind] for s in second) <= slack * max(s[kind] for s in first), self.samples


def metric(site: Site, name: str, **labels: str) -> float:
    families = text_string_to_metric_families(site.send("/metrics").body.decode())
    samples = [s for family in families for s in family.samples if s.name == name]
    return sum(s.value for s in samples if labels.items() <= s.labels.items())


@pytest.mark.verify
@pytest.mark.timeout(SOAK_SECONDS + 300)
def test_ten_minutes_at_twice_the_capacity(words_run: Path, environment: dict[str, str], tmp_path: Path) -> None:
    """Random arrivals at twice the rate that the server can answer (SEDD_SOAK_SECONDS: for a shorter time).

    There is no error but 429, every accepted request is answered, and memory, threads and files stay as they are. A
    server that is killed under load leaves nothing behind: another one starts at the same port and gives the same text.
    """
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = {**environment, "TMPDIR": str(temporary)}
    files = {path: path.stat().st_mtime_ns for path in words_run.rglob("*")}
    words = (words_run, "--slots", 8, "--queue", 16)
    with sedd_serve(environment, *words) as server:
        rate = 2 * capacity(server.site, min(10.0, SOAK_SECONDS / 4))
        before = metric(server.site, "sedd_rows_total", end="finished")
        statuses: Counter[int] = Counter()
        coming, lock = arrivals(rate, SOAK_SECONDS), threading.Lock()

        def client() -> None:
            while True:
                with lock:
                    number, at = next(coming, (-1, 0.0))
                if number < 0:
                    return
                time.sleep(max(0.0, at - time.monotonic()))
                request = soak_request(number)
                reply = server.site.send("/v1/infill", request)
                statuses[reply.status] += 1
                if reply.status == 429:
                    assert 1 <= int(reply.headers["retry-after"]) <= 60
                elif request["diffusing"]:
                    assert reply.events[-1][0] == "end"
                else:
                    assert len(reply.json["choices"][0]["text"]) == 8 * (number % 4 + 1)

        usage = Usage(server.process.pid)
        with ThreadPoolExecutor(2 * PLACES) as pool:
            clients = [pool.submit(client) for _ in range(2 * PLACES)]
            for _ in range(20):
                time.sleep(SOAK_SECONDS / 20)
                usage.sample()
            for done in clients:
                done.result()
        assert set(statuses) == {200, 429}
        assert statuses[429] > 0.05 * statuses.total()  # about half, if the machine is as fast as it was at the start
        assert metric(server.site, "sedd_rows_total", end="finished") - before == statuses[200]
        assert metric(server.site, "sedd_rows_total") == metric(server.site, "sedd_rows_total", end="finished")
        assert metric(server.site, "sedd_rows_running") == metric(server.site, "sedd_outstanding_cost") == 0
        usage.check()
        text = server.site.send("/v1/infill", soak_request(0)).json["choices"][0]["text"]
        kill_under_load(server)
    assert list(temporary.iterdir()) == []
    assert {path: path.stat().st_mtime_ns for path in words_run.rglob("*")} == files
    with sedd_serve(environment, *words, "--port", server.site.port) as again:
        assert again.site.send("/v1/infill", soak_request(0)).json["choices"][0]["text"] == text
        assert again.stop() == 0


def kill_under_load(server: ServerProcess) -> None:
    """SIGKILL while a request runs: its client sees a broken connection, not a wait."""
    long = {"template": "{32}", "steps": 1000, "sampler": "remask", "options": {"eta": 1.0}, "n": 8}
    with ThreadPoolExecutor(1) as pool:
        broken = pool.submit(server.site.send, "/v1/infill", long)
        while not metric(server.site, "sedd_rows_running"):
            pass
        children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text()
        assert children == ""
        server.kill()
        assert isinstance(broken.exception(30), ConnectionError)


def test_a_file_of_keys_that_others_can_read_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    for mode, is_open in ((0o644, True), (0o600, False)):
        keys.chmod(mode)
        assert read_keys(keys) == {"secret"}
        assert ("chmod 600" in capsys.readouterr().err) is is_open
