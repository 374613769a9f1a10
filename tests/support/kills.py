"""Clients that ask without a pause, and a killer of workers."""

import asyncio
import os
import random
import signal

from common.messages.admin import StatusReport, WorkerStatus
from common.messages.fields import WorkerState
from tests.support.served import RefusedError, Served, ServedClient
from tests.support.undisturbed import Undisturbed

COMPLETED_SECONDS = 60.0
SEED = 7


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
