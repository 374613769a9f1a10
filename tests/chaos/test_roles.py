"""Roles that change for minutes, by hand and by load, under requests that must not feel it.

Every answer is compared with that of one combined worker.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from itertools import count, pairwise
from pathlib import Path
from time import monotonic

import pytest

from common.ids import WorkerId
from common.messages.admin import OrderRole, StatusReport, WorkerStatus
from common.messages.fields import Role
from common.telemetry.story import LogEntry, read_log_folder
from services.cli.admin import give_order
from tests.support.answers import Json
from tests.support.prompts import Encode
from tests.support.served import Served, ServedClient, client_of, serving
from tests.support.undisturbed import Undisturbed, greedy_bodies, run_quietly

pytestmark = [pytest.mark.soak, pytest.mark.e2e, pytest.mark.timeout(1800)]

BLOCK_SIZE = 16
LENGTHS = (40, 200, 90, 330, 150, 260)
MAX_TOKENS = 24
NUM_LANES = 6
ANSWER_SECONDS = 60.0
NUM_SWITCHES = 100
SWITCHED_SECONDS = 1.0
"""So soon is the new role's work accepted."""
WAVE_SECONDS, NUM_WAVES = 60.0, 10
WAVE_LANES = 8
MAX_SWITCHES = 2
"""In one wave."""
PREFILL_HEAVY = ((600, 900, 750, 820), 2)
DECODE_HEAVY = ((20, 30, 25, 40), 160)
"""Prompt lengths and output of the two halves of a wave, in tokens."""


class Lanes:
    """Clients that ask without a pause, each comparing every answer with its quiet run."""

    def __init__(self, client: ServedClient, quiet: Sequence[Undisturbed]) -> None:
        self.wrong: list[str] = []
        self.num_answers = 0
        self._answered = asyncio.Event()
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
            self._answered.set()
            if wrong is not None:
                self.wrong.append(wrong)

    async def answer_one(self) -> None:
        """Wait for one more answer. TimeoutError when none comes."""
        self._answered.clear()
        async with asyncio.timeout(ANSWER_SECONDS):
            await self._answered.wait()


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


async def _told_by_combined(
    model: Path, *groups: Sequence[Json], **settings: object
) -> list[list[Undisturbed]]:
    """Return what one combined worker answers to each group of requests, one after the other."""
    values = {"model": str(model), "dtype": "float32", "combined": True, **settings}
    async with serving(values) as served, client_of(served) as client:
        return [await run_quietly(client.ask, bodies) for bodies in groups]


def _is_idle(report: StatusReport) -> bool:
    return report.num_requests == 0 and all(
        worker.kv is not None and worker.kv.total == worker.kv.free + worker.kv.cached
        for worker in report.workers
    )


async def _switch_back_and_forth(served: Served, lanes: Lanes) -> list[float]:
    """Switch workers ``NUM_SWITCHES`` times, with an answer or more between two of them.

    Returns how long each took to be confirmed.
    """
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
        await lanes.answer_one()
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
    bodies = greedy_bodies(encode, LENGTHS, MAX_TOKENS, first=700_000)
    (quiet,) = await _told_by_combined(model_folder, bodies, block_size=BLOCK_SIZE)
    async with serving(settings) as served, client_of(served) as client:
        await served.wait_until("four workers", lambda report: len(report.workers) == 4)
        lanes = Lanes(client, quiet)
        async with loaded(lanes, NUM_LANES):
            taken = await _switch_back_and_forth(served, lanes)
        print(
            f"{NUM_SWITCHES} switches, the slowest confirmed after {max(taken):.2f} s; "
            f"{lanes.num_answers} answers, {len(lanes.wrong)} wrong"
        )
        assert lanes.wrong == []
        assert lanes.num_answers >= NUM_SWITCHES
        assert max(taken) < SWITCHED_SECONDS
        await served.wait_until("nothing is held", _is_idle)
        assert not _failures(read_log_folder(served.settings.log_dir))


def _role_counts(workers: Sequence[WorkerStatus]) -> Counter[str]:
    return Counter(str(worker.role) for worker in workers)


def _failures(log: Sequence[LogEntry]) -> list[LogEntry]:
    return [e for e in log if e.event in ("request_failed", "request_resumed", "stream_failed")]


def _num_in_each(times: Sequence[str], starts: Sequence[str]) -> list[int]:
    """Count the times between each start and the next one, and after the last."""
    ends = [*starts, datetime.max.replace(tzinfo=UTC).isoformat()]
    return [sum(first <= time < last for time in times) for first, last in pairwise(ends)]


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
    groups = [
        greedy_bodies(encode, lengths, output, first=800_000 + 50_000 * place)
        for place, (lengths, output) in enumerate((PREFILL_HEAVY, DECODE_HEAVY))
    ]
    halves = await _told_by_combined(model_folder, *groups)
    async with serving(settings) as served, client_of(served) as client:
        await served.wait_until("four workers", lambda report: len(report.workers) == 4)
        never, starts, num_answers = asyncio.Event(), list[str](), 0
        for wave in range(NUM_WAVES):
            starts.append(datetime.now(UTC).isoformat())
            for quiet in halves:
                lanes = Lanes(client, quiet)
                async with loaded(lanes, WAVE_LANES):
                    await _pass(WAVE_SECONDS / 2, never)
                assert lanes.wrong == [], f"wave {wave}"
                num_answers += lanes.num_answers
        report = await served.wait_until("nothing is held", _is_idle)
        assert set(_role_counts(report.workers)) == {"prefill", "decode"}
        log = read_log_folder(served.settings.log_dir)
        switches = _num_in_each([e.ts for e in log if e.event == "role_ordered"], starts)
        print(
            f"{NUM_WAVES} waves: {num_answers} answers, switches in each {switches}, at the end "
            f"{dict(_role_counts(report.workers))}"
        )
        assert max(switches) <= MAX_SWITCHES
        assert not _failures(log)


async def _pass(seconds: float, never: asyncio.Event) -> None:
    try:
        async with asyncio.timeout(seconds):
            await never.wait()
    except TimeoutError:
        return
