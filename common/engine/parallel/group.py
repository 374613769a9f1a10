"""Rank 0's view of the other ranks: it orders, they report, and a loss is a loss for good.

One thread listens to all of them. It is the first to know that a rank is gone, and calls ``let_go``
then, which lets rank 0 out of an operation that waits for that rank. ``part`` is for a quiet end.
"""

import selectors
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import TypeVar

import structlog

from common.engine.failure import EngineBroken
from common.engine.parallel.messages import (
    ComputeStep,
    Joined,
    Order,
    PoolMade,
    RankFailed,
    Report,
    StepDone,
)
from common.engine.parallel.process import RankProcess
from common.engine.parallel.wire import Array, Ended, pack_arrays
from common.errors import RemoteProtocolError

log = structlog.get_logger()

STEP_SECONDS = 120.0
"""How long a step, or its taking by a rank, may last."""
LOOK_SECONDS = 0.5
"""How often deadlines are looked at."""
STOPPED_SECONDS = 3.0
"""How long a rank's process may be stopped, as by SIGSTOP."""
REASON_SECONDS = 2.0
"""How long a failed operation waits for the reason: usually that a rank has ended."""

LIBRARY_ERRORS = (RuntimeError, ValueError, IndexError, MemoryError)
"""What the engine's libraries raise in a step that was found well-formed."""

AnswerT = TypeVar("AnswerT", PoolMade, Joined)


