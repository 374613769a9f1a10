"""Blocks of a pool on a GPU outlive it in a store, and come back into another pool."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from common.config.settings import Settings
from common.kv.blocks import PublishedBlocks
from common.kv.device_pool import DevicePool
from common.kv.layout import KVLayout
from common.traffic.shared_link import SharedLink
from common.worker.store_access import StoreAccess
from common.worker.store_setup import open_worker_store
from tests.support.gpus import why_too_few

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(why_too_few(1) is not None, reason=str(why_too_few(1))),
]

LAYOUT = KVLayout(num_layers=32, block_size=16, num_kv_heads=8, head_dim=128, dtype="bfloat16")
SIZE = LAYOUT.block_bytes
NUM_BLOCKS = 64
HASHES = tuple(bytes([number]) * 16 for number in range(1, 25))
WRITTEN = [*range(60, 36, -1)]
READ = [*range(0, 48, 2)]
SECONDS = 60.0


@pytest.fixture
def pools() -> Iterator[list[DevicePool]]:
    pools = [DevicePool(NUM_BLOCKS, SIZE, 0) for _ in range(2)]
    yield pools
    for pool in pools:
        pool.close()


def machine(pool: DevicePool) -> SimpleNamespace:
    return SimpleNamespace(model_fingerprint="0123456789abcdef", layout=LAYOUT, pool=pool)


def fill(pool: DevicePool, seed: int) -> None:
    generator = torch.Generator(device=pool.tensor.device).manual_seed(seed)
    pool.tensor.random_(generator=generator)
    torch.cuda.synchronize(pool.device_index)


def contents(pool: DevicePool, block_ids: Sequence[int]) -> torch.Tensor:
    return pool.tensor.view(-1, SIZE)[torch.tensor(list(block_ids), device="cuda:0")]


@pytest.mark.parametrize("num_buffer_blocks", [1, 9])
async def test_blocks_come_back_after_a_restart_from_storage_and_from_the_tier(
    tmp_path: Path, pools: list[DevicePool], num_buffer_blocks: int
) -> None:
    written, read = pools
    settings = Settings(
        store=f"file:{tmp_path}/s",
        host_tier_bytes=32 * SIZE,
        store_buffer_bytes=num_buffer_blocks * SIZE,
    )
    fill(written, 1)
    checksums = written.checksum(WRITTEN)
    with closing(open_worker_store(settings, machine(written))) as store:
        access = StoreAccess(store, SharedLink(0))
        assert await access.write(PublishedBlocks("o", tuple(WRITTEN), HASHES, ())) == 0
        assert store.storage.flush(SECONDS)
        access.close()
    with closing(open_worker_store(settings, machine(read))) as store:
        access = StoreAccess(store, SharedLink(0))
        for num_from_storage in (len(HASHES), 0):
            fill(read, 2)
            others = contents(read, range(1, 48, 2)).clone()
            came = await access.read(HASHES, READ, None)
            assert (came.num_blocks, came.num_from_storage) == (len(HASHES), num_from_storage)
            assert np.array_equal(read.checksum(READ), checksums)
            assert torch.equal(contents(read, READ), contents(written, WRITTEN))
            assert torch.equal(contents(read, range(1, 48, 2)), others), "others are left alone"
        access.close()
