"""One agent for all streams of one side, and its end and renewal where a read cannot be ended.

Nothing but the end of the agent keeps the bytes of a read that was begun from arriving. So a read
that neither ends nor fails takes the agent with it, and all reads that are under way for other
peers: they fail, and whoever needs it next connects to a new agent with a new registration.
"""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from common.errors import TransferError
from common.transfer.rdma_agent import Piece, RdmaAgent, Read, SourcePool

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Remote:
    """A peer as one generation of the agent knows it."""

    generation: int
    name: str


@dataclass(frozen=True, slots=True)
class SharedRead:
    """A read that one generation of the agent has begun."""

    generation: int
    read: Read


class SharedAgent:
    """Calls may come from any thread; one is in the agent at a time, and none of them waits."""

    def __init__(self, make: Callable[[], RdmaAgent]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._agent: RdmaAgent | None = None
        self._generation = 0
        self._users: Counter[str] = Counter()
        self._is_closed = False

    def open(self) -> bytes:
        """Return the agent's metadata; TransferError where there is none and none can be made."""
        with self._lock:
            return self._opened().metadata

    def is_of_now(self, remote: Remote) -> bool:
        """Whether the agent that knows this peer lives."""
        with self._lock:
            return self._agent is not None and remote.generation == self._generation

    def connect(self, metadata: bytes) -> Remote:
        """Take a peer's metadata; every call needs its ``forget``."""
        with self._lock:
            name = self._opened().connect(metadata)
            self._users[name] += 1
            return Remote(self._generation, name)

    def forget(self, remote: Remote) -> None:
        """Let go of a peer, once nobody uses it any more."""
        with self._lock:
            if self._agent is None or remote.generation != self._generation:
                return
            self._users[remote.name] -= 1
            if not self._users[remote.name]:
                del self._users[remote.name]
                self._agent.forget(remote.name)

    def read(self, remote: Remote, source: SourcePool, pieces: Sequence[Piece]) -> SharedRead:
        """Begin to read pieces from a peer's memory."""
        with self._lock:
            agent = self._agent_of(remote.generation)
            return SharedRead(remote.generation, agent.read(remote.name, source, pieces))

    def is_done(self, shared: SharedRead) -> bool:
        """Whether all of a read is there; TransferError when no more of it will come."""
        with self._lock:
            self._agent_of(shared.generation)
            return shared.read.is_done()

    def progress(self) -> None:
        """Do our part of what peers do with our memory."""
        with self._lock:
            if self._agent is not None:
                self._agent.progress()

    def abandon(self, generation: int, reason: str) -> None:
        """End the agent of that generation, and with it all that was begun."""
        with self._lock:
            if self._agent is None or generation != self._generation:
                return
            log.error("rdma_agent_ended", num_peers=len(self._users), reason=reason)
            self._end()

    def close(self) -> None:
        """End the agent for good; a second call does nothing."""
        with self._lock:
            self._is_closed = True
            if self._agent is not None:
                self._end()

    def _opened(self) -> RdmaAgent:
        if self._is_closed:
            raise TransferError("the pool is not offered any more")
        if self._agent is None:
            self._generation += 1
            self._agent = self._make()
        return self._agent

    def _agent_of(self, generation: int) -> RdmaAgent:
        if self._agent is None or generation != self._generation:
            raise TransferError("the agent was ended")
        return self._agent

    def _end(self) -> None:
        agent, self._agent = self._agent, None
        self._users.clear()
        if agent is not None:
            agent.close()
