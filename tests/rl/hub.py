"""A Hugging Face hub on this machine that has the models it is given, and no others."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def hub(models: Mapping[str, Path]) -> Iterator[str]:
    """Serves each folder under its name; gives the hub's address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            found = _found(models, unquote(self.path.partition("?")[0]).strip("/"))
            if found is None:
                self._answer(b"{}", 404, **{"X-Error-Code": "RepoNotFound"})
            else:
                self._answer(found, ETag=f'"{_digest(found)}"')

        def _answer(self, body: bytes, status: int = 200, **headers: str) -> None:
            self.send_response(status)
            for key, value in {"Content-Length": str(len(body)), "X-Repo-Commit": COMMIT, **headers}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def _found(models: Mapping[str, Path], path: str) -> bytes | None:
    for name, folder in models.items():
        if path.startswith(f"api/models/{name}/tree/"):
            return json.dumps([_entry(file) for file in sorted(folder.iterdir())]).encode()
        if path in (f"api/models/{name}", f"api/models/{name}/revision/main"):
            siblings = [{"rfilename": file.name} for file in folder.iterdir()]
            return json.dumps({"id": name, "sha": COMMIT, "siblings": siblings}).encode()
        if path.startswith(f"{name}/resolve/") and (file := folder / Path(path).name).is_file():
            return file.read_bytes()
    return None


def _entry(file: Path) -> dict[str, object]:
    content = file.read_bytes()
    return {"type": "file", "path": file.name, "size": len(content), "oid": _digest(content)}


def _digest(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()
