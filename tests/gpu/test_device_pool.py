import flowpath_native
import numpy as np
import pytest
import torch

from common.cuda.cupy_driver import cuda_driver
from common.errors import ConfigError
from common.kv.device_pool import DevicePool
from common.transfer.local import LocalBackend
from common.transfer.verify import verify_blocks
from tests.support.gpus import why_too_few

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(why_too_few(1) is not None, reason=str(why_too_few(1))),
]

PAGE = 4096
SIZES = (1, 2, 3, 9, 33, 360, 640, 2048)
"""Of blocks in pages: smaller than a launch's smallest CTA up to Llama's 8 MiB."""


def fill(pool: DevicePool, seed: int) -> np.ndarray:
    content = np.random.default_rng(seed).integers(0, 256, len(pool.tensor), dtype=np.uint8)
    pool.tensor.copy_(torch.from_numpy(content))
    torch.cuda.synchronize(pool.device_index)
    return content


def test_torch_sees_the_pool_in_place_and_its_allocator_does_not() -> None:
    torch.zeros(1, device="cuda:0")
    reserved = torch.cuda.memory_reserved(0)
    pool = DevicePool(40, 1024 * PAGE, 0)
    assert pool.address % PAGE == 0
    assert pool.tensor.data_ptr() == pool.address
    assert pool.tensor.device == torch.device("cuda:0")
    assert pool.tensor.dtype == torch.uint8
    assert pool.tensor.shape == (41 * pool.block_bytes,)
    assert not pool.tensor.any()
    view = pool.tensor.view(torch.bfloat16).view(41, 32, 2, -1)
    assert view[:, 5, 1].data_ptr() == pool.address + 11 * pool.block_bytes // 64
    assert torch.cuda.memory_reserved(0) == reserved
    pool.close()


def test_closing_gives_the_memory_back() -> None:
    driver = cuda_driver()
    DevicePool(1, PAGE, 0).close()
    free, _ = driver.memory_bytes(0)
    pool = DevicePool(256, 1024 * PAGE, 0)
    during, _ = driver.memory_bytes(0)
    assert free - during >= pool.num_bytes
    pool.close()
    after, _ = driver.memory_bytes(0)
    assert after > free - 64 * 2**20


def test_a_pool_that_does_not_fit_names_the_free_memory() -> None:
    with pytest.raises(ConfigError, match=r"needs .* GiB .* of GPU 0 .* GiB are free"):
        DevicePool(2**20, 8 * 2**20, 0)


@pytest.mark.parametrize("num_pages", SIZES)
def test_the_gpu_computes_the_checksums_that_the_cpu_does(num_pages: int) -> None:
    pool = DevicePool(6, num_pages * PAGE, 0)
    content = fill(pool, num_pages)
    for ids in ([4, 0, 2, 0, 5], [3], list(range(6))):
        expected = flowpath_native.checksum_blocks(content, ids, pool.block_bytes)
        assert pool.checksum(ids).tolist() == expected.tolist()
    pool.close()


def test_one_changed_bit_changes_the_checksum_of_its_block_alone() -> None:
    pool = DevicePool(8, 360 * PAGE, 0)
    content = fill(pool, 0)
    ids = list(range(8))
    before = pool.checksum(ids)
    place = 5 * pool.block_bytes + 777_777
    pool.tensor[place] = int(content[place]) ^ 8
    torch.cuda.synchronize(0)
    assert verify_blocks(pool, ids, before) == 5
    assert np.flatnonzero(pool.checksum(ids) != before).tolist() == [5]
    pool.close()


def test_many_blocks_are_checksummed_in_one_launch() -> None:
    pool = DevicePool(20_000, PAGE, 0)
    content = fill(pool, 1)
    ids = np.random.default_rng(2).permutation(20_000).tolist()
    expected = flowpath_native.checksum_blocks(content, ids, PAGE)
    assert (pool.checksum(ids) == expected).all()
    assert (pool.checksum(ids[:7]) == expected[:7]).all()
    pool.close()


@pytest.mark.parametrize("num_pages", SIZES)
def test_blocks_are_copied_inside_of_the_pool(num_pages: int) -> None:
    pool = DevicePool(12, num_pages * PAGE, 0)
    content = fill(pool, 3).reshape(13, -1)
    link = LocalBackend(pool).open_peer(pool.handle())
    sources, targets = [1, 3, 4, 1, 10], [2, 9, 8, 11, 6]
    report = link.write(sources, targets)
    assert report.num_calls == 1
    content[targets] = content[sources]
    assert (pool.tensor.cpu().numpy().reshape(13, -1) == content).all()
    assert verify_blocks(pool, targets, report.checksums) is None
    assert link.measure().gigabytes_per_second > 0
    link.close()
    pool.close()


@pytest.mark.skipif(why_too_few(2) is not None, reason=str(why_too_few(2)))
def test_the_link_between_two_gpus_has_a_rate_that_a_copy_comes_near_to() -> None:
    driver = cuda_driver()
    rate = driver.peer_gigabytes_per_second(0, driver.device_uuid(1))
    pools = [DevicePool(64, 1024 * PAGE, device) for device in (0, 1)]
    driver.enable_peer_access(0, 1)
    queue = driver.queue(0)
    copy = (pools[1].address, pools[0].address, pools[0].num_bytes)
    seconds = min(queue.copy_seconds([copy]) for _ in range(3))
    share = pools[0].num_bytes / seconds / 1e9 / rate
    assert 0.5 < share < 1.2, f"a copy reaches {share:.2f} of {rate:.0f} GB/s"
    queue.close()
    for pool in pools:
        pool.close()
