"""Plans of KV heads between workers of different tensor parallelism, and their execution."""

from collections.abc import Iterator

import flowpath_native
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from common.cuda.driver import CudaError
from common.errors import ConfigError, TransferError
from common.kv.layout import KVLayout
from common.transfer.cuda_heads import HeadMover
from common.transfer.head_copies import block_checksums, write_heads
from common.transfer.heads import HeadTransfer, Pieces, Rest, plan_heads, rank_layout
from tests.support.fake_cuda import FakeGpus

FP8 = "float8_e4m3"
NUM_BLOCKS = 5


@st.composite
def layouts(draw: st.DrawFn) -> KVLayout:
    is_quantised = draw(st.booleans())
    num_layers = draw(st.integers(1, 3))
    return KVLayout(
        num_layers=num_layers,
        block_size=draw(st.sampled_from([1, 4, 16])),
        num_kv_heads=draw(st.sampled_from([1, 2, 4, 6, 8, 12])),
        head_dim=draw(st.sampled_from([8, 16, 24])),
        dtype=draw(st.sampled_from(["float32", "bfloat16"])),
        kv_cache_dtype=FP8 if is_quantised else "auto",
        scales=tuple(0.5 + 0.25 * i for i in range(2 * num_layers)) if is_quantised else (),
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[KVLayout, int, int]:
    layout = draw(layouts())
    counts = [n for n in range(1, layout.num_kv_heads + 1) if layout.num_kv_heads % n == 0]
    return layout, draw(st.sampled_from(counts)), draw(st.sampled_from(counts))


def touched(transfer: HeadTransfer) -> Iterator[tuple[int, int, int]]:
    """Yield (source byte or -1, target byte, bytes) of every contiguous part."""
    pieces = transfer.pieces
    for i in range(pieces.count):
        yield (
            pieces.source_offset + i * pieces.source_stride,
            pieces.target_offset + i * pieces.target_stride,
            pieces.num_bytes,
        )
    if transfer.rest is not None:
        rest = transfer.rest
        yield rest.source_offset, rest.target_offset, rest.num_bytes
        yield -1, rest.target_offset + rest.num_bytes, rest.num_zeros


def rank_pools(
    layout: KVLayout, num_ranks: int, heads: NDArray[np.uint8]
) -> list[NDArray[np.uint8]]:
    """Lay (blocks, layers, planes, tokens, heads, bytes of a head) out in the ranks' pools."""
    pools = []
    for part in np.split(heads, num_ranks, axis=4):
        own = rank_layout(layout, num_ranks)
        pool = np.zeros((len(heads), own.block_bytes), dtype=np.uint8)
        pool[:, : own.payload_bytes] = part.reshape(len(heads), -1)
        if layout.is_quantised:
            scales = np.asarray(layout.scales, np.float32).view(np.uint8)
            pool[:, own.trailer_offset : own.trailer_offset + len(scales)] = scales
        pools.append(pool)
    return pools


def random_heads(layout: KVLayout, seed: int) -> NDArray[np.uint8]:
    shape = (NUM_BLOCKS, layout.num_layers, layout.planes, layout.block_size, layout.num_kv_heads)
    size = (*shape, layout.head_dim * layout.element_bytes)
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(cases())
def test_every_head_is_sent_once_and_every_byte_of_a_target_written_once(
    case: tuple[KVLayout, int, int],
) -> None:
    layout, num_sources, num_targets = case
    source, target = rank_layout(layout, num_sources), rank_layout(layout, num_targets)
    reads = np.zeros((num_sources, source.block_bytes), dtype=np.int32)
    writes = np.zeros((num_targets, target.block_bytes), dtype=np.int32)
    heads = np.zeros(layout.num_kv_heads, dtype=np.int32)
    for transfer in plan_heads(layout, num_sources, num_targets):
        heads[transfer.first_head : transfer.first_head + transfer.num_heads] += 1
        num_bytes = 0
        for begin, place, size in touched(transfer):
            if begin >= 0:
                reads[transfer.source_rank, begin : begin + size] += 1
            writes[transfer.target_rank, place : place + size] += 1
            num_bytes += size
        assert num_bytes == transfer.written_bytes
    assert (heads == 1).all()
    assert (reads[:, : source.payload_bytes] == 1).all()
    assert (writes == 1).all()


@settings(max_examples=120, deadline=None, derandomize=True)
@given(cases(), st.integers(0, 2**32 - 1))
def test_executed_plans_give_every_rank_its_heads_and_the_checksums_of_its_blocks(
    case: tuple[KVLayout, int, int], seed: int
) -> None:
    layout, num_sources, num_targets = case
    heads = random_heads(layout, seed)
    sources = rank_pools(layout, num_sources, heads)
    expected = rank_pools(layout, num_targets, heads)
    random = np.random.default_rng(seed)
    source_ids = random.permutation(NUM_BLOCKS)[:3].tolist()
    target_ids = random.permutation(NUM_BLOCKS)[:3].tolist()
    targets = [np.full_like(pool, 0xEE) for pool in expected]
    parts: list[list[NDArray[np.uint64]]] = [[] for _ in targets]
    for transfer in plan_heads(layout, num_sources, num_targets):
        report = write_heads(
            targets[transfer.target_rank].reshape(-1).data,
            sources[transfer.source_rank].reshape(-1).data,
            transfer,
            (source_ids, target_ids),
        )
        assert report.num_bytes == 3 * transfer.written_bytes
        parts[transfer.target_rank].append(report.partial_sums)
    untouched = np.setdiff1d(np.arange(NUM_BLOCKS), target_ids)
    for target, whole, sums in zip(targets, expected, parts, strict=True):
        assert (target[target_ids] == whole[source_ids]).all()
        assert (target[untouched] == 0xEE).all()
        size = target.shape[1]
        found = block_checksums(sums, size)
        assert found.tolist() == [
            flowpath_native.checksum(target[block].tobytes()) for block in target_ids
        ]


def test_equally_many_ranks_send_whole_blocks() -> None:
    for dtype, scales in (("auto", ()), (FP8, (1.0,) * 64)):
        layout = KVLayout(32, 16, 8, 128, "bfloat16", kv_cache_dtype=dtype, scales=scales)
        size = rank_layout(layout, 4).block_bytes
        plan = plan_heads(layout, 4, 4)
        assert [(t.source_rank, t.target_rank) for t in plan] == [(r, r) for r in range(4)]
        for transfer in plan:
            assert transfer.is_whole
            assert transfer.pieces == Pieces(0, 0, size, 1, size, size)
            assert transfer.rest is None


def test_one_rank_sends_two_ranks_half_of_each_token() -> None:
    layout = KVLayout(3, 16, 8, 64, "float16", kv_cache_dtype=FP8, scales=(1.0,) * 6)
    first, second = plan_heads(layout, 1, 2)
    count = 3 * 2 * 16
    assert first.pieces == Pieces(0, 0, 4 * 64, count, 8 * 64, 4 * 64)
    assert second.pieces == Pieces(4 * 64, 0, 4 * 64, count, 8 * 64, 4 * 64)
    own = rank_layout(layout, 2)
    zeros = own.block_bytes - own.payload_bytes - 32
    assert first.rest == second.rest == Rest(layout.payload_bytes, own.payload_bytes, 32, zeros)


def test_of_two_ranks_the_first_brings_what_follows_the_heads() -> None:
    layout = KVLayout(3, 16, 6, 40, "float16")
    plan = plan_heads(layout, 2, 3)
    assert [(t.source_rank, t.target_rank, t.first_head, t.num_heads) for t in plan] == [
        *((0, 0, 0, 2), (0, 1, 2, 1)),
        *((1, 1, 3, 1), (1, 2, 4, 2)),
    ]
    own = rank_layout(layout, 3)
    assert own.block_bytes > own.payload_bytes
    assert [transfer.rest is not None for transfer in plan] == [True, True, False, True]


def test_what_the_ranks_do_not_divide_is_refused() -> None:
    layout = KVLayout(1, 16, 4, 64, "float16")
    for counts in ((3, 2), (2, 3), (8, 1), (0, 1)):
        with pytest.raises(ConfigError, match="4 KV heads are not divided by"):
            plan_heads(layout, *counts)


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (([0, 1], [2, 2]), "given twice"),
        (([0, NUM_BLOCKS], [0, 1]), r"src_ids\[1\]=5 of 5 blocks is out of range"),
        (([0, 1], [0, -1]), r"dst_ids\[1\]=-1 of 5 blocks is out of range"),
        (([0, 1], [0]), "differs in length"),
        (([0, 2**31], [0, 1]), "cannot write heads of 2 blocks"),
    ],
)
def test_bad_pairs_are_refused_and_nothing_is_written(
    pairs: tuple[list[int], list[int]], message: str
) -> None:
    layout = KVLayout(1, 4, 2, 16, "float32")
    transfer = plan_heads(layout, 1, 2)[0]
    (source,) = rank_pools(layout, 1, random_heads(layout, 1))
    target = np.full(NUM_BLOCKS * transfer.target_block_bytes, 0xEE, np.uint8)
    with pytest.raises(TransferError, match=message):
        write_heads(target.data, source.reshape(-1).data, transfer, pairs)
    assert (target == 0xEE).all()


