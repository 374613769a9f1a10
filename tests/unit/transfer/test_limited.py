from collections.abc import Iterator
from threading import Event, Thread
from time import perf_counter

import pytest

from common.kv.pool import KVPool
from common.traffic.shared_link import QUANTUM_SECONDS, SharedLink
from common.transfer.limited import limit_backends
from common.transfer.shm import ShmBackend

BLOCK = 4096
NUM_BLOCKS = 16


@pytest.fixture
def pools() -> Iterator[tuple[KVPool, KVPool]]:
    source, target = KVPool(NUM_BLOCKS, BLOCK), KVPool(NUM_BLOCKS, BLOCK)
    for block in range(NUM_BLOCKS):
        source.buffer[block * BLOCK : (block + 1) * BLOCK] = bytes([block]) * BLOCK
    yield source, target
    source.close()
    target.close()


def test_a_write_takes_the_fabrics_time_and_says_so(pools: tuple[KVPool, KVPool]) -> None:
    source, target = pools
    fabric = SharedLink(BLOCK * 100)
    backend = limit_backends({"shm": ShmBackend(source)}, fabric)["shm"]
    link = backend.open_peer(target.handle())
    began = perf_counter()
    report = link.write([1, 2, 3, 7, 8], [0, 1, 2, 3, 4])
    assert perf_counter() - began >= report.seconds >= 0.05 - QUANTUM_SECONDS - 1e-9
    assert (report.num_blocks, report.num_calls, report.num_bytes) == (5, 2, 5 * BLOCK)
    assert target.buffer[4 * BLOCK : 5 * BLOCK].tobytes() == bytes([8]) * BLOCK
    assert fabric.stats().kv_bytes == 5 * BLOCK
    link.close()


def test_a_link_behind_the_fabric_is_measured_no_faster_than_it_and_not_flagged(
    pools: tuple[KVPool, KVPool],
) -> None:
    source, target = pools
    backend = limit_backends({"shm": ShmBackend(source)}, SharedLink(1_000_000))["shm"]
    assert (backend.name, backend.is_networked) == ("shm", True)
    link = backend.open_peer(target.handle())
    rate = link.measure()
    assert rate.gigabytes_per_second == pytest.approx(0.001)
    assert not rate.is_flagged
    link.close()


def test_peers_share_one_fabric(pools: tuple[KVPool, KVPool]) -> None:
    source, target = pools
    fabric = SharedLink(1)
    backend = limit_backends({"shm": ShmBackend(source)}, fabric)["shm"]
    first, second = backend.open_peer(target.handle()), backend.open_peer(target.handle())
    done = [Event(), Event()]

    def write(number: int) -> None:
        (first, second)[number].write([number], [number])
        done[number].set()

    threads = [Thread(target=write, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    assert not any(event.is_set() for event in done)
    fabric.lift()
    for thread in threads:
        thread.join(10)
    assert all(event.is_set() for event in done)
    assert fabric.stats().kv_bytes == 2 * BLOCK
    first.close()
    second.close()


def test_a_fabric_without_limit_changes_no_transport(pools: tuple[KVPool, KVPool]) -> None:
    backends = {"shm": ShmBackend(pools[0])}
    assert limit_backends(backends, SharedLink(0)) is backends
