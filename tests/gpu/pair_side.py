"""A worker's pool with both sides of a transport between hosts, driven line by line.

``python -m tests.gpu.pair_side TRANSPORT DEVICE NUM_BLOCKS BLOCK_BYTES STALL_SECONDS`` answers each
line of its input, a JSON list of a command and its arguments, with a line of JSON: ``{"is": ...}``,
or ``{"error": ...}`` for a transfer that failed. TRANSPORT is ``nccl`` or ``rdma``. DEVICE is a
GPU's number, or ``host`` for a pool in host memory (with ``nccl`` sockets take NCCL's place).
"""

import json
import sys
import threading
from dataclasses import asdict

import flowpath_native
import numpy as np
import structlog
from numpy.typing import NDArray
from pydantic import TypeAdapter

from common.errors import TransferError
from common.ids import TransferId
from common.kv.device_pool import DevicePool
from common.kv.pool import BlockPool
from common.messages.fields import NcclPoolHandle, RdmaPoolHandle
from common.transfer.backend import PeerLink
from common.transfer.nccl import NcclBackend
from common.transfer.nccl_cuda import open_nccl
from common.transfer.nccl_export import NcclExport
from common.transfer.nccl_limit import CommunicatorLimit
from common.transfer.rdma import RdmaBackend
from common.transfer.rdma_export import RdmaExport, open_rdma
from common.transfer.rdma_memory import RdmaMemory
from common.transfer.rdma_nixl import NixlLibrary
from tests.support.fake_nccl import AddressedKVPool
from tests.support.socket_nccl import SocketNcclDriver

HOST = "host"
LOOPBACK = "127.0.0.1"
POISON = 0xEE
HANDLE: TypeAdapter[NcclPoolHandle | RdmaPoolHandle] = TypeAdapter(NcclPoolHandle | RdmaPoolHandle)


def open_rdma_of(pool: BlockPool, stall: float) -> tuple[RdmaExport, RdmaBackend]:
    memory = RdmaMemory.of_pool(pool)
    return open_rdma(pool, NixlLibrary(memory), memory, stall, host=LOOPBACK)


class Side:
    """Each public method is a command."""

    def __init__(
        self, transport: str, device: str, num_blocks: int, block_bytes: int, stall: float
    ) -> None:
        self._pool: AddressedKVPool | DevicePool
        self._export: NcclExport | RdmaExport
        self._backend: NcclBackend | RdmaBackend
        if device == HOST:
            self._pool = AddressedKVPool(num_blocks, block_bytes)
        else:
            self._pool = DevicePool(num_blocks, block_bytes, int(device))
        if transport == "rdma":
            self._export, self._backend = open_rdma_of(self._pool, stall)
        elif isinstance(self._pool, DevicePool):
            self._export, self._backend = open_nccl(self._pool, stall, host=LOOPBACK)
        else:
            driver, limit = SocketNcclDriver(), CommunicatorLimit()
            self._export = NcclExport(self._pool, driver, limit, stall, host=LOOPBACK)
            self._backend = NcclBackend(self._pool, driver, CommunicatorLimit(), stall)
        self._links: dict[int, PeerLink] = {}
        self._writing: threading.Thread | None = None
        self._num_written = 0
        self._error = ""
        self.poison()

    def poison(self) -> None:
        self._store(np.full(self._pool.num_bytes, POISON, dtype=np.uint8))

    def fill(self, seed: int) -> None:
        numbers = np.random.default_rng(seed)
        self._store(numbers.integers(0, 256, self._pool.num_bytes, dtype=np.uint8))

    def poisoned(self) -> list[int]:
        blocks = self._content().reshape(self._pool.num_blocks, -1)
        ids: list[int] = np.flatnonzero((blocks == POISON).all(axis=1)).tolist()
        return ids

    def native(self, ids: list[int]) -> list[int]:
        """The checksums that the CPU computes of the pool's bytes."""
        here, size = self._content(), self._pool.block_bytes
        sums: list[int] = flowpath_native.checksum_blocks(here, ids, size).tolist()
        return sums

    def handle(self) -> dict[str, object]:
        handle = self._export.handle()
        fields: dict[str, object] = HANDLE.dump_python(handle)
        return fields | {"secret": handle.secret.hex()}

    def link(self, number: int, fields: dict[str, str]) -> None:
        secret = bytes.fromhex(fields["secret"])
        handle = HANDLE.validate_python(fields | {"secret": secret})
        self._links[number] = self._backend.open_peer(handle)

    def measure(self, number: int) -> dict[str, float]:
        return asdict(self._links[number].measure())

    def grant(self, transfer: str, ids: list[int]) -> str:
        return self._export.grant(TransferId(transfer), ids).hex()

    def revoke(self, transfer: str) -> None:
        self._export.revoke(TransferId(transfer))

    def write(self, number: int, sources: list[int], targets: list[int], token: str) -> list[int]:
        report = self._links[number].write(sources, targets, bytes.fromhex(token))
        sums: list[int] = report.checksums.tolist()
        return sums

    def write_on(self, number: int, sources: list[int], targets: list[int], token: str) -> None:
        """Write again and again until a write fails."""

        def run() -> None:
            try:
                while True:
                    self.write(number, sources, targets, token)
                    self._num_written += 1
            except TransferError as error:
                self._error = str(error)

        self._num_written, self._error = 0, ""
        self._writing = threading.Thread(target=run, daemon=True)
        self._writing.start()

    def num_written(self) -> int:
        return self._num_written

    def failure(self) -> str:
        """Wait for the failure of ``write_on``; empty when it does not come."""
        assert self._writing is not None
        self._writing.join(60)
        return self._error

    def _content(self) -> NDArray[np.uint8]:
        """The bytes of all blocks, in host memory."""
        if isinstance(self._pool, AddressedKVPool):
            return np.frombuffer(self._pool.buffer, dtype=np.uint8)
        content: NDArray[np.uint8] = self._pool.tensor[: self._pool.num_bytes].cpu().numpy()
        return content

    def _store(self, content: NDArray[np.uint8]) -> None:
        if isinstance(self._pool, AddressedKVPool):
            np.frombuffer(self._pool.buffer, dtype=np.uint8)[:] = content
            return
        import torch  # noqa: PLC0415 - seconds, and only for GPUs

        self._pool.tensor[: self._pool.num_bytes].copy_(torch.from_numpy(content))
        torch.cuda.synchronize(self._pool.device_index)

    def close(self) -> None:
        for link in self._links.values():
            link.close()
        self._export.close()


def main(transport: str, device: str, num_blocks: str, block_bytes: str, stall: str) -> None:
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    side = Side(transport, device, int(num_blocks), int(block_bytes), float(stall))
    print(json.dumps({"is": "ready"}), flush=True)
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        try:
            print(json.dumps({"is": getattr(side, command)(*arguments)}), flush=True)
        except TransferError as error:
            print(json.dumps({"error": str(error)}), flush=True)
    side.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
