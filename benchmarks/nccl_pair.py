"""One request's KV from one GPU to another over ``nccl``, and what it costs a step on either.

``python -m benchmarks.nccl_pair --devices 0,1`` writes 1.34 GB (10 240 tokens of Llama-3.1-8B) in
1 to 640 runs, for several bounds on the multiprocessors that a communicator takes. The step is 24
matrices of 128 MiB times a few columns, replayed as a graph: bound by memory, as a decode step is.
``--sockets`` keeps NCCL off NVLink and shared memory, as between hosts.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

import torch
from pydantic import TypeAdapter

from benchmarks.report import Cell, print_table, write_results
from common.errors import TransferError
from common.ids import TransferId
from common.kv.device_pool import DevicePool
from common.messages.fields import NcclPoolHandle
from common.transfer.nccl import NcclLink
from common.transfer.nccl_cuda import open_nccl

BLOCK_BYTES = 2 * 1024 * 1024
NUM_BLOCKS = 640
POOL_BLOCKS = 2 * NUM_BLOCKS
RUNS = (1, 4, 16, 40, 640)
STALL_SECONDS = 20.0
STEP_SECONDS = 1.0
NUM_MATRICES, WIDTH, COLUMNS = 24, 8192, 16
MAX_CONTIGUOUS_MS, MAX_FEW_RUNS_MS, FEW_RUNS, MAX_STEP_RATIO = 4.2, 5.0, 16, 1.10
SOCKETS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
HANDLE: TypeAdapter[NcclPoolHandle] = TypeAdapter(NcclPoolHandle)


class Step:
    """Work that is bound by the memory of one GPU."""

    def __init__(self, device: int) -> None:
        torch.cuda.set_device(device)
        shape = (NUM_MATRICES, WIDTH, WIDTH)
        matrices = torch.zeros(shape, dtype=torch.bfloat16, device=f"cuda:{device}")
        columns = torch.zeros((WIDTH, COLUMNS), dtype=torch.bfloat16, device=f"cuda:{device}")
        torch.mm(matrices[0], columns)
        torch.cuda.synchronize(device)
        self._device = device
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for matrix in matrices:
                torch.mm(matrix, columns)

    def milliseconds(self, is_enough: Callable[[], bool]) -> float:
        """Replay until it is enough; return the median."""
        torch.cuda.set_device(self._device)
        taken: list[float] = []
        while not is_enough():
            begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's
            begin.record()
            self._graph.replay()
            end.record()
            end.synchronize()
            taken.append(begin.elapsed_time(end))
        return median(taken)


def for_some_time() -> Callable[[], bool]:
    end = time.monotonic() + STEP_SECONDS
    return lambda: time.monotonic() > end


class Peer:
    """The other process, which owns the pool that is written."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        fields = json.loads(self._read())
        self.token = bytes.fromhex(fields.pop("token"))
        secret = bytes.fromhex(fields.pop("secret"))
        self.handle = HANDLE.validate_python(fields | {"secret": secret})

    def begin_steps(self) -> None:
        """Have it replay steps for some time."""
        assert self._process.stdin is not None
        print("step", file=self._process.stdin, flush=True)

    def step_milliseconds(self) -> float:
        """Wait for the median of these steps."""
        return float(self._read())

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise TransferError("the other process of the benchmark is gone")
        return line


@contextmanager
def running_peer(device: int, max_ctas: int) -> Iterator[Peer]:
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.nccl_pair", "--own", f"{device},{max_ctas}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield Peer(process)
        process.communicate()


def own(device: int, max_ctas: int) -> None:
    """Be the other process."""
    told, sys.stdout = sys.stdout, sys.stderr
    pool = DevicePool(POOL_BLOCKS, BLOCK_BYTES, device)
    export, _ = open_nccl(pool, STALL_SECONDS, host="127.0.0.1", max_ctas=max_ctas)
    token = export.grant(TransferId("tr-benchmark"), range(POOL_BLOCKS))
    handle = export.handle()
    secrets = {"secret": handle.secret.hex(), "token": token.hex()}
    print(json.dumps(HANDLE.dump_python(handle) | secrets), file=told, flush=True)
    step = Step(device)
    for _ in sys.stdin:
        print(step.milliseconds(for_some_time()), file=told, flush=True)
    export.close()


