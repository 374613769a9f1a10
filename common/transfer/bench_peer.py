"""The other process of a transfer benchmark: it owns a pool that may be written in every way.

``python -m common.transfer.bench_peer NUM_BLOCKS BLOCK_BYTES HOST`` tells on its output how to
reach the pool over shared memory, over ``tcp`` and, where NIXL is installed, over ``rdma`` (every
block granted), and over a plain socket, and ends with its input.
"""

import json
import logging
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import structlog
from pydantic import TypeAdapter

from common.errors import TransferError
from common.ids import TransferId
from common.kv.pool import KVPool
from common.messages.fields import PoolHandle, RdmaPoolHandle, TcpPoolHandle
from common.transfer.nixl_packages import is_nixl_installed
from common.transfer.rdma import RdmaBackend
from common.transfer.rdma_export import RdmaExport, open_rdma
from common.transfer.rdma_memory import RdmaMemory
from common.transfer.rdma_nixl import NixlLibrary
from common.transfer.tcp_export import TcpExport

STALL_SECONDS = 20.0
TRANSFER = TransferId("tr-benchmark")
_MEMORY: TypeAdapter[PoolHandle] = TypeAdapter(PoolHandle)
_NETWORK: TypeAdapter[TcpPoolHandle] = TypeAdapter(TcpPoolHandle)
_RDMA: TypeAdapter[RdmaPoolHandle] = TypeAdapter(RdmaPoolHandle)


@dataclass(frozen=True, slots=True)
class BenchPeer:
    """How to write the other process's pool. ``plain`` takes as many bytes as it is sent.

    ``token`` is good for ``network`` and ``rdma``, which is there where NIXL is installed.
    """

    memory: PoolHandle
    network: TcpPoolHandle
    rdma: RdmaPoolHandle | None
    token: bytes
    plain: socket.socket

    def stream(self, data: memoryview) -> None:
        """Send bytes as any program would, and wait until the other process has them."""
        self.plain.sendall(len(data).to_bytes(8, "little"))
        self.plain.sendall(data)
        if self.plain.recv(1) != b"\0":
            raise TransferError("the other process of the benchmark is gone")


@contextmanager
def bench_peer(
    num_blocks: int, block_bytes: int, *, host: str = "127.0.0.1", launcher: Sequence[str] = ()
) -> Iterator[BenchPeer]:
    """Run the other process as long as the block.

    ``launcher`` is a command that runs the one after it elsewhere, such as in another network
    namespace; ``host`` is the address at which it can be reached there.
    """
    program = [sys.executable, "-m", "common.transfer.bench_peer"]
    with subprocess.Popen(  # noqa: S603 - this interpreter, with numbers
        [*launcher, *program, str(num_blocks), str(block_bytes), host],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None, "it was asked for"
        line = process.stdout.readline()
        if not line:
            raise TransferError("the other process of the benchmark did not start")
        memory, network, rdma, secrets, port = json.loads(line)
        with socket.create_connection((host, port)) as plain:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            yield BenchPeer(
                memory=_MEMORY.validate_python(memory | {"nonce": bytes.fromhex(secrets[0])}),
                network=_NETWORK.validate_python(network | {"secret": bytes.fromhex(secrets[1])}),
                rdma=None
                if rdma is None
                else _RDMA.validate_python(rdma | {"secret": bytes.fromhex(secrets[3])}),
                token=bytes.fromhex(secrets[2]),
                plain=plain,
            )
        process.communicate()


def filled_pool(num_blocks: int, block_bytes: int) -> KVPool:
    """Return a pool of random bytes."""
    pool = KVPool(num_blocks, block_bytes)
    numbers = np.frombuffer(pool.buffer, dtype=np.uint64)
    row = np.random.default_rng(0).integers(0, 2**63, block_bytes // 8, dtype=np.uint64)
    numbers.reshape(num_blocks, -1)[:] = row
    return pool


def log_to_stderr() -> None:
    """Keep the output for what is measured; warnings alone are told of, beside it."""
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def open_bench_rdma(pool: KVPool, host: str = "127.0.0.1") -> tuple[RdmaExport, RdmaBackend]:
    """Return both sides of ``rdma`` for a pool of the benchmark; ConfigError without NIXL."""
    memory = RdmaMemory.of_pool(pool)
    return open_rdma(pool, NixlLibrary(memory), memory, STALL_SECONDS, host=host)


def main(num_blocks: int, block_bytes: int, host: str) -> None:
    """Own the pool until the input ends."""
    log_to_stderr()
    pool = filled_pool(num_blocks, block_bytes)
    export = TcpExport(pool, STALL_SECONDS, host=host)
    token = export.grant(TRANSFER, range(num_blocks))
    over_rdma = open_bench_rdma(pool, host) if is_nixl_installed() else None
    if over_rdma is not None:
        over_rdma[0].grant(TRANSFER, range(num_blocks), token)
    with socket.create_server((host, 0)) as listener:
        memory, network = pool.handle(), export.handle()
        rdma = None if over_rdma is None else over_rdma[0].handle()
        told = [
            _MEMORY.dump_python(memory, exclude={"nonce"}),
            _NETWORK.dump_python(network, exclude={"secret"}),
            None if rdma is None else _RDMA.dump_python(rdma, exclude={"secret"}),
            [
                memory.nonce.hex(),
                network.secret.hex(),
                token.hex(),
                "" if rdma is None else rdma.secret.hex(),
            ],
            listener.getsockname()[1],
        ]
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()
        plain, _ = listener.accept()
    thread = threading.Thread(target=_receive_plain, args=(plain, pool.buffer), daemon=True)
    thread.start()
    sys.stdin.read()
    export.close()
    if over_rdma is not None:
        over_rdma[0].close()


def _receive_plain(sock: socket.socket, memory: memoryview) -> None:
    """Take streams of bytes, each after its length, and confirm each."""
    with sock:
        while len(head := sock.recv(8, socket.MSG_WAITALL)) == 8:
            left = min(int.from_bytes(head, "little"), len(memory))
            while left:
                received = sock.recv_into(memory[:left])
                if received == 0:
                    return
                left -= received
            sock.sendall(b"\0")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