@pytest.mark.parametrize(
    ("pieces", "rest"),
    [
        ((0, 0, 64, 64, 64, 72), (0, 0, 0, 0)),  # past the target's end
        ((0, 0, 64, 64, 72, 64), (0, 0, 0, 0)),
        ((8, 0, 64, 64, 64, 64), (0, 0, 0, 0)),
        ((0, -8, 64, 2, 64, 64), (0, 0, 0, 0)),
        ((0, 4, 64, 2, 64, 64), (0, 0, 0, 0)),  # no whole words
        ((0, 0, 60, 2, 64, 64), (0, 0, 0, 0)),
        ((0, 0, 64, 0, 64, 64), (0, 0, 0, 0)),
        ((0, 0, 64, 2, 32, 64), (0, 0, 0, 0)),
        ((0, 0, 64, 2**62, 64, 64), (0, 0, 0, 0)),
        ((0, 0, 64, 2, 2**62, 64), (0, 0, 0, 0)),
        ((0, 0, 64, 2, 64, 64), (4096, 0, 8, 0)),
        ((0, 0, 64, 2, 64, 64), (0, 4088, 8, 8)),
        ((0, 0, 64, 2, 64, 64), (0, 0, 0, -8)),
    ],
)
def test_a_plan_that_leaves_the_block_is_refused(
    pieces: tuple[int, int, int, int, int, int], rest: tuple[int, int, int, int]
) -> None:
    target = bytearray(4096)
    with pytest.raises(ValueError, match="out of range"):
        flowpath_native.copy_pieces(
            *(target, bytes(4096), [0], [0]),
            pieces=pieces,
            rest=rest,
            src_block_bytes=4096,
            dst_block_bytes=4096,
        )
    assert not any(target)


