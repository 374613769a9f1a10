"""How fast a GPU's pool gets stored KV: ``python -m benchmarks.cuda_store --folder DIR``.

A prompt of 10 240 tokens in Llama-3.1-8B's shape is written from the pool to a store in ``DIR`` and
read back into other blocks of the pool, in turn: from page-locked memory by plain copies, which is
the limit; from the host tier; and from storage through the buffer, past the page cache. The blocks
of every turn are compared by checksum. Best of the turns. Exits with 1 where bytes differ.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.report import Cell, print_table, write_results
from common.kv.blocks import PublishedBlocks
from common.kv.device_pool import DevicePool
from common.kv.layout import KVLayout
from common.storage.file_store import FileStore
from common.storage.host_tier import HostTier
from common.storage.interface import StoreIdentity
from common.storage.linked_store import LinkedStore
from common.storage.store_url import FileOptions
from common.traffic.shared_link import SharedLink
from common.worker.host_memory import HostMemory
from common.worker.pool_copies import open_pool_copies
from common.worker.store_buffer import StoreBuffer
from common.worker.store_paths import PlacedTier
from common.worker.worker_store import WorkerStore

NUM_TOKENS = 10_240
NUM_TURNS = 5
BUFFER_BYTES = 256 * 2**20
"""The default of store_buffer_bytes."""
QUEUE_DEPTH = 32
WRITE_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Prompt:
    """The blocks of one prompt: where they are at first, and where they are read to."""

    hashes: tuple[bytes, ...]
    written: tuple[int, ...]
    read: tuple[int, ...]

    @classmethod
    def of(cls, num_blocks: int) -> "Prompt":
        """Lay a prompt into the first half of a pool and read it into the second."""
        hashes = tuple(number.to_bytes(16, "big") for number in range(1, num_blocks + 1))
        return cls(hashes, tuple(range(num_blocks)), tuple(range(num_blocks, 2 * num_blocks)))


class WrongBytes(RuntimeError):  # noqa: N818  # what happened
    """What was read is not what was written."""


def layout_of(block_tokens: int) -> KVLayout:
    """Return the layout of Llama-3.1-8B's KV."""
    return KVLayout(
        num_layers=32, block_size=block_tokens, num_kv_heads=8, head_dim=128, dtype="bfloat16"
    )


def measure(
    pool: DevicePool, folder: Path, num_blocks: int, num_turns: int
) -> list[dict[str, Cell]]:
    """Return a row for each way. WrongBytes where one brings others than were written.

    The pool has room for twice the blocks.
    """
    prompt = Prompt.of(num_blocks)
    size = pool.block_bytes
    identity = StoreIdentity("benchmark", "benchmark", "bfloat16", size)
    options = FileOptions(2**50, BUFFER_BYTES + 2 * size, QUEUE_DEPTH)
    with ExitStack() as stack:
        storage = FileStore(folder, identity, options)
        stack.callback(storage.close)
        buffer = StoreBuffer(_host_memory(stack, pool, max(BUFFER_BYTES, size)))
        memory = _host_memory(stack, pool, num_blocks * size)
        tier = HostTier(memory.buffer, size)
        storage.register([buffer.memory.buffer])
        linked = LinkedStore(storage, SharedLink(0))
        through_buffer = WorkerStore(storage, pool, buffer=buffer).open_path(linked)
        stack.callback(through_buffer.close)
        with_tier = WorkerStore(storage, pool, PlacedTier(tier, memory), buffer).open_path(linked)
        stack.callback(with_tier.close)
        copies = open_pool_copies(pool)
        stack.callback(copies.close)

        expected = pool.checksum(prompt.written)
        seconds = {"write": _write(with_tier.write, storage, prompt)}
        if tier.num_held(prompt.hashes) < num_blocks:
            raise WrongBytes("the tier does not hold what was written")

        def copy_plainly() -> int:
            copies.upload(memory, range(num_blocks), prompt.read)
            copies.wait()
            return num_blocks

        ways: dict[str, Callable[[], int]] = {
            "storage": lambda: through_buffer.read(prompt.hashes, prompt.read, None),
            "host tier": lambda: with_tier.read(prompt.hashes, prompt.read, None),
        }
        for way, read in ways.items():
            seconds[way] = min(_turn(pool, prompt, read, expected) for _ in range(num_turns))
        plain = [_timed(copy_plainly) for _ in range(num_turns)]
        seconds["plain copy"] = min(plain)
    return [
        {
            "way": way,
            "block KiB": size // 1024,
            "blocks": num_blocks,
            "ms": round(taken * 1e3, 2),
            "GB/s": round(num_blocks * size / taken / 1e9, 2),
            "of plain copy": round(seconds["plain copy"] / taken, 3),
        }
        for way, taken in seconds.items()
    ]


