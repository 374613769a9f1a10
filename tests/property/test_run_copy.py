"""Run copies against slices of bytearrays."""

import numpy as np
import pytest
from flowpath_native import (
    checksum,
    checksum_blocks,
    copy_runs,
    copy_runs_checksummed,
    copy_streamed,
)
from hypothesis import given, settings
from hypothesis import strategies as st

Copy = tuple[int, int, int]
BLOCKS = 12


@st.composite
def plans(draw: st.DrawFn) -> list[Copy]:
    runs: list[Copy] = []
    for _ in range(draw(st.integers(0, 5))):
        length = draw(st.integers(1, BLOCKS))
        start = st.integers(0, BLOCKS - length)
        runs.append((draw(start), draw(start), length))
    return runs


def copy_reference(dst: bytearray, src: bytes, runs: list[Copy], block_bytes: int) -> None:
    for a, b, n in runs:
        dst[b * block_bytes : (b + n) * block_bytes] = src[a * block_bytes : (a + n) * block_bytes]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(plans(), st.integers(1, 300), st.integers(0, 2**32 - 1))
def test_copies_and_checksums_equal_the_reference(
    runs: list[Copy], block_bytes: int, seed: int
) -> None:
    src = np.random.default_rng(seed).bytes(BLOCKS * block_bytes)
    expected = bytearray(BLOCKS * block_bytes)
    copy_reference(expected, src, runs, block_bytes)
    rows = np.array(runs, dtype=np.int32).reshape(-1, 3)

    plain = bytearray(len(expected))
    assert copy_runs(plain, src, rows, block_bytes) == sum(n for _, _, n in runs) * block_bytes
    assert plain == expected

    summed = bytearray(len(expected))
    sums = copy_runs_checksummed(summed, src, runs, block_bytes)
    assert summed == expected
    sources = [a + i for a, _, n in runs for i in range(n)]
    assert sums.tolist() == [
        checksum(src[block * block_bytes : (block + 1) * block_bytes]) for block in sources
    ]
    assert sums.tolist() == checksum_blocks(src, sources, block_bytes).tolist()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(plans(), st.integers(1, 100))
def test_runs_within_one_buffer_copy_in_order_even_where_they_overlap(
    runs: list[Copy], block_bytes: int
) -> None:
    pool = bytearray(np.random.default_rng(0).bytes(BLOCKS * block_bytes))
    expected = bytearray(pool)
    for run in runs:
        copy_reference(expected, bytes(expected), [run], block_bytes)
    copy_runs(pool, pool, runs, block_bytes)
    assert pool == expected


def test_a_block_larger_than_one_cache_piece_keeps_its_checksum() -> None:
    src = np.random.default_rng(5).bytes(3 * 50_001)
    dst = bytearray(len(src))
    sums = copy_runs_checksummed(dst, src, [(0, 0, 3)], 50_001)
    assert dst == src
    assert sums.tolist() == [checksum(src[i * 50_001 : (i + 1) * 50_001]) for i in range(3)]


@pytest.mark.parametrize("offset", [0, 32, 64, 8, 1])
@pytest.mark.parametrize("block_bytes", [256 * 1024, 64 * 1024 + 512, 99_999, 300])
def test_large_copies_past_the_caches_are_whole_wherever_the_target_begins(
    offset: int, block_bytes: int
) -> None:
    num_blocks = 2_500_000 // block_bytes
    src = np.random.default_rng(7).bytes(num_blocks * block_bytes)
    room = np.full(len(src) + 4096, 0xEE, dtype=np.uint8)
    start = -room.ctypes.data % 4096 + offset
    dst = room[start : start + len(src)]
    order = np.random.default_rng(8).permutation(num_blocks)
    runs = [(int(a), b, 1) for b, a in enumerate(order)]
    sums = copy_runs_checksummed(dst, src, runs, block_bytes)
    blocks = [src[a * block_bytes : (a + 1) * block_bytes] for a in order]
    assert dst.tobytes() == b"".join(blocks)
    assert sums.tolist() == [checksum(block) for block in blocks]
    assert (room[:start] == 0xEE).all()
    assert (room[start + len(src) :] == 0xEE).all()


@pytest.mark.parametrize("offset", [0, 32, 1])
@pytest.mark.parametrize("num_bytes", [0, 1, 63, 64, 65, 4096, 1_000_001])
def test_a_streamed_copy_is_whole_and_touches_nothing_else(offset: int, num_bytes: int) -> None:
    src = np.random.default_rng(9).bytes(num_bytes)
    room = np.full(num_bytes + 4096, 0xEE, dtype=np.uint8)
    start = -room.ctypes.data % 2048 + offset
    copy_streamed(room[start : start + num_bytes], src)
    assert room[start : start + num_bytes].tobytes() == src
    assert (room[:start] == 0xEE).all()
    assert (room[start + num_bytes :] == 0xEE).all()


def test_a_streamed_copy_between_buffers_of_different_sizes_is_refused() -> None:
    with pytest.raises(ValueError, match="src has 3 bytes, dst 4"):
        copy_streamed(bytearray(4), bytes(3))
