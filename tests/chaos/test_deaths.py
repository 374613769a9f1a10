"""The death of a controller or gateway, and gateways and workers that stop for a while."""

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from common.messages.admin import StatusReport, WorkerStatus
from common.messages.fields import WorkerState
from common.telemetry.story import read_log_folder
from tests.support.answers import Json
from tests.support.cluster import (
    CONTROLLER,
    GATEWAY,
    Cluster,
    ClusterError,
    ClusterOptions,
    running_cluster,
)
from tests.support.open_stream import OpenStream
from tests.support.prompts import Encode
from tests.support.undisturbed import Undisturbed, greedy_bodies, run_quietly

pytestmark = [pytest.mark.chaos, pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

PATH = "/v1/completions"
MAX_TOKENS = 48
SERVED_AGAIN_SECONDS = 10.0
"""After the start of another controller."""
LONG_TOKENS = 4000
"""More than are ever decoded: such a stream is cut."""
SETTINGS = {"heartbeat_seconds": 0.1, "death_seconds": 1.0, "roles": "manual"}
"""A silent worker whose process runs is suspect after 1 s and dead after 5 s, which a busy machine
makes nobody wait; and nobody does the work of a role that is not its own."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(model_folder: Path) -> AsyncIterator[Cluster]:
    options = ClusterOptions(model_folder, kv_bytes=256 * 2**20, settings=SETTINGS)
    async with running_cluster(options) as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def quiet(cluster: Cluster, encode: Encode) -> list[Undisturbed]:
    bodies = greedy_bodies(encode, (20, 90, 45), MAX_TOKENS, first=50_000)
    return await run_quietly(cluster.ask, bodies)


def _long(request: Undisturbed) -> Json:
    return {**request.body, "max_tokens": LONG_TOKENS}


async def _is_cut(stream: OpenStream, body: Json) -> bool:
    """Read a stream to its end; whether that is an end without a word."""
    try:
        await stream.run(PATH, body)
    except (httpx.RemoteProtocolError, httpx.ReadError):
        return True
    return False


def _worker(report: StatusReport, name: str) -> WorkerStatus | None:
    return next((worker for worker in report.workers if worker.id == name), None)


async def test_streams_outlive_their_controller_and_its_successor_serves(
    cluster: Cluster, quiet: list[Undisturbed]
) -> None:
    streams = [OpenStream(cluster) for _ in quiet]
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
    assert _seconds_until_served(cluster) < SERVED_AGAIN_SECONDS
    await cluster.wait_idle()


def _seconds_until_served(cluster: Cluster) -> float:
    """Return how long the last controller ran before it placed a request."""
    log = read_log_folder(cluster.log_dir)
    started = [entry.ts for entry in log if entry.event == "controller_started"][-1]
    placed = next(e.ts for e in log if e.event == "request_placed" and e.ts > started)
    return (datetime.fromisoformat(placed) - datetime.fromisoformat(started)).total_seconds()


async def test_requests_of_a_gateway_that_died_are_cancelled(
    cluster: Cluster, quiet: list[Undisturbed]
) -> None:
    streams = [OpenStream(cluster) for _ in quiet]
    async with asyncio.TaskGroup() as group:
        running = [
            group.create_task(_is_cut(stream, _long(request)))
            for stream, request in zip(streams, quiet, strict=True)
        ]
        for stream in streams:
            await stream.began.wait()
        await cluster.kill(GATEWAY)
    assert [task.result() for task in running] == [True, True, True]
    await cluster.wait_until(
        "every request of the dead gateway has ended",
        lambda report: not report.num_requests and not report.gateways,
    )
    cluster.start(GATEWAY)
    await cluster.wait_ready()
    await cluster.wait_idle()
    assert await quiet[0].ask_again(cluster.ask, is_stream=True) is None


async def test_streams_of_a_gateway_that_was_taken_for_dead_go_on(
    cluster: Cluster, quiet: list[Undisturbed]
) -> None:
    streams = [OpenStream(cluster) for _ in quiet]
    async with asyncio.TaskGroup() as group:
        running = [
            group.create_task(request.ask_again(stream.run, is_stream=True))
            for stream, request in zip(streams, quiet, strict=True)
        ]
        for stream in streams:
            await stream.began.wait()
        cluster.signal(GATEWAY, signal.SIGSTOP)
        try:
            await cluster.wait_until("it is lost", lambda report: not report.gateways)
        finally:
            cluster.signal(GATEWAY, signal.SIGCONT)
    assert [task.result() for task in running] == [None, None, None]
    await cluster.wait_idle()


async def test_a_stream_whose_worker_dies_with_the_controller_goes_on_without_long_silence(
    cluster: Cluster, quiet: list[Undisturbed]
) -> None:
    num_before = len(_why_resumed(cluster))
    stream = OpenStream(cluster)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(quiet[0].ask_again(stream.run, is_stream=True))
        await stream.began.wait()
        await cluster.kill(CONTROLLER)
        await cluster.kill("decode-0")
        cluster.start(CONTROLLER)
        cluster.start("decode-0")
    assert running.result() is None
    reasons = _why_resumed(cluster)[num_before:]
    assert reasons
    assert not any("nothing was heard" in reason for reason in reasons), reasons
    await cluster.wait_ready()
    await cluster.wait_idle()


async def test_decodes_that_lost_their_gateway_and_their_controller_end(
    cluster: Cluster, quiet: list[Undisturbed]
) -> None:
    stream = OpenStream(cluster)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(_is_cut(stream, _long(quiet[0])))
        await stream.began.wait()
        await cluster.wait_until("it decodes", _is_decoding)
        for name in (CONTROLLER, GATEWAY):
            await cluster.kill(name)
        for name in (CONTROLLER, GATEWAY):
            cluster.start(name)
    assert running.result()
    await cluster.wait_ready()
    await cluster.wait_until("nobody decodes", lambda report: not _is_decoding(report))
    await cluster.wait_idle()


def _why_resumed(cluster: Cluster) -> list[str]:
    log = read_log_folder(cluster.log_dir)
    return [str(entry.fact("reason")) for entry in log if entry.event == "request_resumed"]


@pytest.mark.parametrize("name", ["decode-0", "prefill-0"])
async def test_a_worker_that_stops_for_a_second_breaks_nothing(
    cluster: Cluster, quiet: list[Undisturbed], name: str
) -> None:
    before = await cluster.worker(name)
    assert before is not None
    streams = [OpenStream(cluster) for _ in quiet]
    async with asyncio.TaskGroup() as group:
        running = [
            group.create_task(request.ask_again(stream.run, is_stream=True))
            for stream, request in zip(streams, quiet, strict=True)
        ]
        await streams[0].began.wait()

        def is_suspect(report: StatusReport) -> bool:
            worker = _worker(report, name)
            return worker is not None and worker.state is WorkerState.SUSPECT

        with _stopped(cluster, name):
            await cluster.wait_until(f"{name} is suspect", is_suspect)
    assert [task.result() for task in running] == [None, None, None]
    await cluster.wait_idle()
    after = await cluster.worker(name)
    assert after is not None
    assert (after.epoch, after.state) == (before.epoch, WorkerState.READY)


async def test_streams_of_a_decode_worker_that_stops_for_long_go_on_once_it_is_back_as_another(
    cluster: Cluster, quiet: list[Undisturbed]
) -> None:
    before = await _incarnation(cluster, "decode-0")
    streams = [OpenStream(cluster) for _ in quiet]
    async with asyncio.TaskGroup() as group:
        running = [
            group.create_task(request.ask_again(stream.run, is_stream=True))
            for stream, request in zip(streams, quiet, strict=True)
        ]
        for stream in streams:
            await stream.began.wait()
        with _stopped(cluster, "decode-0"):
            await cluster.wait_until(
                "it is lost", lambda report: _worker(report, "decode-0") is None
            )
            with pytest.raises(ClusterError, match=r"503.*no decode worker is ready"):
                await cluster.ask(PATH, quiet[1].body)
    assert [task.result() for task in running] == [None, None, None]
    await _check_return(cluster, quiet, before)


async def test_prompts_of_a_prefill_worker_that_stops_for_long_go_on_once_it_is_back_as_another(
    cluster: Cluster, quiet: list[Undisturbed]
) -> None:
    before = await _incarnation(cluster, "prefill-0")
    stream = OpenStream(cluster)
    async with asyncio.TaskGroup() as group:
        handed_over = group.create_task(stream.run(PATH, _long(quiet[0])))
        await cluster.wait_until("it decodes", _is_decoding)
        with _stopped(cluster, "prefill-0"):
            waiting = group.create_task(quiet[1].ask_again(cluster.ask, is_stream=False))
            await cluster.wait_until(
                "it is lost", lambda report: _worker(report, "prefill-0") is None
            )
            await stream.goes_on()
            handed_over.cancel()
            with pytest.raises(ClusterError, match=r"503.*no prefill worker is ready"):
                await cluster.ask(PATH, quiet[1].body)
        assert await waiting is None
    await _check_return(cluster, quiet, before)


async def test_a_client_that_leaves_while_nobody_serves_its_stream_leaves_nothing(
    cluster: Cluster, quiet: list[Undisturbed]
) -> None:
    before = await _incarnation(cluster, "decode-0")
    stream = OpenStream(cluster)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(stream.run(PATH, _long(quiet[0])))
        await stream.began.wait()
        with _stopped(cluster, "decode-0"):
            await cluster.wait_until(
                "it is lost", lambda report: _worker(report, "decode-0") is None
            )
            running.cancel()
            await cluster.wait_until("its stream is gone", lambda report: not _num_streams(report))
    await _check_return(cluster, quiet, before)


@contextmanager
def _stopped(cluster: Cluster, name: str) -> Iterator[None]:
    cluster.signal(name, signal.SIGSTOP)
    try:
        yield
    finally:
        cluster.signal(name, signal.SIGCONT)


def _is_decoding(report: StatusReport) -> bool:
    worker = _worker(report, "decode-0")
    return worker is not None and worker.load is not None and worker.load.num_decoding > 0


def _num_streams(report: StatusReport) -> int:
    return sum(gateway.num_streams for gateway in report.gateways)


@dataclass(frozen=True, slots=True)
class _Incarnation:
    """A worker as it is now, and how often it was fenced so far."""

    worker: WorkerStatus
    num_fenced: int


async def _incarnation(cluster: Cluster, name: str) -> _Incarnation:
    worker = await cluster.worker(name)
    assert worker is not None
    return _Incarnation(worker, _num_fenced(cluster, name))


def _num_fenced(cluster: Cluster, name: str) -> int:
    log = read_log_folder(cluster.log_dir)
    return sum((entry.process, entry.event) == (name, "fenced") for entry in log)


async def _check_return(cluster: Cluster, quiet: list[Undisturbed], before: _Incarnation) -> None:
    """Wait until the worker is back as another incarnation that works."""
    name, epoch = before.worker.id, before.worker.epoch

    def is_back(report: StatusReport) -> bool:
        worker = _worker(report, name)
        return worker is not None and worker.epoch != epoch and worker.kv is not None

    await cluster.wait_until(f"{name} is back with a new epoch", is_back)
    await cluster.wait_ready()
    again = (request.ask_again(cluster.ask, is_stream=False) for request in quiet)
    assert await asyncio.gather(*again) == [None] * len(quiet)
    await cluster.wait_idle()
    assert _num_fenced(cluster, name) == before.num_fenced + 1
