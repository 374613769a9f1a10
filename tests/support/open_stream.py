"""A streamed completion that is under way, and when its events came."""

import asyncio
from time import monotonic

from tests.support.answers import Answer, Json, events_of, gather_stream
from tests.support.cluster import Cluster, ClusterError

STEP_SECONDS = 10.0


class OpenStream:
    """A streamed completion that is under way."""

    def __init__(self, cluster: Cluster) -> None:
        self.began = asyncio.Event()
        self.times: list[float] = []
        """When it was asked for, and when each event came, on our clock."""
        self._arrived = asyncio.Event()
        self._cluster = cluster

    def gap_at(self, moment: float, since: float) -> float:
        """Return the seconds without an event about a moment, counted from ``since`` at most."""
        before = [time for time in self.times if time <= moment]
        after = [time for time in self.times if time > moment]
        return min(after) - max([*before, since]) if after else 0.0

    async def goes_on(self) -> None:
        """Wait for one more event. TimeoutError when none comes."""
        self._arrived.clear()
        async with asyncio.timeout(STEP_SECONDS):
            await self._arrived.wait()

    async def run(self, path: str, body: Json) -> Answer:
        """Read to the end. ClusterError for a refusal, ValueError for an error in the stream."""
        self.times.append(monotonic())
        async with self._cluster.stream(path, body) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode()
                raise ClusterError(f"{response.status_code} {text}")
            events = []
            async for event in events_of(response):
                events.append(event)
                self.times.append(monotonic())
                self.began.set()
                self._arrived.set()
        return gather_stream(events, response.headers["x-request-id"])