def test_a_gpu_moves_heads_in_one_launch_a_pair_of_ranks() -> None:
    layout = KVLayout(2, 4, 4, 16, "float16")
    heads = random_heads(layout, 3)
    (source,), expected = rank_pools(layout, 1, heads), rank_pools(layout, 2, heads)
    driver = FakeGpus(num_devices=2).process()
    start = driver.allocate(0, source.size)
    driver.bytes_at(start, source.size)[:] = source.reshape(-1)
    mover = HeadMover(driver, 0, num_ctas=7)
    source_ids, target_ids = np.array([4, 0, 2], np.int32), np.array([1, 3, 0], np.int32)
    for transfer, whole in zip(plan_heads(layout, 1, 2), expected, strict=True):
        place = driver.allocate(1, whole.size)
        part = mover.move(transfer, (start, place), source_ids, target_ids)
        written = driver.bytes_at(place, whole.size).reshape(whole.shape)
        assert (written[target_ids] == whole[source_ids]).all()
        sums = block_checksums([part], whole.shape[1])
        assert sums.tolist() == [flowpath_native.checksum(block) for block in whole[source_ids]]
    assert driver.calls.count("copy_pieces 3 ctas 7") == 2
    driver.failing.add("copy_pieces")
    with pytest.raises(CudaError, match="the test says so"):
        mover.move(plan_heads(layout, 1, 2)[0], (start, start), source_ids, target_ids)
    mover.close()
