"""What the native memory structures promise at their edges, case by case."""

import numpy as np
import pytest
from flowpath_native import (
    SegmentAllocator,
    align,
    checksum_blocks,
    checksum_with,
    copy_runs,
    copy_runs_checksummed,
)


def allocator_with_free(
    num_blocks: int, min_remainder: int, free: list[tuple[int, int]]
) -> SegmentAllocator:
    allocator = SegmentAllocator(num_blocks, min_remainder)
    allocator.allocate(num_blocks)
    allocator.free(free)
    return allocator


def test_best_fit_takes_the_smallest_segment_that_fits_lowest_first() -> None:
    allocator = allocator_with_free(100, 0, [(0, 10), (20, 5), (40, 5), (60, 30)])
    assert allocator.allocate(4) == [(20, 4)]


def test_remainder_rule_passes_over_a_segment_that_would_leave_a_splinter() -> None:
    free = [(0, 10), (20, 12), (40, 20)]
    assert allocator_with_free(100, 4, free).allocate(9) == [(40, 9)]
    assert allocator_with_free(100, 4, free).allocate(10) == [(0, 10)]
    assert allocator_with_free(100, 50, free).allocate(9) == [(0, 9)]


def test_a_request_that_must_split_takes_the_largest_segments_first() -> None:
    allocator = allocator_with_free(100, 0, [(0, 3), (10, 8), (30, 6)])
    assert allocator.allocate(15) == [(10, 8), (30, 6), (0, 1)]


def test_nothing_is_taken_when_the_whole_request_does_not_fit() -> None:
    allocator = allocator_with_free(100, 0, [(0, 3), (10, 8)])
    assert allocator.allocate(12) is None
    assert allocator.allocate_like([6, 6]) is None
    assert allocator.allocate(12, tail=10) is None
    assert allocator.free_segments() == [(0, 3), (10, 8)]


def test_growth_continues_at_the_tail_and_spills_over() -> None:
    allocator = allocator_with_free(100, 0, [(10, 3), (50, 20)])
    assert allocator.allocate(2, tail=10) == [(10, 2)]
    assert allocator.allocate(5, tail=12) == [(12, 1), (50, 4)]


def test_growth_past_the_end_of_the_pool_goes_elsewhere() -> None:
    allocator = allocator_with_free(10, 0, [(0, 4)])
    assert allocator.allocate(2, tail=10) == [(0, 2)]


def test_mirrored_runs_stay_whole_where_no_segment_holds_the_total() -> None:
    allocator = allocator_with_free(100, 0, [(0, 6), (10, 4), (30, 5)])
    assert allocator.allocate_like([4, 6, 5]) == [(10, 4), (0, 6), (30, 5)]


def test_mirrored_runs_share_one_segment_that_holds_the_total() -> None:
    allocator = allocator_with_free(100, 0, [(0, 6), (30, 15)])
    assert allocator.allocate_like([4, 6, 5]) == [(30, 15)]
    assert allocator.allocate_like([]) == []


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ([(0, 5), (7, 4)], r"run 1 \(start=7, length=4\) covers blocks that are already free"),
        ([(0, 0)], r"run 0 \(start=0, length=0\) must be at least 1"),
        ([(0, 1), (18, 3)], r"run 1 \(start=18, length=3\) is out of range"),
        ([(-1, 2)], r"run 0 \(start=-1, length=2\) is out of range"),
        ([(0, 2**62), (2**62, 2**62)], r"run 0 .* is out of range"),
        ([(0, 5), (4, 2)], r"run 1 \(start=4, length=2\) .* given before in the same call"),
    ],
)
def test_a_wrong_free_names_the_run_and_changes_nothing(
    runs: list[tuple[int, int]], message: str
) -> None:
    allocator = allocator_with_free(20, 0, [(8, 2)])
    with pytest.raises(ValueError, match=message):
        allocator.free(runs)
    allocator.check()
    assert allocator.free_segments() == [(8, 2)]


def test_arguments_out_of_range_are_refused_by_name() -> None:
    allocator = SegmentAllocator(8, 2)
    with pytest.raises(ValueError, match="n=0 must be at least 1"):
        allocator.allocate(0)
    with pytest.raises(ValueError, match="tail=9 is out of range"):
        allocator.allocate(1, tail=9)
    with pytest.raises(ValueError, match="tail=3 does not follow an allocated block"):
        allocator.allocate(1, tail=3)
    with pytest.raises(ValueError, match=r"run_lengths\[1\]=0 must be at least 1"):
        allocator.allocate_like([100, 0])
    with pytest.raises(ValueError, match="num_blocks=0 is out of range"):
        SegmentAllocator(0, 0)
    with pytest.raises(ValueError, match="min_remainder=9 is out of range"):
        SegmentAllocator(8, 9)
    assert allocator.num_free == 8


