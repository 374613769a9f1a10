"""Roles that change for minutes, by hand and by load, under requests that must not feel it."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from time import monotonic

import pytest

from common.ids import WorkerId
from common.messages.admin import OrderRole, StatusReport, WorkerStatus
from common.messages.fields import Role
from common.telemetry.story import read_log_folder
from services.cli.admin import give_order
from tests.support.prompts import Encode
from tests.support.served import Served, ServedClient, client_of, serving
from tests.support.undisturbed import Undisturbed, greedy_bodies, run_quietly

pytestmark = [pytest.mark.soak, pytest.mark.e2e, pytest.mark.timeout(1800)]

BLOCK_SIZE = 16
LENGTHS = (40, 200, 90, 330, 150, 260)
MAX_TOKENS = 24
NUM_LANES = 6
NUM_SWITCHES = 100
SWITCHED_SECONDS = 1.0
"""So soon is the new role's work accepted."""
WAVE_SECONDS, NUM_WAVES = 60.0, 10
WAVE_LANES = 8
PREFILL_HEAVY = ((600, 900, 750, 820), 2)
DECODE_HEAVY = ((20, 30, 25, 40), 160)
"""Prompt lengths and output of the two halves of a wave, in tokens."""


class Lanes:
    """Clients that ask without a pause, each comparing every answer with its quiet run."""

    def __init__(self, client: ServedClient, quiet: Sequence[Undisturbed]) -> None:
        self.wrong: list[str] = []
        self.num_answers = 0
        self._client = client
        self._quiet = quiet
        self._numbers = count()

    async def run(self, until: asyncio.Event) -> None:
        """Ask until the event is set; a refusal or an error is raised."""
        while not until.is_set():
            number = next(self._numbers)
            request = self._quiet[number % len(self._quiet)]
            wrong = await request.ask_again(self._client.ask, is_stream=number % 2 == 0)
            self.num_answers += 1
            if wrong is not None:
                self.wrong.append(wrong)


@asynccontextmanager
async def loaded(lanes: Lanes, num_lanes: int) -> AsyncIterator[None]:
    """Keep ``num_lanes`` clients asking as long as the block."""
    is_over = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for _ in range(num_lanes):
            group.create_task(lanes.run(is_over))
        try:
            yield
        finally:
            is_over.set()


def _is_idle(report: StatusReport) -> bool:
    return report.num_requests == 0 and all(
        worker.kv is not None and not worker.kv.referenced and not worker.kv.in_transfer
        for worker in report.workers
    )


async def _switch_back_and_forth(served: Served) -> list[float]:
    """Switch workers ``NUM_SWITCHES`` times; return how long each took to be confirmed."""
    taken: list[float] = []
    for number in range(NUM_SWITCHES):
        name = ("prefill-1", "decode-1")[number // 2 % 2]
        role = (Role.DECODE, Role.PREFILL)[number % 2 ^ (name == "decode-1")]

        def has_role(report: StatusReport, name: str = name, role: Role = role) -> bool:
            return any(
                w.id == name and w.role is role and not w.is_switching for w in report.workers
            )

        began = monotonic()
        await give_order(served.settings, OrderRole(worker_id=WorkerId(name), role=role))
        await served.wait_until(f"{name} is {role}", has_role)
        taken.append(monotonic() - began)
    return taken


async def test_100_switches_under_load_are_felt_by_nobody_and_leak_nothing(
    model_folder: Path, encode: Encode
) -> None:
    settings = {
        "prefill": 2,
        "decode": 2,
        "threads": 1,
        "dtype": "float32",
        "roles": "manual",
        "block_size": BLOCK_SIZE,
        "max_num_batched_tokens": 64,
        "model": str(model_folder),
    }
    async with serving(settings) as served, client_of(served) as client:
        await served.wait_until("four workers", lambda report: len(report.workers) == 4)
        bodies = greedy_bodies(encode, LENGTHS, MAX_TOKENS, first=700_000)
        quiet = await run_quietly(client.ask, bodies)
        lanes = Lanes(client, quiet)
        async with loaded(lanes, NUM_LANES):
            taken = await _switch_back_and_forth(served)
        print(
            f"{NUM_SWITCHES} switches, the slowest confirmed after {max(taken):.2f} s; "
            f"{lanes.num_answers} answers, {len(lanes.wrong)} wrong"
        )
        assert lanes.wrong == []
        assert lanes.num_answers > NUM_LANES
        assert max(taken) < SWITCHED_SECONDS
        await served.wait_until("nothing is held", _is_idle)


def _role_counts(workers: Sequence[WorkerStatus]) -> Counter[str]:
    return Counter(str(worker.role) for worker in workers)


async def test_a_square_wave_of_load_causes_at_most_two_switches_a_wave(
    model_folder: Path, encode: Encode
) -> None:
    settings = {
        "prefill": 2,
        "decode": 2,
        "threads": 1,
        "roles": "auto",
        "model": str(model_folder),
        "dtype": "float32",
        "kv_bytes": 512 * 2**20,
    }
    async with serving(settings) as served, client_of(served) as client:
        await served.wait_until("four workers", lambda report: len(report.workers) == 4)
        halves = [
            await run_quietly(
                client.ask, greedy_bodies(encode, lengths, output, first=800_000 + 50_000 * place)
            )
            for place, (lengths, output) in enumerate((PREFILL_HEAVY, DECODE_HEAVY))
        ]
        never = asyncio.Event()
        for wave in range(NUM_WAVES):
            for quiet in halves:
                lanes = Lanes(client, quiet)
                async with loaded(lanes, WAVE_LANES):
                    await _pass(WAVE_SECONDS / 2, never)
                assert lanes.wrong == [], f"wave {wave}"
        report = await served.wait_until("nothing is held", _is_idle)
        assert set(_role_counts(report.workers)) == {"prefill", "decode"}
        log = read_log_folder(served.settings.log_dir)
        num_switches = sum(entry.event == "role_ordered" for entry in log)
        print(f"{NUM_WAVES} waves: {num_switches} switches, {_role_counts(report.workers)}")
        assert num_switches <= 2 * NUM_WAVES
        assert not [entry for entry in log if entry.event == "request_failed"]


async def _pass(seconds: float, never: asyncio.Event) -> None:
    try:
        async with asyncio.timeout(seconds):
            await never.wait()
    except TimeoutError:
        return
