"""NCCL between threads of one process, over memory of the host, with its manners and its faults.

As with NCCL a rank's work waits for the other rank's, in order and piece by piece; nothing is told
of a peer that has aborted; and no communicator may be used before it is ready.
"""

import ctypes
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from common.errors import LocalProtocolError, TransferError
from common.kv.pool import KVPool
from common.transfer.nccl_driver import UNIQUE_ID_BYTES, Piece

LIMIT_RATE = 50.0
NUM_UNREADY = 2
"""Looks at a communicator that find it not ready, after each call."""


class AddressedKVPool(KVPool):
    """A pool of the host that has an address, as one on a device has."""

    @property
    def address(self) -> int:
        return int(np.frombuffer(self.buffer, dtype=np.uint8).ctypes.data)


@dataclass(eq=False)
class _Rank:
    """What one rank has handed over, and how far it has come."""

    waiting: list[Piece] = field(default_factory=list)
    num_handed_over: int = 0
    num_moved: int = 0
    is_joined: bool = False
    is_aborted: bool = False


class FakeFabric:
    """What joins ranks. Everything happens under one lock, in the thread that makes it possible."""

    def __init__(self) -> None:
        self.lock = threading.Condition()
        self.num_joined = 0
        """Communicators that were joined by both ranks."""
        self.num_open = 0
        """Ranks that have begun to join and are not aborted."""
        self.most_open = 0
        self.groups: list[int] = []
        """Pieces of each group that was sent."""
        self.num_allowed: int | None = None
        """Pieces that may still move; None: any number."""
        self.can_join = True
        self.can_settle = True
        self.failing: str | None = None
        """The call that fails next: ``join``, ``send`` or ``receive``."""
        self._pairs: dict[bytes, tuple[_Rank, _Rank]] = {}
        self._num_ids = 0

    def new_unique_id(self) -> bytes:
        with self.lock:
            self._num_ids += 1
            return self._num_ids.to_bytes(UNIQUE_ID_BYTES, "little")

    def hold(self, num_allowed: int = 0) -> None:
        """Let so many pieces move, and then none."""
        with self.lock:
            self.num_allowed = num_allowed

    def resume(self) -> None:
        """Let everything move that can."""
        with self.lock:
            self.num_allowed = None
            for pair in self._pairs.values():
                self.move(pair)

    def join(self, unique_id: bytes, rank: int) -> tuple[_Rank, _Rank]:
        with self.lock:
            pair = self._pairs.setdefault(unique_id, (_Rank(), _Rank()))
            if pair[rank].is_joined:
                raise LocalProtocolError(f"rank {rank} has joined already")
            pair[rank].is_joined = True
            self.num_joined += pair[1 - rank].is_joined
            self.num_open += 1
            self.most_open = max(self.most_open, self.num_open)
            return pair

    def move(self, pair: tuple[_Rank, _Rank]) -> None:
        """Move what both ranks have handed over."""
        sender, receiver = pair
        while sender.waiting and receiver.waiting and self.num_allowed != 0:
            if sender.is_aborted or receiver.is_aborted:
                return
            source, target = sender.waiting.pop(0), receiver.waiting.pop(0)
            if source[1] != target[1]:
                raise LocalProtocolError(f"{source[1]} bytes sent, {target[1]} received")
            ctypes.memmove(target[0], source[0], source[1])
            sender.num_moved += 1
            receiver.num_moved += 1
            if self.num_allowed is not None:
                self.num_allowed -= 1
            self.lock.notify_all()

    def wait_until_moved(self, num_pieces: int) -> None:
        """Wait until so many pieces have moved in all."""
        with self.lock:
            assert self.lock.wait_for(lambda: self._num_moved() >= num_pieces, 20)

    def wait_until_waiting(self) -> None:
        """Wait until both ranks of a communicator wait for leave to move."""
        with self.lock:
            assert self.lock.wait_for(
                lambda: any(all(rank.waiting for rank in pair) for pair in self._pairs.values()), 20
            )

    def _num_moved(self) -> int:
        return sum(pair[0].num_moved for pair in self._pairs.values())


