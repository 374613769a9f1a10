"""Blocks come back from host memory as they went there, from either kind of pool."""

from collections.abc import Iterator

import numpy as np
import pytest

from common.errors import ConfigError
from common.kv.device_pool import DevicePool
from common.kv.pool import KVPool
from common.worker.host_blocks import HostBlocks, NoHostBlocks, open_host_blocks
from tests.support.fake_cuda import FakeGpus

BLOCK_BYTES = 4096
NUM_BLOCKS = 8


class Rig:
    """A pool whose block ``i`` is full of ``i``, with three slots beside it."""

    def __init__(self, *, is_on_gpu: bool) -> None:
        self.pool: KVPool | DevicePool
        if is_on_gpu:
            self.pool = DevicePool(NUM_BLOCKS, BLOCK_BYTES, 0, driver=FakeGpus().process())
            memory = self.pool.tensor.numpy()[: NUM_BLOCKS * BLOCK_BYTES]
        else:
            self.pool = KVPool(NUM_BLOCKS, BLOCK_BYTES)
            memory = np.frombuffer(self.pool.buffer, dtype=np.uint8)
        self.blocks = memory.reshape(NUM_BLOCKS, BLOCK_BYTES)
        self.blocks[:] = np.arange(NUM_BLOCKS)[:, None]
        self.host: HostBlocks = open_host_blocks(self.pool, 3 * BLOCK_BYTES + 5)

    def contents(self) -> list[int]:
        assert (self.blocks == self.blocks[:, :1]).all(), "a block is mixed"
        return [int(block[0]) for block in self.blocks]


@pytest.fixture(params=[False, True], ids=["memory", "gpu"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = Rig(is_on_gpu=request.param)
    yield rig
    rig.host.close()
    del rig.blocks
    rig.pool.close()


def test_blocks_come_back_into_other_places_as_they_were(rig: Rig) -> None:
    assert rig.host.num_slots == 3
    rig.host.swap_out([(4, 0), (5, 1), (1, 2)])
    rig.blocks[[1, 4, 5]] = 99
    rig.host.swap_in([(7, 2), (4, 1)])
    assert rig.contents() == [0, 99, 2, 3, 5, 99, 6, 1]
    rig.host.swap_in([(5, 0)])
    assert rig.contents() == [0, 99, 2, 3, 5, 4, 6, 1]


@pytest.mark.parametrize("pair", [(0, 3), (NUM_BLOCKS, 0)], ids=["no such slot", "no such block"])
def test_nothing_outside_of_either_memory_is_touched(rig: Rig, pair: tuple[int, int]) -> None:
    with pytest.raises(IndexError):
        rig.host.swap_out([pair])
    with pytest.raises(IndexError):
        rig.host.swap_in([pair])
    assert rig.contents() == list(range(NUM_BLOCKS))


def test_less_than_a_block_is_no_slot() -> None:
    pool = KVPool(2, BLOCK_BYTES)
    host = open_host_blocks(pool, BLOCK_BYTES - 1)
    assert isinstance(host, NoHostBlocks)
    assert host.num_slots == 0
    with pytest.raises(IndexError):
        host.swap_out([(0, 0)])
    with pytest.raises(IndexError):
        host.swap_in([(0, 0)])
    host.close()
    pool.close()


def test_more_than_there_is_is_refused_by_name() -> None:
    pool = KVPool(2, BLOCK_BYTES)
    with pytest.raises(ConfigError, match="available"):
        open_host_blocks(pool, 2**50)
    pool.close()
