"""``kill -9`` of workers under load, with ``flowpath serve`` starting them again."""

import asyncio
import os
import random
import signal
from pathlib import Path

import pytest

from common.messages.admin import StatusReport, WorkerStatus
from common.messages.fields import WorkerState
from common.telemetry.story import read_log_folder
from tests.support.prompts import Encode
from tests.support.served import (
    RefusedError,
    Served,
    ServedClient,
    client_of,
    leftovers,
    serving,
)
from tests.support.undisturbed import Undisturbed, greedy_bodies, run_quietly

pytestmark = [pytest.mark.chaos, pytest.mark.e2e]

SEED = 7
NUM_KILLS = 4
NUM_SOAK_KILLS = 20
NUM_LANES = 8
BLOCK_SIZE = 16
NUM_BLOCKS = 96
BLOCK_BYTES = BLOCK_SIZE * 30 * 2 * 3 * 64 * 4
LENGTHS = (12, 50, 120, 200, 33, 80)
MAX_TOKENS = 24
COMPLETED_SECONDS = 60.0
NUM_WORKERS = 4
SETTINGS = {
    "prefill": NUM_WORKERS // 2,
    "decode": NUM_WORKERS // 2,
    "dtype": "float32",
    "block_size": BLOCK_SIZE,
    "kv_bytes": NUM_BLOCKS * BLOCK_BYTES,
    "max_num_batched_tokens": 64,
}


class Load:
    """Clients that ask without a pause. Refused ones (no worker at all) ask again."""

    def __init__(self, client: ServedClient, quiet: list[Undisturbed]) -> None:
        self.num_completed = 0
        self.wrong: list[str] = []
        self.failures: list[str] = []
        self.num_refused = 0
        self.is_over = False
        self.completed = asyncio.Event()
        self._client = client
        self._quiet = quiet

    async def lane(self, place: int) -> None:
        """Ask one after the other until it is over."""
        number = place
        while not self.is_over:
            number += 1
            request = self._quiet[number % len(self._quiet)]
            try:
                wrong = await request.ask_again(self._client.ask, is_stream=number % 2 == 0)
            except RefusedError as error:
                if error.code == "no_worker":
                    self.num_refused += 1
                    await self._until_something_completes()
                else:
                    self.failures.append(str(error))
                continue
            self.num_completed += 1
            self.completed.set()
            if wrong is not None:
                self.wrong.append(wrong)

    async def completes_one(self) -> None:
        """Wait until one more request has completed. TimeoutError at the deadline."""
        self.completed.clear()
        async with asyncio.timeout(COMPLETED_SECONDS):
            await self.completed.wait()

    async def _until_something_completes(self) -> None:
        self.completed.clear()
        try:
            async with asyncio.timeout(0.2):
                await self.completed.wait()
        except TimeoutError:
            return


class Killer:
    """Kills workers that are ready, most of the time ones whose role another still serves."""

    def __init__(self, served: Served) -> None:
        self.num_kills = 0
        self._served = served
        self._random = random.Random(SEED)
        self._epochs: set[int] = set()

    async def kill_one(self) -> None:
        """Wait for a worker that may be killed, and kill it."""
        needs_twin = self.num_kills % 5 != 4

        def victims(report: StatusReport) -> list[WorkerStatus]:
            ready = [
                worker
                for worker in report.workers
                if worker.state is WorkerState.READY
                and worker.kv is not None
                and worker.epoch not in self._epochs
            ]
            return [
                worker
                for worker in ready
                if not needs_twin or sum(other.role is worker.role for other in ready) > 1
            ]

        report = await self._served.wait_until("a victim", lambda report: bool(victims(report)))
        victim = self._random.choice(victims(report))
        self._epochs.add(victim.epoch)
        self.num_kills += 1
        os.kill(victim.pid, signal.SIGKILL)


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
            for request in quiet:
                assert await request.ask_again(client.ask, is_stream=True) is None
            assert (await client.http.get("/health")).status_code == 200
        held = served.footprint()
        assert len(held.memory_files) == NUM_WORKERS
        served.interrupt()
        assert await served.ended() == 0
        assert leftovers(served.settings, held) == []
