from dataclasses import replace

import pytest

from common.errors import ConfigError, TransferError
from common.kv.device_pool import DevicePool
from common.kv.layout import KVLayout
from common.transfer.bench_cuda import TRANSPORTS, Place, _ways, backend_of
from tests.support.fake_cuda import FakeDriver, FakeGpus

LAYOUT = KVLayout(num_layers=2, block_size=16, num_kv_heads=1, head_dim=32, dtype="float32")


def there() -> tuple[FakeDriver, Place]:
    gpus = FakeGpus()
    driver = gpus.process()
    source = DevicePool(8, LAYOUT.block_bytes, 0, driver=driver)
    target = DevicePool(8, LAYOUT.block_bytes, 0, driver=gpus.process())
    for block in range(8):
        source.tensor[block * LAYOUT.block_bytes :] = block + 1
    handle = replace(target.handle(), pid=1)
    address = driver.open_memory(0, handle.ipc_handle) + handle.offset
    return driver, Place(source, handle, address, driver.queue(0))


@pytest.mark.parametrize("way", [*TRANSPORTS, "copies", "launch:24"])
def test_every_way_writes_what_is_checked(way: str) -> None:
    driver, place = there()
    link = backend_of(way, place.source, LAYOUT).open_peer(place.handle)
    driver.calls.clear()
    sources, targets = [0, 1, 2, 5], [4, 5, 7, 0]
    report = link.write(sources, targets)
    place.check(targets, report.checksums.tolist())
    copies = [call.split()[0] for call in driver.calls if call.startswith("copy")]
    assert copies == {
        "layerwise": ["copy"] * (4 * 2 * 2),
        "gather_buffer": ["copy_blocks"] * 2,
        "copies": ["copy"] * 3,
    }.get(way, ["copy_blocks"])
    assert ("copy_blocks 4 ctas 24" in driver.calls) == (way == "launch:24")
    place.plain_copy(place.source.num_bytes)
    with pytest.raises(TransferError, match="not those of the source"):
        place.check(targets, report.checksums.tolist())


def test_only_known_ways_are_taken() -> None:
    assert _ways("cuda_ipc,copies,launch:16") == ["cuda_ipc", "copies", "launch:16"]
    for text in ("launch:", "launch:x", "shm"):
        with pytest.raises(ConfigError, match="unknown"):
            _ways(text)
