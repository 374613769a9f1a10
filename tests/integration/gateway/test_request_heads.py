"""Request heads on a real socket: their bounds, and upgrades that are never made."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import uvicorn

from services.gateway.http_protocol import MAX_HEAD_BYTES, stall_aware_protocol

DEADLINE_SECONDS = 10
FILLER = b"GET / HTTP/1.1\r\nHost: g\r\nX-Filler: "
UPGRADES = b"Host: g\r\nConnection: Upgrade\r\nuPGRADE: h2c\r\n"
POST = b"POST /first HTTP/1.1\r\n" + UPGRADES + b"Content-Length: 40\r\n\r\n"
# A body that would pass for a request of its own.
BODY = b"GET /smuggled HTTP/1.1\r\nHost: evil\r\n\r\n..."[:40].ljust(40, b".")
NEXT = b"GET /next HTTP/1.1\r\nHost: g\r\nConnection: close\r\n\r\n"


class Echo:
    """Answers with the body, and notes the paths it was asked for."""

    def __init__(self) -> None:
        self.paths: list[str] = []

    async def __call__(self, scope, receive, send) -> None:
        self.paths.append(scope["path"])
        body, more_body = b"", True
        while more_body:
            event = await receive()
            body += event.get("body", b"")
            more_body = event.get("more_body", False)
        length = str(len(body)).encode()
        headers = [(b"content-length", length)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


@asynccontextmanager
async def connected(
    app: Echo, head_seconds: float = 30.0
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Serve ``app`` on a free port and connect to it."""
    http = stall_aware_protocol(0, head_seconds)
    config = uvicorn.Config(app, http=http, lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config.load()
        server.lifespan = config.lifespan_class(config)
        await server.startup(sockets=[listener])
        async with asyncio.timeout(DEADLINE_SECONDS):
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            try:
                yield reader, writer
            finally:
                writer.close()
                await writer.wait_closed()
                await server.shutdown(sockets=[listener])


@pytest.mark.parametrize(
    "first", [b"", b"POST / HTTP/1.1\r\nHost: g\r\nContent-Length: 1\r\n\r\nx"]
)
async def test_a_head_over_the_limit_is_answered_431_and_the_connection_closed(first):
    async with connected(Echo()) as (reader, writer):
        if first:
            writer.write(first)
            await reader.readuntil(b"\r\n\r\nx")
        writer.write(FILLER.ljust(MAX_HEAD_BYTES + 1, b"x"))
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431 ")
    assert json.loads(body)["error"]["code"] == "request_head_too_large"


async def test_a_head_at_the_limit_is_served():
    async with connected(Echo()) as (reader, writer):
        writer.write(FILLER.ljust(MAX_HEAD_BYTES - 4, b"x") + b"\r\n\r\n")
        assert b" 200 " in await reader.readline()


async def test_trailers_are_bounded_like_heads():
    raw = b"POST / HTTP/1.1\r\nHost: g\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n"
    app = Echo()
    async with connected(app) as (reader, writer):
        writer.write(raw)
        while not app.paths:
            await asyncio.sleep(0)
        writer.write(b"0\r\nX-Filler: ".ljust(MAX_HEAD_BYTES + 1, b"x"))
        assert b" 200 " not in await reader.read()


@pytest.mark.parametrize("raw", [b"", b"\r\n\r\n", FILLER, NEXT[:-2]])
async def test_a_connection_whose_head_is_never_whole_is_closed(raw):
    async with connected(Echo(), head_seconds=0.05) as (reader, writer):
        writer.write(raw)
        assert await reader.read() == b""


async def test_a_later_head_that_is_never_whole_is_closed_too():
    post = b"POST / HTTP/1.1\r\nHost: g\r\nContent-Length: 1\r\n\r\nx"
    async with connected(Echo(), head_seconds=0.05) as (reader, writer):
        writer.write(post + NEXT[:-2])
        assert (await reader.read()).endswith(b"\r\n\r\nx")


@pytest.mark.parametrize("cut", [0, 1, 30, len(POST) - 3, len(POST) - 1, len(POST), len(POST) + 9])
async def test_an_upgrade_is_ignored_and_its_body_kept(cut):
    app = Echo()
    async with connected(app) as (reader, writer):
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        raw = POST + BODY
        writer.write(raw[:cut])
        await writer.drain()
        for _ in range(20):  # let the server's side of this loop see the first part by itself
            await asyncio.sleep(0)
        writer.write(raw[cut:])
        answer = await reader.readuntil(BODY)
        writer.write(NEXT)
        await reader.read()
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert app.paths == ["/first", "/next"]


async def test_a_websocket_is_not_opened():
    raw = b"GET / HTTP/1.1\r\nHost: g\r\nConnection: Upgrade, close\r\nUpgrade: websocket\r\n\r\n"
    async with connected(Echo()) as (reader, writer):
        writer.write(raw)
        assert (await reader.read()).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("tail", [POST, b"CONNECT g:80 HTTP/1.1\r\nHost: g\r\n\r\n"])
async def test_an_upgrade_behind_another_request_is_refused_and_nothing_smuggled(tail):
    first = b"POST /before HTTP/1.1\r\nHost: g\r\nContent-Length: 1\r\n\r\nx"
    app = Echo()
    async with connected(app) as (reader, writer):
        writer.write(first + tail + BODY)
        answer = await reader.read()
    assert b" 400 " in answer
    assert set(app.paths) <= {"/before"}


async def test_garbage_is_refused_at_once():
    async with connected(Echo()) as (reader, writer):
        writer.write(b"GET / HTTP/1.1\nHost: g\n\n")
        assert b" 400 " in await reader.readline()