def _host_memory(stack: ExitStack, pool: DevicePool, num_bytes: int) -> HostMemory:
    memory = HostMemory(pool, num_bytes, "the benchmark's host memory")
    stack.callback(memory.close)
    return memory


def _write(write: Callable[[PublishedBlocks], int], storage: FileStore, prompt: Prompt) -> float:
    """Write the prompt as its store's queue has room; return the seconds until all is durable."""
    began = time.perf_counter()
    done, num_blocks = 0, len(prompt.hashes)
    while done < num_blocks:
        rest = PublishedBlocks(
            "o", prompt.written[done:], prompt.hashes[done:], prompt.hashes[:done]
        )
        done = num_blocks - write(rest)
        if not storage.flush(WRITE_SECONDS):
            raise TimeoutError("the store did not write in time")
    return time.perf_counter() - began


def _turn(
    pool: DevicePool, prompt: Prompt, read: Callable[[], int], expected: NDArray[np.uint64]
) -> float:
    """Read into blocks that hold zeros, compare, and return the seconds of the read."""
    size = pool.block_bytes
    pool.tensor[prompt.read[0] * size : (prompt.read[-1] + 1) * size].zero_()
    _settle(pool)
    began = time.perf_counter()
    num_read = read()
    taken = time.perf_counter() - began
    if num_read < len(prompt.hashes):
        raise WrongBytes(f"{num_read} of {len(prompt.hashes)} blocks came")
    if not np.array_equal(pool.checksum(prompt.read), expected):
        raise WrongBytes("blocks came back with other bytes")
    return taken


def _settle(pool: DevicePool) -> None:
    """Wait for torch's work on a pool: the pool's own streams do not."""
    if pool.tensor.is_cuda:
        torch.cuda.synchronize(pool.device_index)


def _timed(work: Callable[[], int]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main(argv: list[str]) -> int:
    """Measure, print and keep the results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--folder", help="where the store lies; a temporary folder by default")
    parser.add_argument("--tokens", type=int, default=NUM_TOKENS)
    parser.add_argument("--block-tokens", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--turns", type=int, default=NUM_TURNS)
    parser.add_argument("--device", type=int, default=0)
    options = parser.parse_args(argv)
    rows: list[dict[str, Cell]] = []
    for block_tokens in options.block_tokens:
        block_bytes = layout_of(block_tokens).block_bytes
        num_blocks = options.tokens // block_tokens
        pool = DevicePool(2 * num_blocks, block_bytes, options.device)
        try:
            pool.tensor.random_()
            _settle(pool)
            with tempfile.TemporaryDirectory(prefix="fp-store-", dir=options.folder) as folder:
                rows += measure(pool, Path(folder), num_blocks, options.turns)
        except WrongBytes as error:
            print(f"blocks of {block_tokens} tokens: {error}", file=sys.stderr)
            return 1
        finally:
            pool.close()
    print_table(rows)
    print(f"kept as {write_results('cuda_store', argv, rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
