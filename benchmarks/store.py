"""How fast a ``file:`` store reads, beside a plain direct-I/O reader of the same files.

The plain reader is a C program's loop: threads that open, read and close, without a look at what
they read. The store does so through io_uring (with its pool registered) and through its threads,
and verifies header and checksums. All take turns in random order, each turn reads every file once,
past the page cache, to the same memory. The best turn of each way counts: on a busy machine
other programs disturb single turns, and some ways more than others. The target is for the better of
io_uring and threads.
"""

import argparse
import ctypes
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import flowpath_native

from benchmarks.report import Cell, print_table, write_results
from common.kv.pool import KVPool
from common.storage.file_store import FileStore
from common.storage.interface import StoreIdentity
from common.storage.store_url import FileOptions

SOURCE = Path(__file__).parent / "plain_reader.c"
KIB = 1024
PAGE_BYTES = 4096
SIZES = ((1024 * KIB, 192), (32 * KIB, 3072))
"""Payload bytes of a block, and how many are read."""
DEPTHS = (1, 16, 64)
NUM_TURNS = 12
MIN_RATIO = 0.9


@dataclass(frozen=True, slots=True)
class Cost:
    """The best of one way to read."""

    seconds: float
    cpu_seconds: float


def compile_plain_reader(folder: Path) -> Callable[..., int]:
    library = folder / "plain_reader.so"
    command = ["cc", "-O2", "-shared", "-fPIC", "-pthread", str(SOURCE), "-o", str(library)]
    subprocess.run(command, check=True)
    function = ctypes.CDLL(str(library)).read_plainly
    function.restype = ctypes.c_size_t
    plain: Callable[..., int] = function
    return plain


def open_store(root: Path, identity: StoreIdentity, io: str, depth: int) -> FileStore:
    options = FileOptions(2**40, 64 * KIB * KIB, depth, io)
    return FileStore(root, identity, options)


def write_blocks(root: Path, identity: StoreIdentity, count: int) -> tuple[list[bytes], float]:
    """Store blocks and return their hashes, and the bytes written a second."""
    random = Random(identity.block_bytes)
    hashes = [random.randbytes(16) for _ in range(count)]
    store = open_store(root, identity, "auto", 16)
    previous = None
    start = time.perf_counter()
    for block_hash in hashes:
        data = random.randbytes(identity.block_bytes)
        while not store.write(block_hash, previous, data):
            store.flush(60)
        previous = block_hash
    store.flush(60)
    rate = store.stats().written_bytes / (time.perf_counter() - start)
    assert store.stats().num_written == count
    store.close()
    return hashes, rate


def cpu_now() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def measure(ways: dict[str, Callable[[], None]]) -> dict[str, Cost]:
    random = Random(0)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(NUM_TURNS):
        for name in random.sample(list(ways), len(ways)):
            wall, cpu = time.perf_counter(), cpu_now()
            ways[name]()
            taken[name].append((time.perf_counter() - wall, cpu_now() - cpu))
    return {
        name: Cost(min(wall for wall, _ in each), min(cpu for _, cpu in each))
        for name, each in taken.items()
    }


def compare(
    folder: Path, block_bytes: int, count: int, plain: Callable[..., int]
) -> list[dict[str, Cell]]:
    """Return a row for each way and depth."""
    root = folder / str(block_bytes)
    identity = StoreIdentity("benchmark", "benchmark", "bfloat16", block_bytes)
    hashes, write_rate = write_blocks(root, identity, count)
    print(
        f"{count} blocks of {block_bytes // KIB} KiB, written at {write_rate / 1e6:.0f} MB/s",
        flush=True,
    )
    file_bytes = block_bytes + PAGE_BYTES
    # One memory for all: how it lies in the machine's makes a difference of a half and more.
    pool = KVPool(count, file_bytes)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pool.buffer))
    paths = sorted(root.glob("????????????????/??/*"))
    names = (ctypes.c_char_p * count)(*(os.fsencode(path) for path in paths))
    engines = ["threads", *(["io_uring"] if flowpath_native.has_io_uring() else [])]
    rows: list[dict[str, Cell]] = []
    for depth in DEPTHS:
        stores = {io: open_store(root, identity, io, depth) for io in engines}

        def read_plainly(depth: int = depth) -> None:
            sizes = (ctypes.c_size_t(size) for size in (count, file_bytes, depth))
            assert plain(names, ctypes.c_void_p(address), *sizes) == 0

        ways: dict[str, Callable[[], None]] = {"plain": read_plainly}
        for io, store in stores.items():
            store.register([pool.buffer])

            def read(store: FileStore = store) -> None:
                assert all(store.read(hashes, pool.buffer, range(count)))

            ways[io] = read
        for way, cost in measure(ways).items():
            num_bytes = count * block_bytes
            rows.append(
                {
                    "block KiB": block_bytes // KIB,
                    "depth": depth,
                    "way": way,
                    "GB/s": round(num_bytes / cost.seconds / 1e9, 3),
                    "processor s/GB": round(cost.cpu_seconds / num_bytes * 1e9, 3),
                }
            )
        plain_rate = float(rows[-len(ways)]["GB/s"])
        for row in rows[-len(ways) :]:
            row["of plain"] = round(float(row["GB/s"]) / plain_rate, 3)
        for store in stores.values():
            store.close()
    pool.close()
    return rows


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks store", description=__doc__)
    parser.add_argument("--folder", default="/var/tmp", help="on the disk to measure")
    options = parser.parse_args(argv)
    rows: list[dict[str, Cell]] = []
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="flowpath-store-") as name:
        plain = compile_plain_reader(Path(name))
        for block_bytes, count in SIZES:
            rows += compare(Path(name), block_bytes, count, plain)
    print_table(rows)
    print(f"kept in benchmarks/results/{write_results('store', argv, rows).name}")
    worst = 10.0
    for block_bytes, _ in SIZES:
        for depth in DEPTHS:
            ratios = [
                float(row["of plain"])
                for row in rows
                if (row["block KiB"], row["depth"]) == (block_bytes // KIB, depth)
                and row["way"] != "plain"
            ]
            worst = min(worst, max(ratios))
    print(f"at worst {worst:.2f} of a plain direct-I/O reader (target {MIN_RATIO})")
    return 0 if worst >= MIN_RATIO else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
