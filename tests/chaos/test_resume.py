"""A decode worker dies in the middle of its streams, which go on elsewhere."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from common.messages.admin import StatusReport
from common.telemetry.story import read_log_folder
from tests.support.cluster import ClusterOptions, running_cluster
from tests.support.undisturbed import greedy_bodies, run_quietly

pytestmark = [pytest.mark.chaos, pytest.mark.e2e]

LENGTHS = (9, 40, 77, 150)
MAX_TOKENS = 48
NUM_STREAMS = 8


def _is_decoding(report: StatusReport) -> bool:
    return any(
        worker.id == "decode-0" and worker.load is not None and worker.load.num_decoding > 1
        for worker in report.workers
    )


async def test_streams_of_a_killed_decode_worker_end_as_if_nothing_had_been(
    model_folder: Path, encode: Callable[[str], list[int]]
) -> None:
    options = ClusterOptions(model_folder, num_decode=2, settings={"max_resumes": 2})
    async with running_cluster(options) as cluster:
        bodies = greedy_bodies(encode, LENGTHS, MAX_TOKENS, first=70_000)
        quiet = await run_quietly(cluster.ask, bodies)
        async with asyncio.TaskGroup() as group:
            asked = [
                group.create_task(
                    quiet[place % len(quiet)].ask_again(cluster.ask, is_stream=place % 2 == 0)
                )
                for place in range(NUM_STREAMS)
            ]
            await cluster.wait_until("decode-0 decodes", _is_decoding)
            await cluster.kill("decode-0")
        assert [task.result() for task in asked] == [None] * NUM_STREAMS
        events = [entry.event for entry in read_log_folder(cluster.log_dir)]
        assert "request_resumed" in events
        await cluster.restart("decode-0")
        for name, counts in (await cluster.wait_idle()).items():
            assert (counts.referenced, counts.in_transfer) == (0, 0), name