def in_runs(count: int) -> tuple[list[int], list[int]]:
    """Return blocks of source and target that lie in so many runs, in reversed order there."""
    length = NUM_BLOCKS // count
    starts = [2 * length * number for number in range(count)]
    return (
        [start + i for start in starts for i in range(length)],
        [start + i for start in reversed(starts) for i in range(length)],
    )


@contextmanager
def writing_on(link: NcclLink, token: bytes) -> Iterator[None]:
    """Write contiguous blocks again and again in a thread."""
    is_enough = threading.Event()
    sources, targets = in_runs(1)

    def run() -> None:
        while not is_enough.is_set():
            link.write(sources, targets, token)

    thread = threading.Thread(target=run)
    thread.start()
    yield
    is_enough.set()
    thread.join()


def measure(devices: tuple[int, int], max_ctas: int, num_turns: int) -> Iterator[dict[str, Cell]]:
    pool = DevicePool(POOL_BLOCKS, BLOCK_BYTES, devices[0])
    words = pool.tensor.view(torch.int64)
    torch.arange(len(words), out=words)
    torch.cuda.synchronize(devices[0])
    export, backend = open_nccl(pool, STALL_SECONDS, host="127.0.0.1", max_ctas=max_ctas)
    with running_peer(devices[1], max_ctas) as peer:
        link = backend.open_peer(peer.handle)
        start = time.perf_counter()
        rate = link.measure()
        joining = time.perf_counter() - start
        print(f"{max_ctas} CTAs: joined and measured in {joining:.2f} s, {rate}", flush=True)
        step = Step(devices[0])
        alone = step.milliseconds(for_some_time())
        peer.begin_steps()
        peer_alone = peer.step_milliseconds()
        with writing_on(link, peer.token):
            peer.begin_steps()
            during = step.milliseconds(for_some_time())
            peer_during = peer.step_milliseconds()
        for count in RUNS:
            sources, targets = in_runs(count)
            link.write(sources, targets, peer.token)
            reports = [link.write(sources, targets, peer.token) for _ in range(num_turns)]
            seconds = median(report.seconds for report in reports)
            yield {
                "way": "sockets" if os.environ.get("NCCL_P2P_DISABLE") else "direct",
                "max_ctas": max_ctas,
                "runs": reports[0].num_calls,
                "milliseconds": round(seconds * 1e3, 3),
                "gigabytes_per_second": round(reports[0].num_bytes / seconds / 1e9, 1),
                "source_step_ratio": round(during / alone, 3),
                "target_step_ratio": round(peer_during / peer_alone, 3),
            }
        link.close()
    export.close()
    pool.close()


def is_met(row: dict[str, Cell]) -> bool:
    bound = MAX_CONTIGUOUS_MS if row["runs"] == 1 else MAX_FEW_RUNS_MS
    in_time = int(row["runs"]) > FEW_RUNS or float(row["milliseconds"]) <= bound
    ratios = (float(row["source_step_ratio"]), float(row["target_step_ratio"]))
    return in_time and max(ratios) <= MAX_STEP_RATIO


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.nccl_pair")
    parser.add_argument("--devices", default="0,1")
    parser.add_argument("--ctas", default="8,16,32")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--sockets", action="store_true")
    parser.add_argument("--own", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.own:
        device, max_ctas = (int(part) for part in arguments.own.split(","))
        own(device, max_ctas)
        return 0
    if arguments.sockets:
        os.environ.update(SOCKETS)
    source, target = (int(part) for part in arguments.devices.split(","))
    rows: list[dict[str, Cell]] = []
    for max_ctas in (int(part) for part in arguments.ctas.split(",")):
        rows += measure((source, target), max_ctas, arguments.turns)
    print_table(rows)
    print(f"kept in {write_results('nccl_pair', argv, rows)}")
    missed = {row["max_ctas"] for row in rows if not is_met(row)}
    return 0 if arguments.sockets or {row["max_ctas"] for row in rows} > missed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
