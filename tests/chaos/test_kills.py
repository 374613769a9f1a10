"""``kill -9`` of workers under load, with ``flowpath serve`` starting them again."""

import asyncio
from pathlib import Path

import pytest

from common.messages.admin import StatusReport
from common.messages.fields import WorkerState
from common.telemetry.story import read_log_folder
from tests.support.kills import Killer, Load
from tests.support.prompts import Encode
from tests.support.served import client_of, leftovers, serving
from tests.support.undisturbed import greedy_bodies, run_quietly

pytestmark = [pytest.mark.chaos, pytest.mark.e2e]

NUM_KILLS = 4
NUM_SOAK_KILLS = 20
NUM_LANES = 8
BLOCK_SIZE = 16
NUM_BLOCKS = 96
BLOCK_BYTES = BLOCK_SIZE * 30 * 2 * 3 * 64 * 4
LENGTHS = (12, 50, 120, 200, 33, 80)
MAX_TOKENS = 24
NUM_WORKERS = 4
SETTINGS = {
    "prefill": NUM_WORKERS // 2,
    "decode": NUM_WORKERS // 2,
    "dtype": "float32",
    "block_size": BLOCK_SIZE,
    "kv_bytes": NUM_BLOCKS * BLOCK_BYTES,
    "max_num_batched_tokens": 64,
}


def _all_ready(report: StatusReport) -> bool:
    num_ready = sum(worker.state is WorkerState.READY for worker in report.workers)
    return num_ready == NUM_WORKERS and report.num_requests == 0  # in whatever roles


def _is_idle(report: StatusReport) -> bool:
    return _all_ready(report) and all(
        worker.kv is not None and not worker.kv.referenced and not worker.kv.in_transfer
        for worker in report.workers
    )


async def test_kills_of_workers_are_felt_by_no_client_and_leak_nothing(
    model_folder: Path, encode: Encode
) -> None:
    await _kill_under_load(model_folder, encode, NUM_KILLS)


@pytest.mark.soak
@pytest.mark.timeout(1800)
async def test_20_kills_of_workers_are_felt_by_no_client_and_leak_nothing(
    model_folder: Path, encode: Encode
) -> None:
    await _kill_under_load(model_folder, encode, NUM_SOAK_KILLS)


async def _kill_under_load(model_folder: Path, encode: Encode, num_kills: int) -> None:
    async with serving({**SETTINGS, "model": str(model_folder)}) as served:
        async with client_of(served) as client:
            await served.wait_until("all are ready", _all_ready)
            bodies = greedy_bodies(encode, LENGTHS, MAX_TOKENS, first=50_000)
            quiet = await run_quietly(client.ask, bodies)
            load, killer = Load(client, quiet), Killer(served)
            async with asyncio.TaskGroup() as group:
                for place in range(NUM_LANES):
                    group.create_task(load.lane(place))
                for _ in range(num_kills):
                    await killer.kill_one()
                    # Requests go on to be served while workers start again.
                    await load.completes_one()
                load.is_over = True

            resumed = [
                e for e in read_log_folder(served.settings.log_dir) if e.event == "request_resumed"
            ]
            print(
                f"{num_kills} kills: {load.num_completed} answers, {len(resumed)} requests went on "
                f"elsewhere, {load.num_refused} refused; wrong {load.wrong}"
            )
            assert load.wrong == []
            assert load.failures == []
            assert len(resumed) >= num_kills // 4, "the kills met too few requests"
            assert load.num_completed > num_kills

            report = await served.wait_until("all is idle again", _is_idle)
            for worker in report.workers:
                assert worker.kv is not None
                assert worker.kv.total == worker.kv.free + worker.kv.cached, worker.id
            again = (request.ask_again(client.ask, is_stream=True) for request in quiet)
            assert await asyncio.gather(*again) == [None] * len(quiet)
            assert (await client.http.get("/health")).status_code == 200
        held = served.footprint()
        assert len(held.memory_files) == NUM_WORKERS
        served.interrupt()
        assert await served.ended() == 0
        assert leftovers(served.settings, held) == []
