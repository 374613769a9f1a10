"""One link of limited rate that the threads of a process share."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Condition
from time import monotonic

from common.traffic.arbiter import LinkArbiter, Ticket, TrafficClass

QUANTUM_SECONDS = 0.005
"""How long one quantum takes, and so model traffic waits for KV traffic at most."""


@dataclass(frozen=True, slots=True)
class LinkStats:
    """What has passed a link since it was made. Bytes count when their transfer is over."""

    model_bytes: int = 0
    kv_bytes: int = 0
    model_wait_seconds: float = 0.0
    """Seconds that model traffic was held up here, added up over all transfers."""
    kv_wait_seconds: float = 0.0
    busy_seconds: float = 0.0
    """Seconds in which a transfer, or several at a time, were under way, until now: of two
    snapshots, its difference by the time between them is how far the link was used."""


class SharedLink:
    """Makes transfers wait as they would at a link of ``bytes_per_second``; 0 lets all pass.

    May be called from any thread. It moves nothing itself: whoever moves bytes does so inside of
    ``passing``, and both together take as long as the slower of them.
    """

    def __init__(self, bytes_per_second: int, clock: Callable[[], float] = monotonic) -> None:
        self.bytes_per_second = bytes_per_second
        self._clock = clock
        self._arbiter: LinkArbiter | None = None
        if bytes_per_second:
            quantum = max(1, int(bytes_per_second * QUANTUM_SECONDS))
            self._arbiter = LinkArbiter(bytes_per_second, quantum, quantum)
        self._changed = Condition()
        self._bytes = dict.fromkeys(TrafficClass, 0)
        self._wait_seconds = dict.fromkeys(TrafficClass, 0.0)
        self._num_open = 0
        self._busy_since = 0.0
        self._busy_seconds = 0.0

    @contextmanager
    def passing(self, num_bytes: int, traffic_class: TrafficClass) -> Iterator[None]:
        """Begin to pass so many bytes, and at the end of the block wait until they have passed.

        An exception is not held up. Passes in quanta, so that a transfer of a better class
        overtakes one that has begun.
        """
        ticket = self._offer(num_bytes, traffic_class)
        try:
            yield
            waited = 0.0 if ticket is None else self._wait(ticket)
            with self._changed:
                self._bytes[traffic_class] += num_bytes
                self._wait_seconds[traffic_class] += waited
        finally:
            self._end()

    def transfer(self, num_bytes: int, traffic_class: TrafficClass) -> float:
        """Wait until so many bytes have passed; return the seconds that it took."""
        began = self._clock()
        with self.passing(num_bytes, traffic_class):
            pass
        return self._clock() - began

    def stats(self) -> LinkStats:
        """Return the counts of now."""
        with self._changed:
            since = self._clock() - self._busy_since if self._num_open else 0.0
            return LinkStats(
                model_bytes=self._bytes[TrafficClass.MODEL],
                kv_bytes=self._bytes[TrafficClass.KV],
                model_wait_seconds=self._wait_seconds[TrafficClass.MODEL],
                kv_wait_seconds=self._wait_seconds[TrafficClass.KV],
                busy_seconds=self._busy_seconds + since,
            )

    def lift(self) -> None:
        """Limit nothing any more and let all pass that waits: an ending process waits for none."""
        with self._changed:
            self._arbiter = None
            self._changed.notify_all()

    def wait_idle(self, timeout_seconds: float) -> bool:
        """Wait until no transfer is under way; return whether that came in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._num_open == 0, timeout_seconds)

    def _offer(self, num_bytes: int, traffic_class: TrafficClass) -> Ticket | None:
        with self._changed:
            now = self._clock()
            if self._num_open == 0:
                self._busy_since = now
            self._num_open += 1
            if self._arbiter is None:
                return None
            self._arbiter.advance(now)
            return self._arbiter.offer(traffic_class, num_bytes, now)

    def _end(self) -> None:
        with self._changed:
            self._num_open -= 1
            if self._num_open == 0:
                self._busy_seconds += self._clock() - self._busy_since
                self._changed.notify_all()

    def _wait(self, ticket: Ticket) -> float:
        """Wait until a ticket has passed; return the seconds waited."""
        with self._changed:
            began = now = self._clock()
            while self._arbiter is not None:
                self._arbiter.advance(now)
                until = self._arbiter.next_at if ticket.passed_at is None else ticket.passed_at
                if until <= now:
                    break
                self._changed.wait(until - now)
                now = self._clock()
            return now - began
