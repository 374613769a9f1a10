from dataclasses import replace

import flowpath_native
import numpy as np
import pytest

from common.cuda.driver import CudaError
from common.errors import ConfigError, TransferError
from common.kv.device_pool import DevicePool
from common.kv.pool import BlockPool
from common.messages.codec import Codec
from common.messages.handoff import DecodeToPrefill, PairAccepted
from common.transfer.verify import verify_blocks
from tests.support.fake_cuda import FakeDriver, FakeGpus
from tests.support.message_builders import an_example
from tests.unit.messages.test_golden import ENVELOPE

BLOCK = 8192
NUM_BLOCKS = 6


@pytest.fixture
def driver() -> FakeDriver:
    return FakeGpus(num_devices=2).process()


def test_the_pool_is_one_zeroed_allocation_whose_blocks_begin_at_a_page(driver: FakeDriver) -> None:
    pool = DevicePool(NUM_BLOCKS, BLOCK, 1, driver=driver)
    assert pool.address % 4096 == 0
    assert driver.calls.count("allocate 1") == 1
    assert (pool.num_blocks, pool.num_bytes) == (NUM_BLOCKS, NUM_BLOCKS * BLOCK)
    assert pool.scratch_block == NUM_BLOCKS
    assert pool.tensor.shape == ((NUM_BLOCKS + 1) * BLOCK,)
    assert not pool.tensor.any()
    pool.tensor[pool.scratch_block * BLOCK :] = 7
    scratch = driver.bytes_at(pool.address + pool.scratch_block * BLOCK, BLOCK)
    assert (scratch == 7).all(), "the tensor shows the pool's own memory"
    pool.close()


def test_its_handle_says_where_the_blocks_begin_and_leaves_the_scratch_block_out(
    driver: FakeDriver,
) -> None:
    pool = DevicePool(NUM_BLOCKS, BLOCK, 1, driver=driver)
    handle = pool.handle()
    assert handle == pool.handle()
    assert handle.device_uuid == driver.device_uuid(1)
    assert (handle.num_blocks, handle.num_bytes) == (NUM_BLOCKS, NUM_BLOCKS * BLOCK)
    pool.tensor[0] = 9
    opened = driver.open_memory(1, handle.ipc_handle)
    assert driver.bytes_at(opened + handle.offset, 1)[0] == 9
    pool.close()


def test_its_handle_travels_with_the_pairing(driver: FakeDriver) -> None:
    pool = DevicePool(NUM_BLOCKS, BLOCK, 0, driver=driver)
    codec = Codec(DecodeToPrefill)
    example = an_example(PairAccepted)
    assert isinstance(example, PairAccepted)
    message = replace(example, transport="cuda_ipc", pool=pool.handle())
    assert codec.decode(codec.encode(ENVELOPE, message, ())).message == message
    pool.close()


def test_checksums_are_those_of_the_host_in_the_order_of_the_ids(driver: FakeDriver) -> None:
    pool: BlockPool = (device := DevicePool(NUM_BLOCKS, BLOCK, 0, driver=driver))
    content = np.random.default_rng(0).integers(0, 256, NUM_BLOCKS * BLOCK, dtype=np.uint8)
    driver.bytes_at(device.address, len(content))[:] = content
    ids = [4, 0, 4, 2]
    expected = flowpath_native.checksum_blocks(content, ids, BLOCK)
    assert pool.checksum(ids).tolist() == expected.tolist()
    assert pool.checksum([]).tolist() == []
    assert verify_blocks(pool, ids, expected) is None
    content[0] ^= 1
    damaged = flowpath_native.checksum_blocks(content, ids, BLOCK)
    assert verify_blocks(pool, ids, damaged) == 1
    pool.close()


@pytest.mark.parametrize("block", [-1, NUM_BLOCKS, 2**40])
def test_a_checksum_outside_of_the_pool_is_refused(driver: FakeDriver, block: int) -> None:
    pool = DevicePool(NUM_BLOCKS, BLOCK, 0, driver=driver)
    with pytest.raises(ValueError, match=f"block {block} is outside of {NUM_BLOCKS} blocks"):
        pool.checksum([0, block])
    with pytest.raises(TransferError, match="cannot checksum 2 blocks"):
        verify_blocks(pool, [0, block], np.zeros(2, dtype=np.uint64))
    pool.close()


def test_closing_frees_the_memory_once(driver: FakeDriver) -> None:
    pool = DevicePool(NUM_BLOCKS, BLOCK, 0, driver=driver)
    pool.close()
    pool.close()
    assert driver.num_mappings == 0
    with pytest.raises(ValueError, match="closed"):
        pool.checksum([0])


@pytest.mark.parametrize(
    ("num_blocks", "block_bytes", "device", "message"),
    [
        (0, BLOCK, 0, "a KV pool of 0 blocks"),
        (1, 4097, 0, "a multiple of 4096"),
        (1, BLOCK, 2, "there is no GPU 2: this process sees 2"),
    ],
)
def test_an_impossible_pool_is_refused_by_name(
    driver: FakeDriver, num_blocks: int, block_bytes: int, device: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        DevicePool(num_blocks, block_bytes, device, driver=driver)
    assert driver.num_mappings == 0


def test_a_pool_that_does_not_fit_names_the_free_memory() -> None:
    driver = FakeGpus(free_bytes=3 * BLOCK).process()
    with pytest.raises(
        ConfigError, match=r"2 blocks of 8192 bytes.*GPU 0 0\.00 GiB are free; make"
    ):
        DevicePool(2, BLOCK, 0, driver=driver)
    assert "allocate 0" not in driver.calls


def test_memory_that_is_lost_to_others_meanwhile_is_a_clear_error(driver: FakeDriver) -> None:
    driver.failing.add("allocate")
    with pytest.raises(ConfigError, match=r"GiB are free: allocate 0: the test says so; make"):
        DevicePool(1, BLOCK, 0, driver=driver)


def test_a_pool_that_cannot_be_made_whole_leaves_no_memory_behind(driver: FakeDriver) -> None:
    driver.failing.add("queue")
    with pytest.raises(CudaError, match="queue 0"):
        DevicePool(1, BLOCK, 0, driver=driver)
    assert driver.num_mappings == 0
