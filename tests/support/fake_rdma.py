"""RDMA between agents of one process, over memory of the host, with its manners and its faults.

As with NIXL, what was begun ends with its agent alone: forgetting the peer or giving a request up
keeps no byte from arriving later. A peer that is gone fails what is read from it.
"""

import ctypes
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from common.errors import TransferError
from common.kv.pool import KVPool
from common.transfer.rdma import RdmaBackend, RdmaLink
from common.transfer.rdma_agent import Piece, RdmaLibrary, SourcePool
from common.transfer.rdma_export import RdmaExport, open_rdma
from common.transfer.rdma_memory import RdmaMemory
from tests.support.data_stream import wait_until
from tests.support.pool_side import PoolSide

PORT_RATE = 25.0
STALL_SECONDS = 20.0


class FakeFabric:
    """What joins agents. Requests move when they are looked at, or when ``resume`` is called."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.agents: dict[str, FakeAgent] = {}
        self.requests: list[int] = []
        """Pieces of each request that was begun."""
        self.num_agents = 0
        self.num_moved = 0
        self.num_allowed: int | None = None
        """Requests that may still move; None: any number."""
        self.is_failing = False
        """Whether the next request fails when it is looked at."""
        self.why_no_agent = ""
        self.needs_progress = False
        """Whether nothing moves but after the source's turn, as without an adapter."""
        self.can_close = True
        self._under_way: list[FakeRead] = []

    def hold(self, num_allowed: int = 0) -> None:
        """Let so many more requests move, and then none."""
        with self.lock:
            self.num_allowed = num_allowed

    def resume(self) -> None:
        """Let everything that is under way arrive, whoever still waits for it."""
        with self.lock:
            self.num_allowed = None
            for read in list(self._under_way):
                read.move()

    def wait_until_moved(self, count: int) -> None:
        wait_until(lambda: self.num_moved >= count)

    @property
    def num_under_way(self) -> int:
        return len(self._under_way)

    def begin(self, read: "FakeRead") -> None:
        with self.lock:
            self.requests.append(len(read.pieces))
            self._under_way.append(read)

    def may_move(self) -> bool:
        if self.num_allowed is None:
            return True
        if not self.num_allowed:
            return False
        self.num_allowed -= 1
        return True

    def over(self, read: "FakeRead") -> None:
        if read in self._under_way:
            self._under_way.remove(read)

    def end(self, agent: "FakeAgent") -> None:
        self.agents.pop(agent.name, None)
        self._under_way = [read for read in self._under_way if read.reader is not agent]


class FakeRead:
    """One request."""

    def __init__(self, reader: "FakeAgent", source: str, pieces: Sequence[Piece]) -> None:
        self.reader = reader
        self.pieces = list(pieces)
        self._source = source
        self._error = ""
        self._is_done = False
        self._fabric = reader.fabric
        self._turns = reader.fabric.agents[source].num_turns

    def is_done(self) -> bool:
        with self._fabric.lock:
            if self._is_done:
                return True
            self._error = self._error or self._why_failed()
            if self._error:
                self._fabric.over(self)
                raise TransferError(self._error)
            source = self._fabric.agents[self._source]
            has_had_turn = not self._fabric.needs_progress or source.num_turns > self._turns
            if has_had_turn and self._fabric.may_move():
                self.move()
            return self._is_done

    def move(self) -> None:
        for to, at, num_bytes in self.pieces:
            ctypes.memmove(to, at, num_bytes)
        self._is_done = True
        self._fabric.num_moved += 1
        self._fabric.over(self)

    def _why_failed(self) -> str:
        if self._source not in self._fabric.agents:
            return "the peer is gone"
        if self._fabric.is_failing:
            self._fabric.is_failing = False
            return "the link broke"
        return ""


class FakeAgent:
    """One party."""

    def __init__(self, fabric: FakeFabric, memory: RdmaMemory) -> None:
        self.fabric = fabric
        self.memory = memory
        self.num_turns = 0
        self._peers: set[str] = set()
        with fabric.lock:
            if fabric.why_no_agent:
                raise TransferError(fabric.why_no_agent)
            fabric.num_agents += 1
            self.name = f"agent-{fabric.num_agents}"
            fabric.agents[self.name] = self

    @property
    def metadata(self) -> bytes:
        return self.name.encode()

    def connect(self, metadata: bytes) -> str:
        name = metadata.decode()
        if name not in self.fabric.agents:
            raise TransferError(f"there is no {name}")
        self._peers.add(name)
        return name

    def forget(self, name: str) -> None:
        self._peers.discard(name)

    def read(self, name: str, source: SourcePool, pieces: Sequence[Piece]) -> FakeRead:
        with self.fabric.lock:
            if name not in self._peers or name not in self.fabric.agents:
                raise TransferError("the peer is not known")
            for to, at, num_bytes in pieces:
                assert is_registered(self.memory, to, num_bytes), "not into registered memory"
                assert is_registered(self.fabric.agents[name].memory, at, num_bytes)
            read = FakeRead(self, name, pieces)
            self.fabric.begin(read)
            return read

    def progress(self) -> None:
        self.num_turns += 1

    def close(self) -> None:
        with self.fabric.lock:
            if not self.fabric.can_close:
                raise RuntimeError("the agent does not end")
            self.fabric.end(self)


def is_registered(memory: RdmaMemory, address: int, num_bytes: int) -> bool:
    return any(
        start <= address and address + num_bytes <= start + length
        for start, length in memory.regions
    )


@dataclass(frozen=True)
class FakeLibrary:
    """Agents of one fabric. ``port_rate`` 0 is a host without an adapter."""

    fabric: FakeFabric
    memory: RdmaMemory
    port_rate: float = PORT_RATE

    def new_agent(self) -> FakeAgent:
        return FakeAgent(self.fabric, self.memory)


@dataclass(frozen=True)
class RdmaWorker(PoolSide):
    """Both sides of the transport, and the pool."""

    pool: KVPool
    export: RdmaExport
    backend: RdmaBackend

    def link_to(self, peer: "RdmaWorker") -> RdmaLink:
        return self.backend.open_peer(peer.export.handle())


@contextmanager
def rdma_worker(
    pool: KVPool, library: RdmaLibrary, memory: RdmaMemory, stall_seconds: float = STALL_SECONDS
) -> Iterator[RdmaWorker]:
    """A worker with an empty pool, closed afterwards."""
    export, backend = open_rdma(pool, library, memory, stall_seconds, host="127.0.0.1")
    worker = RdmaWorker(pool, export, backend)
    worker.empty()
    yield worker
    export.close()
    wait_until(lambda: export.num_streams == 0)
    pool.close()


@contextmanager
def fake_worker(
    fabric: FakeFabric,
    num_blocks: int,
    block_bytes: int,
    *,
    stall_seconds: float = STALL_SECONDS,
    port_rate: float = PORT_RATE,
) -> Iterator[RdmaWorker]:
    """A worker on a fake fabric."""
    pool = KVPool(num_blocks, block_bytes)
    memory = RdmaMemory.of_pool(pool)
    with rdma_worker(pool, FakeLibrary(fabric, memory, port_rate), memory, stall_seconds) as worker:
        yield worker
