"""Clients that leave at every phase of their requests."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable

import httpx

from tests.support.answers import Json, events_of
from tests.support.cluster import Cluster
from tests.support.prompts import Encode, exact_prompt

SEED = 20
LONG_TOKENS = 320
"""A prompt of ten steps that does not queue: cancels meet its chunks in flight."""
PATH = "/v1/completions"

Job = Callable[[], Coroutine[None, None, None]]


class Disturbers:
    """Clients that leave, each in its own way; the same ones in every run."""

    def __init__(self, cluster: Cluster, encode: Encode) -> None:
        self._cluster = cluster
        self._encode = encode
        self._random = random.Random(SEED)
        self.ends: Counter[str] = Counter()

    def long(self, count: int, prefill_seconds: float) -> list[Job]:
        """Return clients that leave while their prompts are computed, or just after."""

        def job(number: int) -> Job:
            prompt = exact_prompt("long", LONG_TOKENS, first=100_000 + 100 * number)
            body = {"prompt": prompt.token_ids(self._encode), "max_tokens": 4, "temperature": 0}
            seconds = 1.2 * prefill_seconds * self._random.random()
            return lambda: self._note(self._leaves_within(body, seconds))

        return [job(number) for number in range(count)]

    def crowded(self, numbers: range) -> list[Job]:
        """Return a client for each number, of every kind in turn."""
        ways = [
            self._leaves_after_some_events,
            self._leaves_after_some_events,
            self._leaves_before_an_answer,
            self._gives_up_waiting,
            self._stops_choices,
        ]
        return [self._client(ways[number % len(ways)], number) for number in numbers]

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


async def run_lanes(jobs: Iterable[Job], num_lanes: int) -> None:
    """Run so many jobs at a time until all are done."""
    waiting = iter(jobs)

    async def lane() -> None:
        for job in waiting:
            await job()

    async with asyncio.TaskGroup() as group:
        for _ in range(num_lanes):
            group.create_task(lane())
