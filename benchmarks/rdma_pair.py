"""One request's KV from one GPU to another over ``rdma``: ``python -m benchmarks.rdma_pair``.

``--devices 0,1`` reads 1.34 GB (10 240 tokens of Llama-3.1-8B) through NIXL in 1 to 640 runs; by
turns with it, ``cuda_ipc`` writes the same blocks, and a plain copy moves as many bytes. Every
way's bytes are compared by checksums at the target. ``--sockets`` keeps UCX off NVLink and shared
memory, as between hosts without adapters.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median

import torch
from pydantic import TypeAdapter

from benchmarks.nccl_pair import BLOCK_BYTES, POOL_BLOCKS, RUNS, STALL_SECONDS, in_runs
from benchmarks.report import Cell, print_table, write_results
from common.errors import TransferError
from common.ids import TransferId
from common.kv.device_pool import DevicePool
from common.messages.fields import CudaPoolHandle, RdmaPoolHandle
from common.transfer.cuda_ipc import CudaIpcBackend
from common.transfer.rdma import RdmaBackend
from common.transfer.rdma_export import RdmaExport, open_rdma
from common.transfer.rdma_memory import RdmaMemory
from common.transfer.rdma_nixl import NixlLibrary

SOCKETS = {"UCX_TLS": "tcp,cuda_copy"}
HANDLES: TypeAdapter[tuple[RdmaPoolHandle, CudaPoolHandle]] = TypeAdapter(
    tuple[RdmaPoolHandle, CudaPoolHandle]
)


def open_pool(device: int) -> tuple[DevicePool, RdmaExport, RdmaBackend]:
    """Return a pool and both sides of the transport."""
    pool = DevicePool(POOL_BLOCKS, BLOCK_BYTES, device)
    memory = RdmaMemory.of_pool(pool)
    library = NixlLibrary(memory)
    return pool, *open_rdma(pool, library, memory, STALL_SECONDS, host="127.0.0.1")


class Peer:
    """The other process, which owns the pool that is written."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        rdma, cuda, secrets = json.loads(self._read())
        secret, ipc_handle, token = (bytes.fromhex(each) for each in secrets)
        self.token = token
        self.rdma, self.cuda = HANDLES.validate_python(
            (rdma | {"secret": secret}, cuda | {"ipc_handle": ipc_handle})
        )

    def checksums(self, block_ids: Sequence[int]) -> list[int]:
        """Return what is in these blocks there."""
        assert self._process.stdin is not None
        print(json.dumps(list(block_ids)), file=self._process.stdin, flush=True)
        found: list[int] = json.loads(self._read())
        return found

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise TransferError("the other process of the benchmark is gone")
        return line


@contextmanager
def running_peer(device: int) -> Iterator[Peer]:
    """Run the other process as long as the block."""
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.rdma_pair", "--own", str(device)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield Peer(process)
        process.communicate()


def own(device: int) -> None:
    """Be the other process: tell how to reach the pool, then sums of blocks that are named."""
    told, sys.stdout = sys.stdout, sys.stderr
    pool, export, _ = open_pool(device)
    token = export.grant(TransferId("tr-benchmark"), range(POOL_BLOCKS))
    rdma, cuda = export.handle(), pool.handle()
    fields = HANDLES.dump_python((rdma, cuda), exclude={0: {"secret"}, 1: {"ipc_handle"}})
    secrets = [rdma.secret.hex(), cuda.ipc_handle.hex(), token.hex()]
    print(json.dumps([*fields, secrets]), file=told, flush=True)
    for line in sys.stdin:
        print(json.dumps(pool.checksum(json.loads(line)).tolist()), file=told, flush=True)
    export.close()
    pool.close()


def measure(devices: tuple[int, int], num_turns: int) -> Iterator[dict[str, Cell]]:
    """Yield a row for each number of runs; TransferError where bytes differ."""
    pool, export, backend = open_pool(devices[0])
    words = pool.tensor.view(torch.int64)
    torch.arange(len(words), out=words)
    words.mul_(0x2545F4914F6CDD1D)
    torch.cuda.synchronize(devices[0])
    with running_peer(devices[1]) as peer:
        rdma, cuda = backend.open_peer(peer.rdma), CudaIpcBackend(pool).open_peer(peer.cuda)
        began = time.perf_counter()
        rate = rdma.measure()
        print(f"joined and measured in {time.perf_counter() - began:.2f} s, {rate}", flush=True)
        mapped = pool.driver.open_memory(devices[0], peer.cuda.ipc_handle)
        queue = pool.driver.queue(devices[0])
        num_bytes = len(in_runs(1)[0]) * BLOCK_BYTES

        def copy() -> None:
            queue.copy([(mapped + peer.cuda.offset, pool.address, num_bytes)])
            queue.wait(is_long=True)

        for count in (1,) if "UCX_TLS" in os.environ else RUNS:  # sockets take seconds
            blocks = in_runs(count)
            ways: dict[str, Callable[[], object]] = {
                "rdma": partial(rdma.write, *blocks, peer.token),
                "cuda_ipc": partial(cuda.write, *blocks),
                "copy": copy,
            }
            for link, write in (("rdma", ways["rdma"]), ("cuda_ipc", ways["cuda_ipc"])):
                copy()  # block i onto block i: nothing is right already
                write()
                if peer.checksums(blocks[1]) != pool.checksum(blocks[0]).tolist():
                    raise TransferError(f"{link} brought other bytes in {count} runs")
            taken: dict[str, list[float]] = {way: [] for way in ways}
            for _ in range(num_turns):
                for way, move in ways.items():
                    taken[way].append(_timed(move))
            seconds = {way: median(found) for way, found in taken.items()}
            yield {
                "way": "sockets" if "UCX_TLS" in os.environ else "direct",
                "runs": count,
                "rdma ms": round(1e3 * seconds["rdma"], 2),
                "cuda_ipc ms": round(1e3 * seconds["cuda_ipc"], 2),
                "copy ms": round(1e3 * seconds["copy"], 2),
                "rdma GB/s": round(num_bytes / seconds["rdma"] / 1e9, 1),
                "cuda_ipc / rdma": round(seconds["cuda_ipc"] / seconds["rdma"], 3),
            }
        queue.close()
        pool.driver.close_memory(devices[0], peer.cuda.ipc_handle)
        rdma.close()
        cuda.close()
    export.close()
    pool.close()


def _timed(move: Callable[[], object]) -> float:
    began = time.perf_counter()
    move()
    return time.perf_counter() - began


def main(argv: list[str]) -> int:
    """Measure, print and keep the results."""
    parser = argparse.ArgumentParser(prog="benchmarks.rdma_pair")
    parser.add_argument("--devices", default="0,1")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--sockets", action="store_true")
    parser.add_argument("--name", default="rdma_pair", help="name of the file of results")
    parser.add_argument("--own", type=int, default=-1, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.own >= 0:
        own(arguments.own)
        return 0
    if arguments.sockets:
        os.environ.update(SOCKETS)
    source, target = (int(part) for part in arguments.devices.split(","))
    rows = list(measure((source, target), arguments.turns))
    print_table(rows)
    print(f"kept in {write_results('rdma_pair', argv, rows, name=arguments.name)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
