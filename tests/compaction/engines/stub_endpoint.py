"""An OpenAI-compatible server on the loopback, in a thread of its own, that answers from a script."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True)
class Call:
    """A request as it arrived."""

    method: str
    path: str
    headers: dict[str, str]
    body: Json
    at: float


@dataclass(frozen=True)
class Answer:
    """A response, byte for byte."""

    status: int = 200
    body: bytes = b""
    kind: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)
    pieces: tuple[bytes, ...] | None = None
    """Sent one by one as chunks, in place of the body"""
    cut: bool = False
    """The connection closes before the announced end"""
    seconds: float = 0.0
    """Until the answer begins"""


def usage(prompt: int = 50, completion: int = 5, cached: int = 0, reasoning: int = 0) -> Json:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }


def as_json(payload: Any, status: int = 200, **more: Any) -> Answer:
    return Answer(status, json.dumps(payload).encode(), **more)


def reply(text: str | None = "cat a", finish: str | None = "stop", used: Json | None = None, **message: Any) -> Answer:
    """A whole completion; `message` holds further fields of the message."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text, **message}, "finish_reason": finish}
    payload: Json = {"object": "chat.completion", "choices": [choice], "usage": usage() if used is None else used}
    return as_json(payload)


def refused(status: int, message: str, code: Any = None, kind: str = "invalid_request_error", **headers: str) -> Answer:
    """An error in OpenAI's form. `headers` with _ for -."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return as_json({"error": {"message": message, "type": kind, "code": code}}, status, headers=named)


def event(payload: Any) -> bytes:
    return f"data: {payload if isinstance(payload, str) else json.dumps(payload)}\n\n".encode()


def delta(text: str | None = None, finish: str | None = None, **more: Any) -> bytes:
    """A piece of a streamed completion."""
    fields = {"content": text, **more.pop("fields", {})}
    return event({"choices": [{"index": 0, "delta": fields, "finish_reason": finish, **more}]})


def stream(*pieces: bytes, **more: Any) -> Answer:
    return Answer(kind="text/event-stream", pieces=pieces, **more)


DONE = event("[DONE]")
USAGE = event({"choices": [], "usage": usage()})


class StubEndpoint:
    """Answers completions by `script` (the last one again when a list runs out), other paths by `routes`."""

    def __init__(
        self, script: list[Answer] | Callable[[Call], Answer], routes: dict[str, Answer] | None = None
    ) -> None:
        self.calls: list[Call] = []
        """Of completions only"""
        self.others: list[Call] = []
        self._script, self._routes = script, routes or {}
        self._lock = threading.Lock()
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # else headers and body are 40 ms apart

            def log_message(self, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                _serve(self, stub)

            do_POST = do_GET

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})

    @property
    def root(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.root}/v1"

    @property
    def bodies(self) -> list[Json]:
        return [call.body for call in self.calls]

    def answer(self, call: Call) -> Answer:
        if call.path != "/v1/chat/completions":
            with self._lock:
                self.others.append(call)
            return self._routes.get(call.path, refused(404, "Not Found"))
        with self._lock:
            self.calls.append(call)
            n = len(self.calls)
        return self._script[min(n, len(self._script)) - 1] if isinstance(self._script, list) else self._script(call)

    @contextmanager
    def serving(self) -> Iterator[StubEndpoint]:
        self._thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()


def _serve(handler: BaseHTTPRequestHandler, stub: StubEndpoint) -> None:
    raw = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
    body = json.loads(raw) if raw else {}
    headers = {name.lower(): value for name, value in handler.headers.items()}
    answer = stub.answer(Call(handler.command, handler.path, headers, body, time.monotonic()))
    if answer.seconds:
        time.sleep(answer.seconds)
    try:
        _send(handler, answer)
    except ConnectionError:  # the client gave up
        handler.close_connection = True


def _send(handler: BaseHTTPRequestHandler, answer: Answer) -> None:
    if answer.status == 0:  # nothing at all
        handler.close_connection = True
        return
    handler.send_response(answer.status)
    handler.send_header("Content-Type", answer.kind)
    for name, value in answer.headers.items():
        handler.send_header(name, value)
    if answer.pieces is None:
        handler.send_header("Content-Length", str(len(answer.body) + (100 if answer.cut else 0)))
        handler.end_headers()
        handler.wfile.write(answer.body)
    else:
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        for piece in answer.pieces:
            handler.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            handler.wfile.flush()
        if not answer.cut:
            handler.wfile.write(b"0\r\n\r\n")
    if answer.cut:
        handler.close_connection = True
