"""What ``flowpath chat`` asks a gateway for."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from common.errors import ConfigError
from services.cli.chat import HttpChatServer

ROOM = 100


class Gateway(ThreadingHTTPServer):
    """Answers with one word where the context leaves room for what is asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[int | None] = []
        self.room = ROOM

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Gateway

    def log_request(self, code: object = "-", size: object = "-") -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self._answer(200, {"data": [{"id": "toy"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        asked = body.get("max_tokens")
        self.server.asked.append(asked)
        if asked is not None and asked > self.server.room:
            error = {"message": "too long", "param": "max_tokens"}
            self._answer(400, {"error": error})
            return
        piece = json.dumps({"choices": [{"delta": {"content": "yes"}}]})
        self._send(200, f"data: {piece}\n\ndata: [DONE]\n\n".encode())

    def _answer(self, status: int, body: object) -> None:
        self._send(status, json.dumps(body).encode())

    def _send(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def gateway(room: int) -> Iterator[Gateway]:
    with Gateway() as server:
        server.room = room
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("max_tokens", "room", "asked"),
    [(None, 1000, [512]), (None, 100, [512, None]), (30, 100, [30])],
)
def test_an_answer_has_512_tokens_at_most_or_what_the_context_leaves(
    max_tokens: int | None, room: int, asked: list[int | None]
) -> None:
    with gateway(room) as server:
        chat = HttpChatServer(server.url, max_tokens, 0.0)
        assert list(chat.answer([{"role": "user", "content": "is it?"}])) == ["yes"]
        assert server.asked == asked


def test_a_length_that_was_asked_for_and_does_not_fit_is_refused() -> None:
    with gateway(100) as server:
        chat = HttpChatServer(server.url, 200, 0.0)
        with pytest.raises(ConfigError, match=r"too long \(HTTP 400\)"):
            list(chat.answer([]))
        assert server.asked == [200]