def test_fragmentation_of_an_empty_pool_and_of_a_split_one() -> None:
    assert allocator_with_free(20, 0, [(0, 6), (10, 2)]).fragmentation == pytest.approx(0.25)
    full = SegmentAllocator(4, 0)
    assert full.fragmentation == 0.0
    full.allocate(4)
    assert (full.fragmentation, full.largest_free, full.num_segments) == (0.0, 0, 0)


@pytest.mark.parametrize(
    ("src", "dst", "copies"),
    [
        (list(range(5, 25)), list(range(90, 110)), [[5, 90, 20]]),
        ([5, 3, 4], [12, 10, 11], [[3, 10, 3]]),
        ([0, 1, 2], [2, 1, 0], [[2, 0, 1], [1, 1, 1], [0, 2, 1]]),
        ([7, 8, 7, 8], [0, 1, 4, 5], [[7, 0, 2], [7, 4, 2]]),
        ([], [], []),
    ],
)
def test_alignment_of_known_cases(src: list[int], dst: list[int], copies: list[list[int]]) -> None:
    assert align(src, dst).tolist() == copies


def test_alignment_cuts_at_the_maximum_length() -> None:
    assert align(range(7), range(7), 3).tolist() == [[0, 0, 3], [3, 3, 3], [6, 6, 1]]


def test_alignment_refuses_lists_that_do_not_pair() -> None:
    with pytest.raises(ValueError, match="src has 2 blocks, dst 1"):
        align([1, 2], [1])
    with pytest.raises(ValueError, match=r"pair 1 \(src=-2, dst=5\) is out of range"):
        align([1, -2], [4, 5])
    with pytest.raises(ValueError, match="dst: 4294967296 is not a 32-bit block number"):
        align([1], [2**32])
    with pytest.raises(ValueError, match="max_length=-1"):
        align([1], [1], -1)
    with pytest.raises(TypeError, match="src must be an int32 array or a sequence"):
        align(1.5, [1])  # type: ignore[arg-type]  # the error is the point


def test_alignment_reads_strided_and_wide_arrays() -> None:
    pairs = np.array([[4, 9], [5, 10]], dtype=np.int32)
    assert align(pairs[:, 0], pairs[:, 1]).tolist() == [[4, 9, 2]]
    wide = pairs.astype(np.int64)
    assert align(wide[:, 0].tolist(), wide[:, 1].tolist()).tolist() == [[4, 9, 2]]


@pytest.mark.parametrize("copy", [copy_runs, copy_runs_checksummed])
@pytest.mark.parametrize(
    ("run", "what"),
    [
        ((0, 3, 2), "is out of range"),
        ((5, 0, 2), "is out of range"),
        ((-1, 0, 1), "is out of range"),
        ((0, -1, 1), "is out of range"),
        ((2**31 - 1, 0, 2**31 - 1), "is out of range"),
        ((0, 0, 0), "must be at least 1"),
    ],
)
def test_a_run_outside_of_a_buffer_is_named_and_nothing_is_copied(
    copy: type, run: tuple[int, int, int], what: str
) -> None:
    src, dst = bytes(range(60)), bytearray(40)  # six and four blocks of ten bytes
    named = rf"run 1 \(src={run[0]}, dst={run[1]}, length={run[2]}\) .*{what}"
    with pytest.raises(ValueError, match=named):
        copy(dst, src, [(0, 0, 1), run], 10)
    assert dst == bytearray(40)


def test_a_part_of_a_block_at_the_end_of_a_buffer_is_no_block() -> None:
    with pytest.raises(ValueError, match="of 1 source and 1 target blocks"):
        copy_runs(bytearray(19), bytes(19), [(0, 0, 2)], 10)


def test_copy_targets_must_be_writable() -> None:
    with pytest.raises(BufferError):
        copy_runs(bytes(10), bytes(10), [(0, 0, 1)], 10)
    with pytest.raises(ValueError, match="block_bytes=0 must be at least 1"):
        copy_runs(bytearray(10), bytes(10), [(0, 0, 1)], 0)


def test_checksums_refuse_unknown_blocks_and_kernels() -> None:
    with pytest.raises(ValueError, match=r"block_ids\[1\]=2 of 2 blocks is out of range"):
        checksum_blocks(bytes(20), [0, 2], 10)
    with pytest.raises(ValueError, match=r"block_ids\[0\]=-1"):
        checksum_blocks(bytes(20), [-1], 10)
    with pytest.raises(ValueError, match="no checksum kernel abacus"):
        checksum_with("abacus", b"")