class FakeMark:
    """Done with the rank's first so many pieces, or with its abort."""

    def __init__(self, fabric: FakeFabric, rank: _Rank, goal: int) -> None:
        self._fabric = fabric
        self._rank = rank
        self._goal = goal

    def is_done(self) -> bool:
        with self._fabric.lock:
            if self._rank.is_aborted:
                return self._fabric.can_settle
            return self._rank.num_moved >= self._goal


class FakeCommunicator:
    """One rank's end."""

    def __init__(self, fabric: FakeFabric, unique_id: bytes, rank: int) -> None:
        self._fabric = fabric
        self._pair = fabric.join(unique_id, rank)
        self._rank = self._pair[rank]
        self._number = rank
        self._num_looks = 0
        self._is_failed = self._fails("join")

    def is_ready(self) -> bool:
        with self._fabric.lock:
            self._refuse_aborted()
            if self._is_failed:
                raise TransferError("NCCL: unhandled system error")
            if not self._fabric.can_join or not all(rank.is_joined for rank in self._pair):
                return False
            self._num_looks += 1
            return self._num_looks > NUM_UNREADY

    def send(self, pieces: Sequence[Piece]) -> None:
        self._fabric.groups.append(len(pieces))
        self._hand_over("send", 0, pieces)

    def receive(self, pieces: Sequence[Piece]) -> None:
        self._hand_over("receive", 1, pieces)

    def mark(self) -> FakeMark:
        self._refuse_unready()
        return FakeMark(self._fabric, self._rank, self._rank.num_handed_over)

    def abort(self) -> FakeMark:
        with self._fabric.lock:
            if not self._rank.is_aborted:
                self._rank.is_aborted = True
                self._fabric.num_open -= 1
                self._fabric.lock.notify_all()
        return FakeMark(self._fabric, self._rank, 0)

    def _hand_over(self, call: str, number: int, pieces: Sequence[Piece]) -> None:
        self._refuse_unready()
        assert number == self._number, "rank 0 sends, rank 1 receives"
        assert pieces, "an empty group"
        self._num_looks = 0
        self._is_failed = self._fails(call)
        with self._fabric.lock:
            self._rank.waiting += pieces
            self._rank.num_handed_over += len(pieces)
            self._fabric.lock.notify_all()
            self._fabric.move(self._pair)

    def _fails(self, call: str) -> bool:
        with self._fabric.lock:
            if self._fabric.failing != call:
                return False
            self._fabric.failing = None
            return True

    def _refuse_unready(self) -> None:
        if self._num_looks <= NUM_UNREADY:
            raise LocalProtocolError("a communicator was used before it was ready")
        with self._fabric.lock:
            self._refuse_aborted()

    def _refuse_aborted(self) -> None:
        if self._rank.is_aborted:
            raise LocalProtocolError("a communicator was used after its abort")


class FakeScratch:
    """Memory of the host."""

    def __init__(self, num_bytes: int) -> None:
        self._memory = np.zeros(num_bytes, dtype=np.uint8)
        self.address = int(self._memory.ctypes.data)
        self.is_freed = False

    def free(self) -> None:
        assert not self.is_freed, "freed twice"
        self.is_freed = True


class FakeNcclDriver:
    """One worker's way to a fabric."""

    def __init__(self, fabric: FakeFabric, device_uuid: str = "GPU-0") -> None:
        self._fabric = fabric
        self.device_uuid = device_uuid
        self.scratches: list[FakeScratch] = []
        self.has_memory = True

    def new_unique_id(self) -> bytes:
        return self._fabric.new_unique_id()

    def join(self, unique_id: bytes, rank: int) -> FakeCommunicator:
        return FakeCommunicator(self._fabric, unique_id, rank)

    def allocate(self, num_bytes: int) -> FakeScratch:
        if not self.has_memory:
            raise TransferError("the device has no memory left")
        self.scratches.append(FakeScratch(num_bytes))
        return self.scratches[-1]

    def limit_rate(self, peer_uuid: str) -> float:
        assert peer_uuid.startswith("GPU-")
        return LIMIT_RATE
