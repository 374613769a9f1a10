"""Two processes, with a pool each on one GPU or on two, over CUDA IPC."""

import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest
import torch

from common.errors import TransferError
from common.kv.device_pool import DevicePool
from common.kv.layout import KVLayout
from common.transfer import cuda_movers
from common.transfer.cuda_ipc import (
    CudaIpcBackend,
    gather_buffer_backend,
    layerwise_backend,
)
from tests.gpu.pool_owner import native_checksums, pack_handle, unpack_handle
from tests.support.gpus import num_gpus, why_too_few
from tests.support.source_tree import ROOT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(why_too_few(1) is not None, reason=str(why_too_few(1))),
]

NUM_BLOCKS = 48
LAYOUT = KVLayout(30, 64, 3, 64, "bfloat16")
BLOCK = LAYOUT.block_bytes
ENDS_SECONDS = 60.0


class Owner:
    """The other process, which owns the pool that is written."""

    def __init__(
        self,
        device: int,
        num_blocks: int = NUM_BLOCKS,
        block_bytes: int = BLOCK,
        visible: str | None = None,
    ) -> None:
        arguments = [str(number) for number in (device, num_blocks, block_bytes)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.pool_owner", *arguments],
            cwd=ROOT,
            env=None if visible is None else os.environ | {"CUDA_VISIBLE_DEVICES": visible},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.handle = unpack_handle(self.process.stdout.readline())

    def ask(self, what: str, ids: list[int] | None = None) -> list[int]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(what, *(ids or []), file=self.process.stdin, flush=True)
        answer: list[int] = json.loads(self.process.stdout.readline())
        return answer

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.communicate(timeout=ENDS_SECONDS)


@pytest.fixture(params=[0, 1], ids=["one GPU", "two GPUs"])
def target_device(request: pytest.FixtureRequest) -> int:
    device: int = request.param
    if device >= num_gpus():
        pytest.skip(f"needs {device + 1} GPUs, and there are {num_gpus()}")
    return device


@pytest.fixture
def start_owner(target_device: int) -> Iterator[Callable[..., Owner]]:
    owners: list[Owner] = []

    def start(num_blocks: int = NUM_BLOCKS, block_bytes: int = BLOCK) -> Owner:
        owners.append(Owner(target_device, num_blocks, block_bytes))
        return owners[-1]

    yield start
    for owner in owners:
        owner.end()


def filled_pool(num_blocks: int = NUM_BLOCKS, block_bytes: int = BLOCK) -> DevicePool:
    pool = DevicePool(num_blocks, block_bytes, 0)
    content = np.random.default_rng(0).integers(0, 256, len(pool.tensor), dtype=np.uint8)
    pool.tensor.copy_(torch.from_numpy(content))
    torch.cuda.synchronize(0)
    return pool


@pytest.fixture
def source() -> Iterator[DevicePool]:
    pool = filled_pool()
    yield pool
    pool.close()


def churned(count: int, seed: int) -> tuple[list[int], list[int]]:
    chance = random.Random(seed)
    blocks = range(NUM_BLOCKS)
    return [chance.choice(blocks) for _ in range(count)], chance.sample(blocks, count)


def test_scattered_blocks_arrive_whole_and_nothing_else_is_touched(
    start_owner: Callable[..., Owner], source: DevicePool
) -> None:
    owner = start_owner()
    link = CudaIpcBackend(source).open_peer(owner.handle)
    sources, targets = churned(31, 0)
    report = link.write(sources, targets)
    assert report.num_calls == 1
    expected = native_checksums(source, sources)
    assert report.checksums.tolist() == expected, "the source's checksums"
    assert owner.ask("checksum", targets) == expected, "the target's, by its GPU"
    assert owner.ask("native", targets) == expected, "and by its CPU"
    others = sorted(set(range(NUM_BLOCKS + 1)) - set(targets))
    assert owner.ask("poisoned") == others
    link.close()


@pytest.mark.parametrize("num_runs", [1, cuda_movers.MAX_PEER_COPIES, 8])
def test_runs_arrive_by_copies_and_by_launches(
    start_owner: Callable[..., Owner], source: DevicePool, target_device: int, num_runs: int
) -> None:
    owner = start_owner()
    link = CudaIpcBackend(source).open_peer(owner.handle)
    starts = [6 * i for i in range(num_runs)]
    sources = [start + i for start in starts for i in range(3)]
    targets = [start + 2 + i for start in reversed(starts) for i in range(3)]
    report = link.write(sources, targets)
    is_copied = target_device != 0 and num_runs <= cuda_movers.MAX_PEER_COPIES
    assert report.num_calls == (num_runs if is_copied else 1)
    assert owner.ask("native", targets) == native_checksums(source, sources)
    assert report.checksums.tolist() == native_checksums(source, sources)
    assert owner.ask("poisoned") == sorted(set(range(NUM_BLOCKS + 1)) - set(targets))
    link.close()


def test_five_hundred_random_writes_arrive_whole(
    start_owner: Callable[..., Owner], source: DevicePool
) -> None:
    owner = start_owner()
    link = CudaIpcBackend(source).open_peer(owner.handle)
    for number in range(500):
        sources, targets = churned(1 + number % NUM_BLOCKS, number)
        report = link.write(sources, targets)
        assert owner.ask("checksum", targets) == report.checksums.tolist(), f"write {number}"
        if number % 100 == 0:
            assert owner.ask("native", targets) == native_checksums(source, sources)
    link.close()


@pytest.mark.parametrize("block_bytes", [4096, 36864, 8 * 2**20])
def test_blocks_of_every_size_arrive(start_owner: Callable[..., Owner], block_bytes: int) -> None:
    source = filled_pool(16, block_bytes)
    owner = start_owner(16, block_bytes)
    link = CudaIpcBackend(source).open_peer(owner.handle)
    sources, targets = [3, 9, 1, 14, 0, 5, 7], [8, 2, 15, 4, 11, 6, 0]
    report = link.write(sources, targets)
    assert owner.ask("native", targets) == native_checksums(source, sources)
    assert report.checksums.tolist() == native_checksums(source, sources)
    link.close()
    source.close()


def test_the_comparisons_bring_the_same_bytes_in_more_calls(
    start_owner: Callable[..., Owner], source: DevicePool
) -> None:
    owner = start_owner()
    sources, targets = churned(9, 4)
    for backend, num_calls in (
        (layerwise_backend(source, LAYOUT), 9 * 30 * 2),
        (gather_buffer_backend(source), 2),
    ):
        owner.ask("poison")
        link = backend.open_peer(owner.handle)
        report = link.write(sources, targets)
        assert report.num_calls == num_calls
        assert owner.ask("native", targets) == native_checksums(source, sources)
        assert report.checksums.tolist() == native_checksums(source, sources)
        assert owner.ask("poisoned") == sorted(set(range(NUM_BLOCKS + 1)) - set(targets))
        link.close()


def test_the_link_is_as_fast_as_the_hardware(
    start_owner: Callable[..., Owner], source: DevicePool
) -> None:
    owner = start_owner()
    link = CudaIpcBackend(source).open_peer(owner.handle)
    rate = link.measure()
    assert not rate.is_flagged, rate
    assert owner.ask("poisoned") == list(range(NUM_BLOCKS + 1)), "measuring writes nothing"
    link.close()


def test_a_pool_is_opened_by_several_links_at_once(
    start_owner: Callable[..., Owner], source: DevicePool
) -> None:
    owner = start_owner()
    first = CudaIpcBackend(source).open_peer(owner.handle)
    second = CudaIpcBackend(source).open_peer(owner.handle)
    first.close()
    second.write([1], [2])
    second.close()
    third = CudaIpcBackend(source).open_peer(owner.handle)
    third.write([5], [6])
    assert owner.ask("native", [2, 6]) == native_checksums(source, [1, 5])
    third.close()


def test_a_handle_of_a_pool_that_is_gone_is_refused(
    start_owner: Callable[..., Owner], source: DevicePool
) -> None:
    owner = start_owner()
    owner.end()
    with pytest.raises(TransferError, match="opening another process's memory"):
        CudaIpcBackend(source).open_peer(owner.handle)
    fresh = start_owner()
    link = CudaIpcBackend(source).open_peer(fresh.handle)
    link.write([1], [2])
    link.close()


def test_the_owner_outlives_a_writer_that_is_killed_in_the_middle(target_device: int) -> None:
    pool = filled_pool()
    expected = pool.checksum([0]).tolist()
    for _ in range(2):
        writer = subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.pool_writer", str(target_device)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert writer.stdin is not None
        assert writer.stdout is not None
        print(pack_handle(pool.handle()), file=writer.stdin, flush=True)
        for _ in range(20):
            assert writer.stdout.readline() == f"{NUM_BLOCKS}\n"
        writer.kill()
        writer.communicate(timeout=ENDS_SECONDS)
        pool.tensor.zero_()
        torch.cuda.synchronize(0)
        zeros = pool.checksum([0, NUM_BLOCKS - 1]).tolist()
        assert zeros[0] == zeros[1] != expected[0], "nobody writes any more"
        assert native_checksums(pool, [0, NUM_BLOCKS - 1]) == zeros
    pool.close()


def test_the_writer_outlives_an_owner_that_is_killed_in_the_middle(
    start_owner: Callable[..., Owner], source: DevicePool
) -> None:
    owner = start_owner()
    link = CudaIpcBackend(source).open_peer(owner.handle)
    blocks = list(range(NUM_BLOCKS))
    is_writing, is_enough = threading.Event(), threading.Event()
    outcomes: list[str] = []

    def write() -> None:
        num_after = 0
        while num_after < 20:
            try:
                link.write(blocks, blocks[::-1])
                outcomes.append("done")
            except TransferError as error:
                outcomes.append(str(error))
            is_writing.set()
            num_after += is_enough.is_set()

    thread = threading.Thread(target=partial(write), daemon=True)
    thread.start()
    assert is_writing.wait(ENDS_SECONDS)
    owner.process.kill()
    owner.process.communicate(timeout=ENDS_SECONDS)
    is_enough.set()
    thread.join(ENDS_SECONDS)
    assert not thread.is_alive(), "a write hangs"
    link.close()
    fresh = start_owner()
    again = CudaIpcBackend(source).open_peer(fresh.handle)
    report = again.write([3], [4])
    assert fresh.ask("native", [4]) == report.checksums.tolist(), "the GPU serves us still"
    again.close()


@pytest.mark.skipif(why_too_few(2) is not None, reason=str(why_too_few(2)))
def test_processes_that_each_see_only_their_own_gpu_write_as_fast_as_others() -> None:
    owner = Owner(0, visible="1")
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.own_gpu_writer"],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "0"},
        input=pack_handle(owner.handle) + "\n",
        stdout=subprocess.PIPE,
        text=True,
        timeout=ENDS_SECONDS,
        check=True,
    )
    written = json.loads(done.stdout)
    ids = [int(target) for target in written["checksums"]]
    assert owner.ask("native", ids) == list(written["checksums"].values())
    others = sorted(set(range(NUM_BLOCKS + 1)) - set(ids))
    assert owner.ask("poisoned") == others
    assert written["num_devices"] == 1
    assert not written["is_flagged"], f"reads at {written['gigabytes_per_second']:.0f} GB/s"
    owner.end()
