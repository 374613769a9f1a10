"""Gateway processes under many streams, in bursts, and beside a client that stops reading."""

import asyncio
import signal
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

import httpx
import psutil
import pytest

from common.telemetry.story import read_log_folder
from tests.support.gateway_load import (
    HOST,
    GatewayRig,
    LeanStream,
    play_steadily,
    raw_completion,
    running_gateways,
)

END_SECONDS = 60.0
STALLED_SECONDS = 1.0
MAX_TOKENS_STALLED = 200_000
TOKENS_PER_DELTA = 2000
MAX_GROWTH_BYTES = 64 * 2**20


@pytest.fixture
def root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="fp-") as folder:
        yield Path(folder)


async def _ended(streams: list[LeanStream]) -> None:
    async with asyncio.timeout(END_SECONDS):
        await asyncio.gather(*(stream.is_lost.wait() for stream in streams))


async def _open(rig: GatewayRig, count: int, max_tokens: int) -> list[LeanStream]:
    before = len(rig.cluster.streams)
    streams = list(await asyncio.gather(*(rig.open_stream(max_tokens) for _ in range(count))))
    await rig.cluster.wait_for_streams(before + count)
    return streams


async def test_every_token_of_500_streams_in_bursts_of_64_arrives_once(root):
    async with running_gateways(root) as rig:
        streams = await _open(rig, 500, max_tokens=5)
        await play_steadily(rig.cluster, 5000, 64, until=perf_counter() + END_SECONDS)
        await _ended(streams)
    assert {stream.first_line for stream in streams} == {"HTTP/1.1 200 OK"}
    assert {len(stream.received_at) for stream in streams} == {5}
    assert all(stream.is_complete for stream in streams), "a stream ended without [DONE]"


async def test_two_gateways_share_a_port_and_a_burst_reaches_the_streams_of_both(root):
    async with running_gateways(root, num_gateways=2) as rig:
        streams = await _open(rig, 256, max_tokens=4)
        of_gateway = {stream.gateway_id for stream in rig.cluster.streams.values()}
        await play_steadily(rig.cluster, 11_000, 128, until=perf_counter() + END_SECONDS)
        await _ended(streams)
    assert of_gateway == {"gateway-0", "gateway-1"}
    assert all(s.is_complete and len(s.received_at) == 4 for s in streams)


async def test_a_stopping_gateway_finishes_its_streams_and_the_other_goes_on(root):
    async with running_gateways(root, num_gateways=2, drain_seconds=30) as rig:
        streams = await _open(rig, 32, max_tokens=6)
        rig.cluster.send(list(rig.cluster.streams.values()), num_tokens=2)
        rig.processes[0].send_signal(signal.SIGTERM)
        while await _is_accepting(rig, "gateway-0", root):
            continue
        late = await _open(rig, 8, max_tokens=6)
        on_late = [s.gateway_id for s in list(rig.cluster.streams.values())[32:]]
        await play_steadily(rig.cluster, 2000, 16, until=perf_counter() + END_SECONDS)
        await _ended([*streams, *late])
        code = await asyncio.to_thread(rig.processes[0].wait, 20)
    assert code == 0
    assert set(on_late) == {"gateway-1"}
    assert all(s.is_complete and len(s.received_at) == 6 for s in [*streams, *late])


async def _is_accepting(rig: GatewayRig, gateway: str, root: Path) -> bool:
    """Tell whether a gateway still listens, as the kernel's list of sockets has it."""
    number = int(gateway.removeprefix("gateway-"))
    await asyncio.sleep(0)
    connections = psutil.Process(rig.pids[number]).net_connections("tcp")
    return any(c.status == psutil.CONN_LISTEN and c.laddr.port == rig.port for c in connections)


async def test_a_reader_that_stops_is_bounded_and_cut_off_and_disturbs_nobody(root):
    settings = {"stalled_client_seconds": STALLED_SECONDS, "max_model_len": 2**20}
    async with running_gateways(root, **settings) as rig:
        warm = await _open(rig, 8, max_tokens=4)
        await play_steadily(rig.cluster, 1000, 8, until=perf_counter() + END_SECONDS)
        await _ended(warm)
        process = psutil.Process(rig.pids[0])
        before = process.memory_info().rss

        deaf = socket.socket()
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(deaf, (HOST, rig.port))
        await loop.sock_sendall(
            deaf, raw_completion(MAX_TOKENS_STALLED, logprobs=1)
        )  # 70 bytes a token
        await rig.cluster.wait_for_streams(9)
        stalled = list(rig.cluster.streams.values())[8]
        while len(stalled.sent_at) < MAX_TOKENS_STALLED - TOKENS_PER_DELTA:
            rig.cluster.send([stalled], TOKENS_PER_DELTA)
            await asyncio.sleep(0)

        others = await _open(rig, 64, max_tokens=20)
        turn = list(rig.cluster.streams.values())[9:]
        for _ in range(20):
            rig.cluster.send(turn)
            await asyncio.sleep(0)
        await _ended(others)
        growth = process.memory_info().rss - before

        async with asyncio.timeout(END_SECONDS), rig.cluster.changed:
            await rig.cluster.changed.wait_for(lambda: stalled.is_cancelled)
        deaf.close()
        async with httpx.AsyncClient(base_url=f"http://{HOST}:{rig.port}") as client:
            load = (await client.get("/load")).json()
    assert all(s.is_complete and len(s.received_at) == 20 for s in others)
    assert growth < MAX_GROWTH_BYTES, f"{growth} bytes for a client that reads nothing"
    assert load == {"server_load": 0}, "the stalled request is still open"
    told = [entry for entry in read_log_folder(root / "log") if entry.event == "client_stalled"]
    assert len(told) == 1
    assert told[0].fact("num_unsent_bytes") < 2**20


async def test_a_client_that_reads_slowly_is_not_cut_off(root):
    settings = {"stalled_client_seconds": STALLED_SECONDS, "max_model_len": 2**20}
    async with running_gateways(root, **settings) as rig:
        loop = asyncio.get_running_loop()
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.setblocking(False)
        await loop.sock_connect(slow, (HOST, rig.port))
        await loop.sock_sendall(slow, raw_completion(20_000))
        await rig.cluster.wait_for_streams(1)
        stream = next(iter(rig.cluster.streams.values()))
        while not stream.is_over:
            rig.cluster.send([stream], 40)
            await asyncio.sleep(0)
        got = b""
        started = perf_counter()
        while b"[DONE]" not in got[-64:]:
            pause = STALLED_SECONDS / 20 if perf_counter() - started < 2 * STALLED_SECONDS else 0
            await asyncio.sleep(pause)
            part = await loop.sock_recv(slow, 2048 if pause else 2**20)
            assert part, "the gateway cut a reading client off"
            got += part
        slow.close()
    assert got.count(b"@") == 20_000
