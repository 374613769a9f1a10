"""The death of a controller or gateway, and workers that stop for a while."""

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from common.messages.admin import StatusReport, WorkerStatus
from common.messages.fields import WorkerState
from common.telemetry.story import read_log_folder
from tests.support.answers import Answer, Json, events_of, gather_stream
from tests.support.cluster import (
    CONTROLLER,
    GATEWAY,
    Cluster,
    ClusterError,
    ClusterOptions,
    running_cluster,
)
from tests.support.prompts import Encode
from tests.support.undisturbed import Undisturbed, greedy_bodies, run_quietly

pytestmark = [pytest.mark.chaos, pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

PATH = "/v1/completions"
MAX_TOKENS = 64
SETTINGS = {"heartbeat_seconds": 0.1, "death_seconds": 0.8}
"""A silent worker whose process runs is suspect after 0.8 s and dead after 4 s."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(model_folder: Path) -> AsyncIterator[Cluster]:
    options = ClusterOptions(model_folder, kv_bytes=128 * 2**20, settings=SETTINGS)
    async with running_cluster(options) as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def quiet(cluster: Cluster, encode: Encode) -> list[Undisturbed]:
    bodies = greedy_bodies(encode, (20, 90, 45), MAX_TOKENS, first=50_000)
    return await run_quietly(cluster.ask, bodies)


class OpenStream:
    """A streamed completion that is under way."""

    def __init__(self, cluster: Cluster, body: Json) -> None:
        self.began = asyncio.Event()
        self._cluster = cluster
        self._body = body

    async def run(self, path: str, body: Json) -> Answer:
        """Read to the end. Raises ValueError with the error that the stream ended with."""
        async with self._cluster.stream(path, body) as response:
            events = []
            async for event in events_of(response):
                events.append(event)
                self.began.set()
        return gather_stream(events, response.headers["x-request-id"])


def _long(request: Undisturbed) -> Json:
    return {**request.body, "max_tokens": 1000}


def _worker(report: StatusReport, name: str) -> WorkerStatus | None:
    return next((worker for worker in report.workers if worker.id == name), None)


async def test_streams_outlive_their_controller_and_its_successor_serves(
    cluster: Cluster, quiet: list[Undisturbed]
) -> None:
    streams = [OpenStream(cluster, request.body) for request in quiet]
    async with asyncio.TaskGroup() as group:
        running = [
            group.create_task(request.ask_again(stream.run, is_stream=True))
            for stream, request in zip(streams, quiet, strict=True)
        ]
        for stream in streams:
            await stream.began.wait()
        await cluster.kill(CONTROLLER)
        assert await cluster.status() is None
        cluster.start(CONTROLLER)
        await cluster.wait_ready()  # the others have registered again by themselves
        assert await quiet[0].ask_again(cluster.ask, is_stream=False) is None
    assert [task.result() for task in running] == [None, None, None]
    await cluster.wait_idle()


async def test_requests_of_a_gateway_that_died_are_cancelled(
    cluster: Cluster, quiet: list[Undisturbed]
) -> None:
    streams = [OpenStream(cluster, request.body) for request in quiet]
    running = [
        asyncio.get_running_loop().create_task(stream.run(PATH, _long(request)))
        for stream, request in zip(streams, quiet, strict=True)
    ]
    for stream in streams:
        await stream.began.wait()
    await cluster.kill(GATEWAY)
    ended = await asyncio.gather(*running, return_exceptions=True)
    assert {type(end) for end in ended} <= {httpx.RemoteProtocolError, httpx.ReadError}
    await cluster.wait_until(
        "every request of the dead gateway has ended",
        lambda report: not report.num_requests and not report.gateways,
        5.0,
    )
    cluster.start(GATEWAY)
    await cluster.wait_ready()
    await cluster.wait_idle()
    assert await quiet[0].ask_again(cluster.ask, is_stream=True) is None


@pytest.mark.parametrize("name", ["decode-0", "prefill-0"])
async def test_a_worker_that_stops_for_a_second_breaks_nothing(
    cluster: Cluster, quiet: list[Undisturbed], name: str
) -> None:
    before = await cluster.worker(name)
    assert before is not None
    streams = [OpenStream(cluster, request.body) for request in quiet]
    async with asyncio.TaskGroup() as group:
        running = [
            group.create_task(request.ask_again(stream.run, is_stream=True))
            for stream, request in zip(streams, quiet, strict=True)
        ]
        await streams[0].began.wait()
        cluster.signal(name, signal.SIGSTOP)

        def is_silent(report: StatusReport) -> bool:
            worker = _worker(report, name)
            return worker is not None and worker.heartbeat_age_seconds > 1.0

        report = await cluster.wait_until(f"{name} is silent for 1 s", is_silent)
        cluster.signal(name, signal.SIGCONT)
        stopped = _worker(report, name)
        assert stopped is not None
        assert stopped.state is WorkerState.SUSPECT
    assert [task.result() for task in running] == [None, None, None]
    await cluster.wait_idle()
    after = await cluster.worker(name)
    assert after is not None
    assert (after.epoch, after.state) == (before.epoch, WorkerState.READY)


@pytest.mark.parametrize("name", ["decode-0", "prefill-0"])
async def test_a_worker_that_stops_for_long_is_fenced_and_comes_back_as_another(
    cluster: Cluster, quiet: list[Undisturbed], name: str
) -> None:
    before = await cluster.worker(name)
    assert before is not None
    stream = OpenStream(cluster, quiet[0].body)
    body = _long(quiet[0])
    running = asyncio.get_running_loop().create_task(stream.run(PATH, body))
    await stream.began.wait()
    if name == "prefill-0":
        cluster.signal(name, signal.SIGSTOP)  # its part of the stream is over
        await cluster.wait_until(f"{name} is lost", lambda r: _worker(r, name) is None)
        assert not running.done()
        running.cancel()
        await asyncio.wait([running])
        with pytest.raises(ClusterError, match=r"503.*no prefill worker is ready"):
            await cluster.ask(PATH, quiet[1].body)
    else:
        cluster.signal(name, signal.SIGSTOP)
        with pytest.raises(ValueError, match="worker_died"):
            await running
    cluster.signal(name, signal.SIGCONT)

    def is_back(report: StatusReport) -> bool:
        worker = _worker(report, name)
        return worker is not None and worker.epoch != before.epoch and worker.kv is not None

    await cluster.wait_until(f"{name} is back with a new epoch", is_back)
    await cluster.wait_ready()
    for request in quiet:
        assert await request.ask_again(cluster.ask, is_stream=False) is None
    await cluster.wait_idle()
    fenced = [
        entry
        for entry in read_log_folder(cluster.log_dir)
        if (entry.process, entry.event) == (name, "fenced")
    ]
    assert len(fenced) == 1
