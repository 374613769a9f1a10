"""Requests whose controller died before their decode was placed, or with their decode worker."""

import asyncio
from pathlib import Path

import pytest

from common.messages.admin import StatusReport
from common.telemetry.story import read_log_folder
from tests.support.cluster import CONTROLLER, Cluster, ClusterOptions, running_cluster

pytestmark = [pytest.mark.chaos, pytest.mark.e2e]

PATH = "/v1/completions"
KV_BYTES = 14 * 2_949_120
"""Fourteen blocks of 64 tokens in float32: three prompts and their answers fill them."""
NUM_REQUESTS = 7
DEADLINE_SECONDS = 100.0


def _waits_for_room(report: StatusReport) -> bool:
    """Whether prompts are whole on the prefill side and no handoff of theirs is open."""
    prefill = next(worker for worker in report.workers if worker.id == "prefill-0")
    if prefill.kv is None or prefill.load is None:
        return False
    load = prefill.load
    is_quiet = not (load.num_waiting or load.num_prefilling or load.num_sending)
    return is_quiet and prefill.kv.in_transfer > 0


async def _ask(cluster: Cluster, number: int) -> int:
    body = {
        "model": cluster.model_name,
        "prompt": [(number * 7919 + place * 31) % 40_000 + 100 for place in range(200)],
        "max_tokens": 60,
        "ignore_eos": True,
        "temperature": 0,
    }
    response = await cluster.client.post(PATH, json=body, timeout=DEADLINE_SECONDS)
    return response.status_code


WITH_ITS_DECODE_WORKER = pytest.param(
    ("decode-0",), id="with its decode worker", marks=pytest.mark.soak
)
"""Only long silence tells a gateway of a worker that died with the controller."""


@pytest.mark.parametrize("also", [pytest.param((), id="alone"), WITH_ITS_DECODE_WORKER])
async def test_requests_of_a_controller_that_died_are_placed_by_the_next_and_leak_nothing(
    model_folder: Path, also: tuple[str, ...]
) -> None:
    options = ClusterOptions(model_folder, kv_bytes=KV_BYTES, settings={"roles": "manual"})
    async with running_cluster(options) as cluster, asyncio.TaskGroup() as group:
        asked = [group.create_task(_ask(cluster, number)) for number in range(NUM_REQUESTS)]
        await cluster.wait_until("prompts wait for room", _waits_for_room, 60.0)
        for name in (CONTROLLER, *also):
            await cluster.kill(name)
        for name in (CONTROLLER, *also):
            cluster.start(name)
        await cluster.wait_ready()
        async with asyncio.timeout(DEADLINE_SECONDS):
            codes = await asyncio.gather(*asked)
        assert codes == [200] * NUM_REQUESTS
        events = [entry.event for entry in read_log_folder(cluster.log_dir)]
        assert "request_resumed" in events, "the kill came too late to mean anything"
        assert await _ask(cluster, NUM_REQUESTS) == 200, "the next request works"
        await cluster.wait_idle()
