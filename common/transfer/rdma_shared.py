"""One agent for all streams of one side, and its end and renewal where a read cannot be ended.

Nothing but the end of the agent keeps the bytes of a read that was begun from arriving, and a read
that has failed may still have parts under way. So such a read takes the agent with it: whoever
comes next connects to a new agent with a registration of its own, reads for other peers that are
under way may end on the old one, and then it is closed.
"""

import threading
from collections import Counter
from collections.abc import Callable, Sequence

import structlog

from common.errors import TransferError
from common.transfer.rdma_agent import Piece, RdmaAgent, Read, SourcePool

log = structlog.get_logger()

SPARE_SECONDS = 2.0
"""How long an agent that must end waits for reads that still move."""


class _Tenure:
    """One agent, from its making to its end. Its lock is held while anybody is in the agent."""

    def __init__(self, agent: RdmaAgent) -> None:
        self.agent = agent
        self.metadata = agent.metadata
        self.changed = threading.Condition()
        self.users: Counter[str] = Counter()
        self.moving: set[SharedRead] = set()
        self.is_retired = False
        self.is_closed = False

    def refuse_closed(self) -> None:
        if self.is_closed:
            raise TransferError("the agent was ended")

    def close(self) -> None:
        """End the agent; the lock is held."""
        if not self.is_closed:
            self.agent.close()
            self.is_closed = True
            self.moving.clear()
            self.changed.notify_all()


class Remote:
    """A peer as one agent knows it."""

    def __init__(self, tenure: _Tenure, name: str) -> None:
        self._tenure = tenure
        self._name = name

    @property
    def is_current(self) -> bool:
        """Whether new work may be begun: the agent is not about to end."""
        return not self._tenure.is_retired

    def read(self, source: SourcePool, pieces: Sequence[Piece]) -> "SharedRead":
        """Begin to read pieces from the peer's memory."""
        tenure = self._tenure
        with tenure.changed:
            tenure.refuse_closed()
            shared = SharedRead(tenure, tenure.agent.read(self._name, source, pieces))
            tenure.moving.add(shared)
            return shared

    def end(self, reads: "Sequence[SharedRead]") -> None:
        """Return when no byte of reads from the peer comes any more: the agent is closed."""
        tenure = self._tenure
        with tenure.changed:
            if tenure.is_closed:
                return
            log.error("rdma_agent_ended", num_peers=len(tenure.users))
            tenure.is_retired = True
            tenure.moving.difference_update(reads)
            tenure.changed.notify_all()
            tenure.changed.wait_for(lambda: tenure.is_closed or not tenure.moving, SPARE_SECONDS)
            tenure.close()

    def forget(self) -> None:
        """Let go of the peer, once nobody uses it any more."""
        tenure, name = self._tenure, self._name
        with tenure.changed:
            tenure.users[name] -= 1
            if not tenure.users[name]:
                del tenure.users[name]
                if not tenure.is_closed:
                    tenure.agent.forget(name)


class SharedRead:
    """A read that was begun."""

    def __init__(self, tenure: _Tenure, read: Read) -> None:
        self._tenure = tenure
        self._read = read

    def is_done(self) -> bool:
        """Whether all of it is there; TransferError when it failed, and may still be under way."""
        tenure = self._tenure
        with tenure.changed:
            tenure.refuse_closed()
            is_done = self._read.is_done()
            if is_done:
                tenure.moving.discard(self)
                tenure.changed.notify_all()
            return is_done


class SharedAgent:
    """Calls may come from any thread; one is in an agent at a time. None waits for a peer."""

    def __init__(self, make: Callable[[], RdmaAgent]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._tenure: _Tenure | None = None
        self._is_closed = False

    def open(self) -> bytes:
        """Return the agent's metadata; TransferError where there is none and none can be made."""
        return self._opened().metadata

    def connect(self, metadata: bytes) -> Remote:
        """Take a peer's metadata; every call needs its ``Remote.forget``."""
        tenure = self._opened()
        with tenure.changed:
            tenure.refuse_closed()
            name = tenure.agent.connect(metadata)
            tenure.users[name] += 1
            return Remote(tenure, name)

    def progress(self) -> None:
        """Do our part of what peers do with our memory."""
        tenure = self._opened()
        with tenure.changed:
            tenure.refuse_closed()
            tenure.agent.progress()

    def close(self) -> None:
        """End the agent for good; a second call does nothing."""
        with self._lock:
            self._is_closed = True
            tenure, self._tenure = self._tenure, None
        if tenure is not None:
            with tenure.changed:
                tenure.is_retired = True
                tenure.close()

    def _opened(self) -> _Tenure:
        with self._lock:
            if self._is_closed:
                raise TransferError("the pool is not offered any more")
            if self._tenure is None or self._tenure.is_retired:
                self._tenure = _Tenure(self._make())
            return self._tenure
