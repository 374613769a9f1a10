"""A stop with requests in work: who is refused, who may finish, and how the others end."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
import uvicorn

from services.gateway.app import build_app
from services.gateway.fake_backend import FakeBackend, FakeBehaviour
from services.gateway.http_protocol import stall_aware_protocol
from services.gateway.http_settings import HttpSettings
from services.gateway.listener import bind_listener
from services.gateway.server import GatewayServer
from tests.support.fake_backend import MODEL_NAME, fake_backend

CHAT = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "hello"}]}
DEADLINE_SECONDS = 10


class Gateway:
    """One gateway on a port of its own."""

    def __init__(self, backend: FakeBackend) -> None:
        self.app = build_app(backend, HttpSettings())
        self.listener = bind_listener("127.0.0.1", 0, is_shared=False)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.server = GatewayServer(
            uvicorn.Config(
                self.app,
                http=stall_aware_protocol(60.0),
                lifespan="off",
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=1,
            )
        )

    async def drain(self, seconds: float) -> None:
        await self.server.drain(self.app.state.admission, seconds, is_alone=True)


@asynccontextmanager
async def running(backend: FakeBackend) -> AsyncIterator[tuple[Gateway, httpx.AsyncClient]]:
    gateway = Gateway(backend)
    async with asyncio.timeout(DEADLINE_SECONDS), asyncio.TaskGroup() as tasks:
        tasks.create_task(gateway.server.serve(sockets=[gateway.listener]))
        async with httpx.AsyncClient(base_url=gateway.url) as client:
            yield gateway, client
        gateway.server.should_exit = True


def waiting_backend(folder) -> FakeBackend:
    """Build a backend that stops after the first token."""
    return fake_backend(folder, behaviour=FakeBehaviour(num_tokens_before_wait=1))


async def test_what_has_not_ended_after_the_drain_is_ended_by_name(tiny_folder, caplog):
    caplog.set_level(logging.WARNING)
    backend = waiting_backend(tiny_folder)
    async with running(backend) as (gateway, client), asyncio.TaskGroup() as tasks:
        whole = tasks.create_task(client.post("/v1/chat/completions", json=CHAT))
        await backend.wait_for_submission(0)
        streamed = tasks.create_task(
            client.post("/v1/chat/completions", json={**CHAT, "stream": True})
        )
        for number in range(2):
            await (await backend.wait_for_submission(number)).waiting.wait()
        await gateway.drain(0.05)
        answer, stream = await whole, await streamed
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
    assert "drain_seconds" in answer.json()["error"]["message"]
    assert answer.headers["x-request-id"].startswith("req-")
    *_, last = [line for line in stream.text.splitlines() if line]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "shutting_down"
    assert gateway.app.state.metrics.cut_by_drain._value.get() == 2
    assert [record.getMessage() for record in caplog.records] == []
    for submission in backend.submissions:
        assert submission.closed.is_set()


async def test_while_it_drains_new_requests_are_refused_by_name_and_old_ones_finish(tiny_folder):
    backend = waiting_backend(tiny_folder)
    async with running(backend) as (gateway, client), asyncio.TaskGroup() as tasks:
        old = tasks.create_task(client.post("/v1/chat/completions", json=CHAT))
        await (await backend.wait_for_submission(0)).waiting.wait()
        drain = tasks.create_task(gateway.drain(DEADLINE_SECONDS))
        await asyncio.sleep(0)
        async with httpx.AsyncClient(base_url=gateway.url) as other:
            refused = await other.post("/v1/chat/completions", json=CHAT)
            tokens = await other.post("/tokenize", json={"prompt": "hello"})
            health = await other.get("/health")
        backend.behaviour.resume.set()
        answer = await old
        await drain
    assert [refused.status_code, tokens.status_code, health.status_code] == [503, 503, 503]
    assert refused.json()["error"]["code"] == "shutting_down"
    assert refused.headers["retry-after"] == "1"
    assert health.json()["reason"] == "the gateway is shutting down"
    assert answer.status_code == 200
    assert gateway.app.state.metrics.cut_by_drain._value.get() == 0


async def test_a_body_that_does_not_end_is_refused_when_the_drain_ends(tiny_folder):
    async with running(fake_backend(tiny_folder)) as (gateway, client):
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", gateway.listener.getsockname()[1]
        )
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: g\r\nContent-Length: 9\r\n\r\n{")
        while not gateway.app.state.admission.num_open:
            await client.get("/version")
        await gateway.drain(0.0)
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"shutting_down" in answer


@pytest.mark.parametrize("num_drains", [1, 2])
async def test_an_idle_gateway_ends_at_once(tiny_folder, num_drains):
    async with running(fake_backend(tiny_folder)) as (gateway, _):
        for _ in range(num_drains):
            await gateway.drain(60.0)
        assert gateway.server.should_exit
