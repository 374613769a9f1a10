"""300 clients that leave at every phase, beside others that must not feel it."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from time import monotonic

import httpx
import pytest

from common.telemetry.story import LogEntry, read_log_folder
from tests.support.answers import Json, events_of
from tests.support.cluster import Cluster, ClusterOptions, running_cluster
from tests.support.prompts import Encode, exact_prompt
from tests.support.undisturbed import Undisturbed, greedy_bodies, run_quietly

pytestmark = [pytest.mark.chaos, pytest.mark.e2e]

SEED = 20
NUM_CROWDED = 264
NUM_CROWDED_LANES = 14
"""Clients at a time: their prompts are more than the pools hold, so most of them queue."""
NUM_LONG = 36
NUM_LONG_LANES = 2
LONG_TOKENS = 320
"""A prompt of ten steps that does not queue: cancels meet its chunks in flight."""
NUM_QUIET_LANES = 2
BLOCK_SIZE = 16
NUM_BLOCKS = 40
TOKEN_BYTES = 30 * 2 * 3 * 64 * 4
QUIET_LENGTHS = (9, 40, 77, 150)
PATH = "/v1/completions"

OPTIONS = {
    "max_num_batched_tokens": 32,  # prompts take many steps: cancels meet chunks in flight
    "max_num_seqs": 32,
}


Job = Callable[[], Coroutine[None, None, None]]


class Disturbers:
    """Clients that leave, each in its own way; the same ones in every run."""

    def __init__(self, cluster: Cluster, encode: Encode) -> None:
        self._cluster = cluster
        self._encode = encode
        self._random = random.Random(SEED)
        self.ends: Counter[str] = Counter()

    def long(self, prefill_seconds: float) -> list[Job]:
        """Return clients that leave while their prompts are computed, or just after."""

        def job(number: int) -> Job:
            prompt = exact_prompt("long", LONG_TOKENS, first=100_000 + 100 * number)
            body = {"prompt": prompt.token_ids(self._encode), "max_tokens": 4, "temperature": 0}
            seconds = 1.2 * prefill_seconds * self._random.random()
            return lambda: self._note(self._leaves_within(body, seconds))

        return [job(number) for number in range(NUM_LONG)]

    def crowded(self) -> list[Job]:
        """Return clients of every kind."""
        ways = [
            self._leaves_after_some_events,
            self._leaves_after_some_events,
            self._leaves_before_an_answer,
            self._gives_up_waiting,
            self._stops_choices,
        ]
        return [self._client(ways[number % len(ways)], number) for number in range(NUM_CROWDED)]

    async def _note(self, client: Coroutine[None, None, str]) -> None:
        self.ends[await client] += 1

    def _client(self, way: Callable[[Json, float], Coroutine[None, None, str]], number: int) -> Job:
        draw = self._random
        # A third of the prompts begin alike, so that cancelled ones leave and find prefixes.
        first = 0 if number % 3 == 0 else 10 * number
        prompt = exact_prompt("left", draw.choice((5, 20, 40, 80, 160)), first=first)
        body: Json = {
            "prompt": prompt.token_ids(self._encode),
            "max_tokens": draw.randint(1, 16),
            "temperature": 1,
            "seed": number,
            "n": draw.choice((1, 1, 2, 3)),
            "ignore_eos": True,
        }
        share = draw.random()
        return lambda: self._note(way(body, share))

    async def _leaves_after_some_events(self, body: Json, share: float) -> str:
        num_events = int(share * body["n"] * body["max_tokens"])
        async with self._cluster.stream(PATH, body) as response:
            if response.status_code != 200:
                return await _refused(response)
            async for _ in events_of(response):
                num_events -= 1
                if num_events <= 0:
                    return "left in the stream"
        return "finished"

    async def _leaves_before_an_answer(self, body: Json, share: float) -> str:
        return await self._leaves_within(body, 0.5 * share**2)

    async def _leaves_within(self, body: Json, seconds: float) -> str:
        try:
            async with asyncio.timeout(seconds), self._cluster.stream(PATH, body) as response:
                if response.status_code != 200:
                    return await _refused(response)
                return "left with the first byte"
        except TimeoutError:
            return "left before an answer"

    async def _gives_up_waiting(self, body: Json, share: float) -> str:
        try:
            response = await self._cluster.client.post(
                PATH, json={"model": self._cluster.model_name, **body}, timeout=0.02 + 2 * share
            )
        except httpx.TimeoutException:
            return "gave up waiting"
        return "finished" if response.status_code == 200 else await _refused(response)

    async def _stops_choices(self, body: Json, share: float) -> str:
        body = {**body, "n": 1 + int(3 * share), "stop": ["e", " "], "max_tokens": 16}
        answer = await self._cluster.ask(PATH, body)
        assert len(answer.choices) == body["n"]
        assert all(choice.finish_reason in ("stop", "length") for choice in answer.choices)
        return "stopped by strings"


async def _refused(response: httpx.Response) -> str:
    await response.aread()
    raise AssertionError(f"{response.status_code}: {response.text}")


async def _run_lanes(jobs: Iterable[Job], num_lanes: int) -> None:
    waiting = iter(jobs)

    async def lane() -> None:
        for job in waiting:
            await job()

    async with asyncio.TaskGroup() as group:
        for _ in range(num_lanes):
            group.create_task(lane())


async def _repeat(cluster: Cluster, quiet: list[Undisturbed], is_over: asyncio.Event) -> list[str]:
    """Ask for the undisturbed ones until the disturbers are through; return what differs."""
    wrong: list[str | None] = []
    while not is_over.is_set() or len(wrong) < len(quiet):
        request = quiet[len(wrong) % len(quiet)]
        wrong.append(await request.ask_again(cluster.ask, is_stream=len(wrong) % 2 == 0))
    return [difference for difference in wrong if difference is not None]


def phases_of_cancels(entries: Iterable[LogEntry]) -> Counter[str]:
    """Count in which phase each cancelled request met its first cancel on a worker."""
    phases: dict[object, str] = {}
    cancelled: dict[object, str] = {}
    steps = {
        ("prefill-0", "request_received"): "waiting",
        ("prefill-0", "prefill_started"): "prefilling",
        ("prefill-0", "prefill_finished"): "sending",
        ("decode-0", "handoff_accepted"): "decoding",
    }
    for entry in entries:
        request = entry.fact("request_id")
        phases[request] = steps.get((entry.process, entry.event), phases.get(request, "unknown"))
        if entry.event == "cancel_received" and entry.fact("choice") is None:
            cancelled.setdefault(request, phases[request])
    return Counter(cancelled.values())


async def test_300_cancels_at_every_phase_leak_nothing_and_disturb_nobody(
    model_folder: Path, encode: Encode
) -> None:
    options = ClusterOptions(
        model_folder,
        kv_bytes=NUM_BLOCKS * BLOCK_SIZE * TOKEN_BYTES,
        block_size=BLOCK_SIZE,
        settings=OPTIONS,
    )
    async with running_cluster(options) as cluster:
        quiet = await run_quietly(
            cluster.ask, greedy_bodies(encode, QUIET_LENGTHS, 12, first=50_000)
        )
        disturbers = Disturbers(cluster, encode)
        started = monotonic()
        await cluster.ask(PATH, greedy_bodies(encode, (LONG_TOKENS,), 1, first=90_000)[0])
        await _run_lanes(disturbers.long(monotonic() - started), NUM_LONG_LANES)
        is_over = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            beside = [
                group.create_task(_repeat(cluster, quiet[lane::NUM_QUIET_LANES], is_over))
                for lane in range(NUM_QUIET_LANES)
            ]
            await _run_lanes(disturbers.crowded(), NUM_CROWDED_LANES)
            is_over.set()

        assert [task.result() for task in beside] == [[]] * NUM_QUIET_LANES
        assert disturbers.ends.total() == NUM_LONG + NUM_CROWDED == 300
        for name, counts in (await cluster.wait_idle()).items():
            assert (counts.referenced, counts.in_transfer) == (0, 0), name
            assert counts.total == NUM_BLOCKS == counts.free + counts.cached, name
        entries = read_log_folder(cluster.log_dir)
        phases = phases_of_cancels(entries)
        assert set(phases) >= {"waiting", "prefilling", "sending", "decoding"}, phases
        assert any(entry.event == "reserve_refused" for entry in entries)
        assert [entry for entry in entries if entry.level in ("error", "critical")] == []
