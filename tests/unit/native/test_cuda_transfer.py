"""The kernels of ``native/cuda/transfer.cu``, compiled for the CPU: what they compute."""

import ctypes
import subprocess
from pathlib import Path

import flowpath_native
import numpy as np
import pytest
from numpy.typing import NDArray

from common.cuda.checksum import finish_checksums
from common.cuda.cupy_queue import SOURCE, _piece_shape
from common.cuda.driver import PieceCopies
from common.kv.layout import KVLayout
from common.transfer.head_copies import write_heads
from common.transfer.heads import NO_REST, plan_heads
from tests.support.source_tree import ROOT

NUM_BLOCKS = 9
PAGE = 4096
GRIDS = ((1, 32), (3, 64), (7, 128), (40, 64))
"""(CTAs, threads of each): fewer and more than there are chunks of blocks."""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    library = tmp_path_factory.mktemp("cuda") / "transfer.so"
    host = ROOT / "tests" / "support" / "cuda_on_cpu.cpp"
    flags = ["-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", "-w", f'-DCUDA_SOURCE="{SOURCE}"']
    subprocess.run(["c++", *flags, "-o", str(library), str(host)], check=True)
    return ctypes.CDLL(str(library))


def at(array: NDArray[np.generic]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def pools(num_pages: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    random = np.random.default_rng(num_pages)
    size = NUM_BLOCKS * num_pages * PAGE
    return random.integers(0, 256, size, dtype=np.uint8), np.full(size, 0xEE, dtype=np.uint8)


@pytest.mark.parametrize("num_pages", [1, 3, 9, 33])
@pytest.mark.parametrize(("num_ctas", "num_threads"), GRIDS)
def test_blocks_are_copied_and_checksummed_whatever_the_grid(
    kernels: ctypes.CDLL, num_pages: int, num_ctas: int, num_threads: int
) -> None:
    source, target = pools(num_pages)
    size = num_pages * PAGE
    sources = np.array([4, 1, 8, 4, 0], dtype=np.int32)
    targets = np.array([7, 0, 3, 2, 8], dtype=np.int32)
    sums = np.zeros(len(sources), dtype=np.uint64)
    kernels.launch_copy_blocks(
        num_ctas,
        num_threads,
        at(source),
        at(target),
        at(sources),
        at(targets),
        at(sums),
        len(sources),
        size // 16,
    )
    expected = flowpath_native.checksum_blocks(source, sources, size)
    assert finish_checksums(sums, size).tolist() == expected.tolist()
    whole = np.full((NUM_BLOCKS, size), 0xEE, dtype=np.uint8)
    whole[targets] = source.reshape(NUM_BLOCKS, size)[sources]
    assert (target.reshape(NUM_BLOCKS, size) == whole).all(), "and nothing else is touched"


@pytest.mark.parametrize("num_pages", [1, 7])
@pytest.mark.parametrize(("num_ctas", "num_threads"), GRIDS)
def test_checksums_alone_write_nothing(
    kernels: ctypes.CDLL, num_pages: int, num_ctas: int, num_threads: int
) -> None:
    source, _ = pools(num_pages)
    before, size = source.copy(), num_pages * PAGE
    ids = np.array([8, 0, 8, 5], dtype=np.int32)
    sums = np.zeros(len(ids), dtype=np.uint64)
    kernels.launch_sum_blocks(
        num_ctas, num_threads, at(source), at(ids), at(sums), len(ids), size // 16
    )
    expected = flowpath_native.checksum_blocks(source, ids, size)
    assert finish_checksums(sums, size).tolist() == expected.tolist()
    assert (source == before).all()


@pytest.mark.parametrize(("num_sources", "num_targets"), [(1, 2), (4, 1), (2, 6), (6, 4), (3, 3)])
@pytest.mark.parametrize(("num_ctas", "num_threads"), [(1, 32), (3, 64), (40, 32)])
def test_heads_are_copied_and_summed_as_on_the_cpu(
    kernels: ctypes.CDLL, num_sources: int, num_targets: int, num_ctas: int, num_threads: int
) -> None:
    layout = KVLayout(
        3, 4, 12, 16, "float16", kv_cache_dtype="float8_e4m3", scales=(0.5, 1, 2, 3, 4, 5)
    )
    random = np.random.default_rng(1)
    source_ids = np.array([4, 1, 8, 4, 0], dtype=np.int32)
    target_ids = np.array([7, 0, 3, 2, 8], dtype=np.int32)
    for transfer in plan_heads(layout, num_sources, num_targets):
        size = transfer.target_block_bytes
        source = random.integers(0, 256, NUM_BLOCKS * transfer.source_block_bytes, dtype=np.uint8)
        target, expected = (np.full(NUM_BLOCKS * size, 0xEE, np.uint8) for _ in range(2))
        report = write_heads(expected.data, source.data, transfer, (source_ids, target_ids))
        copies = PieceCopies(
            *(0, 0, source_ids, target_ids),
            transfer.pieces.numbers(),
            (transfer.rest or NO_REST).numbers(),
            *(transfer.source_block_bytes, size),
        )
        shape, num_vectors = _piece_shape(copies)
        assert num_vectors * 16 == transfer.written_bytes
        sums = np.zeros(len(source_ids), dtype=np.uint64)
        numbers = np.array(shape, dtype=np.uint32)
        kernels.launch_copy_pieces(
            *(num_ctas, num_threads, at(source), at(target), at(source_ids), at(target_ids)),
            *(at(sums), len(source_ids), at(numbers)),
        )
        assert (target == expected).all()
        assert sums.tolist() == report.partial_sums.tolist()


def test_the_kernels_lie_where_an_installed_program_finds_them() -> None:
    assert Path(ROOT, "native", "cuda", "transfer.cu") == SOURCE
    assert (
        "install(DIRECTORY cuda/ DESTINATION native/cuda"
        in (ROOT / "native" / "CMakeLists.txt").read_text()
    ), "a wheel has it at the same place beside the packages"
