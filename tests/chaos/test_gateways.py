"""Gateways that lose their controller, or are taken for dead, keep their streams."""

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from common.messages.admin import StatusReport
from common.telemetry.story import read_log_folder
from tests.support.answers import Json
from tests.support.cluster import CONTROLLER, GATEWAY, Cluster, ClusterOptions, running_cluster
from tests.support.open_stream import OpenStream
from tests.support.prompts import Encode
from tests.support.undisturbed import Undisturbed, greedy_bodies, run_quietly

pytestmark = [pytest.mark.chaos, pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

PATH = "/v1/completions"
SETTINGS = {"heartbeat_seconds": 0.1, "death_seconds": 0.6, "roles": "manual"}
"""A silent process that runs is dead after 3 s."""
LONG_TOKENS = 4000


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(model_folder: Path) -> AsyncIterator[Cluster]:
    options = ClusterOptions(model_folder, kv_bytes=256 * 2**20, settings=SETTINGS)
    async with running_cluster(options) as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def quiet(cluster: Cluster, encode: Encode) -> list[Undisturbed]:
    bodies = greedy_bodies(encode, (20, 45), 64, first=70_000)
    return await run_quietly(cluster.ask, bodies)


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
    assert [task.result() for task in running] == [None, None]
    await cluster.wait_idle()


async def test_a_stream_whose_worker_dies_with_the_controller_goes_on_without_long_silence(
    cluster: Cluster, quiet: list[Undisturbed]
) -> None:
    stream = OpenStream(cluster)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(quiet[0].ask_again(stream.run, is_stream=True))
        await stream.began.wait()
        await cluster.kill(CONTROLLER)
        await cluster.kill("decode-0")
        cluster.start(CONTROLLER)
        cluster.start("decode-0")
    assert running.result() is None
    log = read_log_folder(cluster.log_dir)
    reasons = [str(entry.fact("reason")) for entry in log if entry.event == "request_resumed"]
    assert reasons
    assert not any("nothing was heard" in reason for reason in reasons), reasons
    await cluster.wait_ready()
    await cluster.wait_idle()


async def test_decodes_that_lost_their_gateway_and_their_controller_end(
    cluster: Cluster, quiet: list[Undisturbed]
) -> None:
    stream = OpenStream(cluster)

    async def is_cut(body: Json) -> bool:
        try:
            await stream.run(PATH, body)
        except (httpx.RemoteProtocolError, httpx.ReadError):
            return True
        return False

    async with asyncio.TaskGroup() as group:
        body = {**quiet[0].body, "max_tokens": LONG_TOKENS}
        running = group.create_task(is_cut(body))
        await stream.began.wait()
        await cluster.wait_until("it decodes", lambda report: _num_decoding(report) > 0)
        for name in (CONTROLLER, GATEWAY):
            await cluster.kill(name)
        for name in (CONTROLLER, GATEWAY):
            cluster.start(name)
    assert running.result()
    await cluster.wait_ready()
    await cluster.wait_until("nobody decodes", lambda report: not _num_decoding(report))
    await cluster.wait_idle()


def _num_decoding(report: StatusReport) -> int:
    return sum(worker.load.num_decoding for worker in report.workers if worker.load)
