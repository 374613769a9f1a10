"""Heads of ranks on GPUs become whole blocks in page-locked memory, and go back into others."""

from collections.abc import Iterator
from contextlib import ExitStack
from time import perf_counter

import numpy as np
import pytest
import torch

from common.kv.device_pool import DevicePool
from common.kv.layout import KVLayout
from common.transfer.cuda_ranks import DeviceRank
from common.transfer.heads import rank_layout
from common.transfer.ranks import RankedPool
from common.worker.host_memory import HostMemory
from common.worker.pool_copies import open_pool_copies
from tests.support.gpus import num_gpus, why_too_few

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(why_too_few(1) is not None, reason=str(why_too_few(1))),
]

LAYOUT = KVLayout(num_layers=32, block_size=16, num_kv_heads=8, head_dim=128, dtype="bfloat16")
NUM_RANKS = 2
NUM_BLOCKS = 128
ORDER = np.random.default_rng(1).permutation(NUM_BLOCKS).tolist()
OTHERS = np.random.default_rng(2).permutation(NUM_BLOCKS).tolist()
SLOTS = list(range(NUM_BLOCKS))


@pytest.fixture
def pools() -> Iterator[list[DevicePool]]:
    """One pool a rank, on a GPU of its own where there are two."""
    size = rank_layout(LAYOUT, NUM_RANKS).block_bytes
    with ExitStack() as stack:
        made = [DevicePool(NUM_BLOCKS, size, rank % num_gpus()) for rank in range(NUM_RANKS)]
        for pool in made:
            stack.callback(pool.close)
        yield made


def blocks_of(pool: DevicePool) -> torch.Tensor:
    """Return a copy of a rank's blocks, (blocks, layers and planes and tokens, bytes of heads)."""
    layout = rank_layout(LAYOUT, NUM_RANKS)
    assert layout.block_bytes == layout.payload_bytes
    rows = layout.num_layers * layout.planes * layout.block_size
    return pool.tensor[: pool.num_bytes].view(NUM_BLOCKS, rows, -1).cpu()


def test_heads_are_gathered_and_scattered(pools: list[DevicePool]) -> None:
    for pool in pools:
        generator = torch.Generator(device=pool.tensor.device).manual_seed(pool.device_index + 1)
        pool.tensor.random_(generator=generator)
        torch.cuda.synchronize(pool.device_index)
    before = [blocks_of(pool) for pool in pools]
    ranked = RankedPool(
        LAYOUT, [DeviceRank.of_pool(pool) for pool in pools], [pool.handle() for pool in pools]
    )
    memory = HostMemory(ranked, NUM_BLOCKS * LAYOUT.block_bytes, "test")
    copies = open_pool_copies(ranked)
    try:
        for name in ("first", "second"):
            began = perf_counter()
            copies.download(memory, SLOTS, ORDER)
            copies.wait()
            gathered = perf_counter()
            found = torch.frombuffer(memory.buffer, dtype=torch.uint8).view(NUM_BLOCKS, -1)
            whole = torch.cat([blocks[ORDER] for blocks in before], dim=2).view(NUM_BLOCKS, -1)
            assert torch.equal(found, whole)
            del found
            rate = ranked.num_bytes / (gathered - began) / 1e9
            print(f"{name}: {num_gpus()} GPUs, gathered with {rate:.1f} GB/s")
        for pool in pools:
            pool.tensor.zero_()
            torch.cuda.synchronize(pool.device_index)
        began = perf_counter()
        copies.upload(memory, SLOTS, OTHERS)
        copies.wait()
        print(f"scattered with {ranked.num_bytes / (perf_counter() - began) / 1e9:.1f} GB/s")
        for pool, blocks in zip(pools, before, strict=True):
            assert torch.equal(blocks_of(pool)[OTHERS], blocks[ORDER])
    finally:
        copies.close()
        memory.close()
        for rank in ranked.ranks:
            rank.close()