class RankGroup:
    """The ranks 1 to N - 1. All but ``close`` and ``broken`` raise EngineBroken after a loss."""

    def __init__(
        self, num_ranks: int, let_go: Callable[[], None], part: Callable[[], None]
    ) -> None:
        """Start the processes.

        One of the two is called, once: ``let_go`` at a loss, from any thread, or ``part`` at the
        end, where no step is under way.
        """
        self._let_go = let_go
        self._part = part
        self._changed = threading.Condition()
        self._reason: str | None = None
        self._deadline: float | None = None
        self._is_closed = False
        self._answers: dict[int, list[Report]] = {rank: [] for rank in range(1, num_ranks)}
        self._num_done = dict.fromkeys(self._answers, 0)
        self._stopped_since: dict[int, float] = {}
        self._processes: list[RankProcess] = []
        try:
            for rank in self._answers:
                self._processes.append(RankProcess(rank, STEP_SECONDS))
        except OSError:
            self._kill_all()
            raise
        self._listener = threading.Thread(target=self._listen, name="ranks", daemon=True)
        self._listener.start()

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes of ranks 1, 2, ..."""
        return tuple(process.pid for process in self._processes)

    @property
    def broken(self) -> str | None:
        """Why the engine is broken; None while it is not."""
        return self._reason

    def order(self, make: Callable[[int], Order]) -> None:
        """Send every rank the order that is made for its number."""
        for process in self._processes:
            self._send(process, make(process.rank), None)

    def answers(self, kind: type[AnswerT], seconds: float) -> list[AnswerT]:
        """Wait for every rank's answer, of this kind; return them in the order of the ranks."""
        with self._changed:
            self._wait(lambda: all(self._answers.values()), seconds, kind.__name__)
            found = [answers.pop(0) for answers in self._answers.values()]
        typed = [answer for answer in found if isinstance(answer, kind)]
        if len(typed) < len(found):
            raise self.fail(f"a rank answered {found}, not {kind.__name__}")
        return typed

    def start_step(self, number: int, arrays: Sequence[Array | None]) -> None:
        """Have every rank compute a batch; steps are numbered from 0."""
        specs, payload = pack_arrays(arrays)
        step = ComputeStep(number=number, arrays=specs)
        for process in self._processes:
            self._send(process, step, payload)

    def finish_step(self, number: int) -> None:
        """Wait until every rank has computed the step."""
        with self._changed:
            self._wait(
                lambda: min(self._num_done.values(), default=number + 1) > number,
                STEP_SECONDS,
                f"step {number}",
            )

    def check(self) -> None:
        """Raise EngineBroken if it is."""
        if self._reason is not None:
            raise EngineBroken(self._reason)

    @contextmanager
    def watched(self, doing: str, seconds: float | None = None) -> Iterator[None]:
        """Do something with the others: errors of the libraries and too long a time are a loss.

        Nobody knows then which rank waits for what. ``seconds`` are those of a step by default.
        """
        self.check()
        self._deadline = monotonic() + (STEP_SECONDS if seconds is None else seconds)
        try:
            yield
        except EngineBroken:
            raise
        except LIBRARY_ERRORS as error:
            with self._changed:  # the reason is worth waiting for
                self._changed.wait_for(lambda: self._reason is not None, REASON_SECONDS)
            raise self.fail(f"{doing} failed: {error}") from error
        finally:
            self._deadline = None
        self.check()

    def fail(self, reason: str) -> EngineBroken:
        """Break the engine for good, unless it is; return what to raise."""
        with self._changed:
            is_first = self._reason is None
            if self._reason is None:
                self._reason = f"the tensor-parallel engine is broken: {reason}"
            self._changed.notify_all()
            told = self._reason
        if is_first:
            log.error("engine_broken", reason=reason)
            self._let_go()
            self._kill_all()
        return EngineBroken(told)

    def close(self) -> None:
        """End all ranks and wait for them; a second call does nothing."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            was_broken = self._reason is not None
            self._reason = self._reason or "the tensor-parallel engine is closed"
            self._changed.notify_all()
        for process in self._processes:
            process.close()
        self._listener.join()
        if not was_broken:
            self._part()

    # ---- inside ----------------------------------------------------------------------------------

    def _send(self, process: RankProcess, order: Order, payload: bytes | None) -> None:
        self.check()
        try:
            process.wire.send(order, payload)
        except TimeoutError as error:
            raise self.fail(f"rank {process.rank} takes no orders") from error
        except OSError as error:
            raise self.fail(process.describe_end()) from error

    def _wait(self, is_there: Callable[[], bool], seconds: float, what: str) -> None:
        """Wait with the condition held; EngineBroken when it comes first."""
        self._changed.wait_for(lambda: self._reason is not None or is_there(), seconds)
        self.check()
        if not is_there():
            raise self.fail(f"{what}: a rank has not answered in {seconds:g} s")

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector:
            for process in self._processes:
                selector.register(process.wire, selectors.EVENT_READ, process)
            while not self._is_closed:
                for key, _ in selector.select(LOOK_SECONDS):
                    if not self._take(key.data):
                        selector.unregister(key.fileobj)
                self._look_for_stopped()
                deadline = self._deadline
                if deadline is not None and monotonic() > deadline:
                    self.fail("a rank does not come to the end of a step")

    def _look_for_stopped(self) -> None:
        now = monotonic()
        for process in self._processes:
            if not process.is_stopped:
                self._stopped_since.pop(process.rank, None)
            elif now - self._stopped_since.setdefault(process.rank, now) > STOPPED_SECONDS:
                self.fail(f"rank {process.rank} (process {process.pid}) is stopped")

    def _take(self, process: RankProcess) -> bool:
        """Take one report; tell whether more may come."""
        try:
            report, _ = process.wire.receive()
        except (Ended, OSError):
            if not self._is_closed:
                self.fail(process.describe_end())
            return False
        except RemoteProtocolError as error:
            self.fail(f"rank {process.rank} says what is no report: {error}")
            return False
        if isinstance(report, RankFailed):
            self.fail(f"rank {process.rank} failed: {report.reason}")
            return False
        with self._changed:
            if isinstance(report, StepDone):
                self._num_done[process.rank] = report.number + 1
            else:
                self._answers[process.rank].append(report)
            self._changed.notify_all()
        return True

    def _kill_all(self) -> None:
        for process in self._processes:
            process.kill()
