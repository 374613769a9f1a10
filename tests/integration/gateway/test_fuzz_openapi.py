"""20 000 requests made from our own OpenAPI document: no crash, no hang, nothing kept.

Schemathesis draws bodies that fit the document's schemas and bodies that do not. As each takes it
some time, most requests are joined from fields of several of them, with the model's right name, or
are their bytes with errors in them.
"""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy
from schemathesis.generation import GenerationMode

from services.gateway.app import build_app
from services.gateway.http_settings import HttpSettings
from tests.support.answers import Json
from tests.support.fake_backend import MODEL_NAME, fake_backend

NUM_REQUESTS = 20_000
NUM_CASES = 40
"""Bodies that are drawn for each route, of those that fit and of those that do not."""
ANSWER_SECONDS = 20.0
BASES: Mapping[str, Json] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
    "/v1/completions": {"prompt": "hello"},
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [1, 2, 3]},
}
GETS = ("/v1/models", "/health", "/ping", "/load", "/version", "/metrics")
CONTENT_TYPES = ("application/json; charset=utf-16", "text/plain", "application/xml", "", "\xff")
METHODS = ("GET", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "CONNECT", "FROB")
DOCUMENTED = {200, 400, 404, 405, 413, 415}


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request."""

    method: str
    path: str
    body: bytes = b""
    content_type: str = "application/json"


async def ask(app: FastAPI, call: Call) -> tuple[int, bytes]:
    """Call the application without a socket; the client stays to the end of the answer."""
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": call.method,
        "scheme": "http",
        "path": call.path,
        "raw_path": call.path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [
            (b"host", b"gateway"),
            (b"content-type", call.content_type.encode("latin-1")),
            (b"content-length", str(len(call.body)).encode()),
        ],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }
    sent: list[Any] = []  # Any: ASGI messages
    requests = iter([{"type": "http.request", "body": call.body, "more_body": False}])

    async def receive() -> Any:  # Any: an ASGI message
        for request in requests:
            return request
        return await asyncio.get_running_loop().create_future()

    async def send(message: Any) -> None:  # Any: an ASGI message
        sent.append(message)

    async with asyncio.timeout(ANSWER_SECONDS):
        await app(scope, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


def drawn_bodies(app: FastAPI) -> dict[str, list[Any]]:  # Any: JSON values, or bytes
    """Return by route what Schemathesis draws from the application's document."""
    document = schemathesis.openapi.from_dict(app.openapi())
    bodies: dict[str, list[Any]] = {path: [] for path in BASES}
    for path, of_route in bodies.items():
        operation = document[path]["POST"]
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            _draw_into(of_route, operation.as_strategy(generation_mode=mode))
    return bodies


def _draw_into(bodies: list[Any], cases: SearchStrategy[Any]) -> None:  # Any: untyped library
    @settings(
        max_examples=NUM_CASES,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases)
    def draw(case: Any) -> None:  # Any: untyped library
        if isinstance(case.body, bytes | dict | list | str | int | float | None):
            bodies.append(case.body)

    draw()


class Fuzzer:
    """Makes calls, the same in every run."""

    def __init__(self, bodies: dict[str, list[Any]]) -> None:  # Any: JSON values, or bytes
        self._rng = random.Random(20264)
        self._bodies = bodies
        self._fields = {
            path: [
                (name, value)
                for body in of_route
                if isinstance(body, dict)
                for name, value in body.items()
                if name != "model"
            ]
            for path, of_route in bodies.items()
        }
        self._values = [value for fields in self._fields.values() for _, value in fields]

    def calls(self, count: int) -> Iterator[Call]:
        """Yield so many calls."""
        for _ in range(count):
            yield self._call(self._rng.choice(list(BASES)))

    def _call(self, path: str) -> Call:
        rng = self._rng
        kind = rng.random()
        if kind < 0.1:
            return Call("POST", path, _encoded(rng.choice(self._bodies[path])))
        if kind < 0.75:
            return Call("POST", path, _encoded(self._joined(path)))
        if kind < 0.9:
            return Call("POST", path, self._damaged(_encoded(self._joined(path))))
        if kind < 0.94:
            body = _encoded(self._joined(path))
            return Call("POST", path, body, rng.choice(CONTENT_TYPES))
        if kind < 0.98:
            odd = rng.choice((*GETS, path, f"/v1/models/{str(rng.choice(self._values))[:99]}"))
            return Call(rng.choice(METHODS), odd.encode("ascii", "replace").decode())
        return Call("GET", rng.choice(GETS))

    def _joined(self, path: str) -> Json:
        rng = self._rng
        body: Json = {"model": MODEL_NAME, **BASES[path]}
        for _ in range(rng.choice((1, 1, 2, 3))):
            name, value = rng.choice(self._fields[path])
            body[name] = value if rng.random() < 0.8 else rng.choice(self._values)
        return body

    def _damaged(self, body: bytes) -> bytes:
        rng = self._rng
        data = bytearray(body or b"{}")
        place = rng.randrange(len(data))
        match rng.randrange(4):
            case 0:
                data[place] = rng.randrange(256)
            case 1:
                del data[place:]
            case 2:
                data[place:place] = rng.randbytes(rng.randrange(1, 6))
            case _:
                data[place:place] = data[: rng.randrange(len(data))]
        return bytes(data)


def _encoded(body: Any) -> bytes:  # Any: a JSON value, or bytes
    return body if isinstance(body, bytes) else json.dumps(body).encode()


@pytest.mark.timeout(300)
def test_no_request_made_from_our_own_document_crashes_hangs_or_is_kept(tiny_folder: Path) -> None:
    backend = fake_backend(tiny_folder)
    app = build_app(backend, HttpSettings())
    fuzzer = Fuzzer(drawn_bodies(app))
    statuses: Counter[int] = Counter()

    async def send_all() -> None:
        for call in fuzzer.calls(NUM_REQUESTS):
            status, answer = await ask(app, call)
            statuses[status] += 1
            assert status in DOCUMENTED, f"{status} {answer[:300]!r} to {call}"
            if status != 200 and call.method != "HEAD":
                assert json.loads(answer)["error"]["message"], f"an unnamed {status} to {call}"
        _, load = await ask(app, Call("GET", "/load"))
        assert json.loads(load) == {"server_load": 0}
        assert all(submission.closed.is_set() for submission in backend.submissions)
        body = _encoded({"model": MODEL_NAME, "prompt": "hello"})
        status, answer = await ask(app, Call("POST", "/v1/completions", body))
        assert (status, json.loads(answer)["choices"][0]["text"]) == (200, "hello there")

    asyncio.run(send_all())
    # It is neither all refused at the door nor all harmless.
    assert statuses[200] > NUM_REQUESTS // 20, statuses
    assert statuses[400] > NUM_REQUESTS // 4, statuses
    assert set(statuses) >= {200, 400, 404, 405, 415}, statuses
