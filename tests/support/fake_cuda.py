"""GPUs whose memory is numpy arrays, for the logic around CUDA: a double of ``CudaDriver``.

Queues do their work in ``wait`` and not before, so that whoever does not wait sees nothing done.
"""

import ctypes
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import flowpath_native
import numpy as np
import torch
from numpy.typing import NDArray

from common.cuda.driver import (
    IPC_HANDLE_BYTES,
    BlockCopies,
    Copy,
    CudaError,
    CudaQueue,
    PieceCopies,
)
from common.cuda.handles import OpenedHandles

GIB = 2**30
ODD_OFFSET = 512
"""Allocations begin here modulo 4096, as CUDA's small ones may."""


@dataclass(slots=True)
class FakeGpus:
    """The GPUs of one host, which all processes share."""

    num_devices: int = 2
    free_bytes: int = GIB
    peers: bool = True
    link_gigabytes_per_second: float = 1e-9
    exported: dict[bytes, tuple[str, NDArray[np.uint8]]] = field(default_factory=dict)

    def process(self, visible: Sequence[int] | None = None) -> "FakeDriver":
        """Return the driver of a process that sees these GPUs, in this order."""
        return FakeDriver(self, list(range(self.num_devices)) if visible is None else list(visible))


class FakeDriver:
    """One process's CUDA. ``calls`` holds what was asked for, in order."""

    def __init__(self, gpus: FakeGpus, visible: list[int]) -> None:
        self._gpus = gpus
        self._visible = visible
        self._memory: dict[int, NDArray[np.uint8]] = {}
        self._next = 0x10000 + ODD_OFFSET
        self._handles = OpenedHandles(self._map, self._unmap)
        self.calls: list[str] = []
        self.peers_enabled: set[tuple[int, int]] = set()
        self.failing: set[str] = set()
        """Calls, by the first word of their entry in ``calls``, that fail."""

    @property
    def num_mappings(self) -> int:
        """Allocations of the own process and mappings of others' memory."""
        return len(self._memory)

    def note(self, call: str) -> None:
        """Keep a call; CudaError when it is to fail."""
        self.calls.append(call)
        if call.split(maxsplit=1)[0] in self.failing:
            raise CudaError(f"{call}: the test says so")

    def bytes_at(self, address: int, num_bytes: int) -> NDArray[np.uint8]:
        """Return a view of memory; CudaError for an address outside of every mapping."""
        for start, memory in self._memory.items():
            if start <= address and address + num_bytes <= start + len(memory):
                return memory[address - start : address - start + num_bytes]
        raise CudaError(f"illegal address {address:#x}, {num_bytes} bytes")

    def num_devices(self) -> int:
        return len(self._visible)

    def device_uuid(self, device: int) -> str:
        return f"GPU-{self._visible[device]:032x}"

    def memory_bytes(self, device: int) -> tuple[int, int]:
        return self._gpus.free_bytes, 2 * self._gpus.free_bytes

    def allocate(self, device: int, num_bytes: int) -> int:
        self.note(f"allocate {device}")
        return self._add(np.zeros(num_bytes, dtype=np.uint8))

    def free(self, device: int, address: int) -> None:
        self.note(f"free {device}")
        del self._memory[address]

    def export_memory(self, device: int, address: int) -> bytes:
        handle = secrets.token_bytes(IPC_HANDLE_BYTES)
        self._gpus.exported[handle] = self.device_uuid(device), self._memory[address]
        return handle

    def open_memory(self, device: int, handle: bytes) -> int:
        return self._handles.open(device, handle)

    def close_memory(self, device: int, handle: bytes) -> None:
        self._handles.close(device, handle)

    def pin(self, device: int, address: int, num_bytes: int) -> None:
        self.note(f"pin {device}")
        memory = (ctypes.c_uint8 * num_bytes).from_address(address)
        self._memory[address] = np.frombuffer(memory, dtype=np.uint8)

    def unpin(self, address: int) -> None:
        self.note("unpin")
        del self._memory[address]

    def can_access_peer(self, device: int, peer: int) -> bool:
        return self._gpus.peers

    def enable_peer_access(self, device: int, peer: int) -> None:
        self.peers_enabled.add((device, peer))

    def peer_gigabytes_per_second(self, device: int, peer_uuid: str) -> float:
        return self._gpus.link_gigabytes_per_second

    def tensor(self, device: int, address: int, num_bytes: int) -> torch.Tensor:
        return torch.from_numpy(self.bytes_at(address, num_bytes))

    def queue(self, device: int) -> CudaQueue:
        self.note(f"queue {device}")
        return FakeQueue(self)

    def _map(self, device: int, handle: bytes) -> int:
        self.note(f"map {device}")
        if handle not in self._gpus.exported:
            raise CudaError("invalid handle")
        device_uuid, memory = self._gpus.exported[handle]
        if device_uuid != self.device_uuid(device) and not self._gpus.peers:
            raise CudaError("peer access is not supported between these two devices")
        return self._add(memory)

    def _unmap(self, device: int, address: int) -> None:
        self.note(f"unmap {device}")
        del self._memory[address]

    def _add(self, memory: NDArray[np.uint8]) -> int:
        address = self._next
        self._next += (len(memory) // 4096 + 2) * 4096
        self._memory[address] = memory
        return address


class FakeQueue:
    """Keeps work until it is waited for."""

    def __init__(self, driver: FakeDriver) -> None:
        self._driver = driver
        self._pending: list[Callable[[], None]] = []
        self._sums = np.empty(0, dtype=np.uint64)

    def copy(self, copies: Sequence[Copy]) -> None:
        for copy in copies:
            self._driver.note(f"copy {copy[2]}")
            self._pending.append(partial(self._copy, *copy))

    def copy_blocks(self, copies: BlockCopies, *, num_ctas: int = 0) -> None:
        self._driver.note(f"copy_blocks {len(copies.source_ids)} ctas {num_ctas}")
        self._pending.append(lambda: self._copy_blocks(copies))

    def copy_pieces(self, copies: PieceCopies, *, num_ctas: int = 0) -> None:
        self._driver.note(f"copy_pieces {len(copies.source_ids)} ctas {num_ctas}")
        self._pending.append(lambda: self._copy_pieces(copies))

    def checksum_blocks(self, source: int, block_ids: NDArray[np.int32], block_bytes: int) -> None:
        self._driver.note(f"checksum_blocks {len(block_ids)}")
        self._pending.append(lambda: self._checksum(source, block_ids, block_bytes))

    def wait(self, *, is_long: bool) -> NDArray[np.uint64]:
        self._driver.note("wait")
        for work in self._pending:
            work()
        self._pending.clear()
        sums, self._sums = self._sums, np.empty(0, dtype=np.uint64)
        return sums

    def copy_seconds(self, copies: Sequence[Copy]) -> float:
        for copy in copies:
            self._driver.note("copy_seconds")
            self._copy(*copy)
        return 1.0

    def close(self) -> None:
        self._driver.note("close")

    def _copy(self, target: int, source: int, num_bytes: int) -> None:
        self._driver.bytes_at(target, num_bytes)[:] = self._driver.bytes_at(source, num_bytes)

    def _copy_blocks(self, copies: BlockCopies) -> None:
        size = copies.block_bytes
        self._checksum(copies.source, copies.source_ids, size)
        for source, target in zip(
            copies.source_ids.tolist(), copies.target_ids.tolist(), strict=True
        ):
            self._copy(copies.target + target * size, copies.source + source * size, size)

    def _copy_pieces(self, copies: PieceCopies) -> None:
        source, target = (
            self._driver.bytes_at(address, (int(ids.max()) + 1) * size)
            for address, ids, size in (
                (copies.source, copies.source_ids, copies.source_block_bytes),
                (copies.target, copies.target_ids, copies.target_block_bytes),
            )
        )
        self._sums = flowpath_native.copy_pieces(
            *(target, source, copies.target_ids, copies.source_ids),
            pieces=copies.pieces,
            rest=copies.rest,
            src_block_bytes=copies.source_block_bytes,
            dst_block_bytes=copies.target_block_bytes,
        )

    def _checksum(self, source: int, block_ids: NDArray[np.int32], size: int) -> None:
        blocks = [
            self._driver.bytes_at(source + block * size, size) for block in block_ids.tolist()
        ]
        self._sums = np.array(
            [flowpath_native.checksum(block) for block in blocks], dtype=np.uint64
        )
