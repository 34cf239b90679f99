"""A Hub on this machine: the part of the HTTP API that ``huggingface_hub`` uses.

Committed files can be downloaded again. Requests for a name in ``refused`` fail with that status and error code.
"""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """Stored files and received requests."""

    address: str = ""
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refused: dict[str, tuple[int, str]] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    private: dict[str, bool] = field(default_factory=dict)

    def post(self, path: str, body: bytes) -> object:
        if path == "/api/repos/create":
            wanted = json.loads(body)
            name = f"{wanted['organization']}/{wanted['name']}"
            self.files.setdefault(name, {})
            self.private[name] = wanted.get("private", wanted.get("visibility") == "private")
            return {"url": f"https://huggingface.co/{name}", "name": name}
        if "/preupload/" in path:
            plain = {"uploadMode": "regular", "shouldIgnore": False}
            return {"files": [{"path": file["path"], **plain} for file in json.loads(body)["files"]]}
        if "/commit/" in path:
            name = "/".join(path.split("/")[3:5])
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[name][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            address = f"https://huggingface.co/{name}/commit/{COMMIT}"
            return {"success": True, "commitOid": COMMIT, "commitUrl": address, "pullRequestUrl": None}
        return {"errors": [], "warnings": []}  # validation of a card's metadata

    def get(self, path: str) -> object:
        """Return the description of a repository, or one of its files."""
        if "/resolve/" in path:
            name, _, rest = path[1:].partition("/resolve/")
            return self.files[name][rest.partition("/")[2]]
        files = self.files["/".join(path.split("/")[3:5])]
        if "/tree/" in path:
            return [{"type": "file", "path": p, "size": len(c), "oid": _hash(c)} for p, c in files.items()]
        return {"id": "/".join(path.split("/")[3:5]), "sha": COMMIT, "siblings": [{"rfilename": p} for p in files]}


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@contextmanager
def serve() -> Iterator[Hub]:
    """Run a Hub on a local port."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.respond(lambda path, body: hub.post(path, body))

        def do_GET(self) -> None:
            self.respond(lambda path, _: hub.get(path))

        def do_HEAD(self) -> None:
            self.do_GET()

        def respond(self, find: object) -> None:
            path, body = unquote(urlsplit(self.path).path), self.body()
            hub.requests.append(f"{self.command} {path}")
            refusal = next((found for name, found in hub.refused.items() if name in path), None)
            try:
                content = None if refusal else find(path, body)
            except KeyError:
                refusal = (404, "RepoNotFound")
            if refusal:
                self.reply(b"", refusal[0], {"X-Error-Code": refusal[1]})
            else:
                raw = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.reply(raw, 200, {"ETag": f'"{_hash(raw)}"', "X-Repo-Commit": COMMIT})

        def body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            pieces = []
            while size := int(self.rfile.readline(), 16):
                pieces.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(pieces)

        def reply(self, raw: bytes, status: int, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(raw)), "Connection": "close"}).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(raw)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.address = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
