"""The native kernels of a decoder layer against plain torch, for every instruction set."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from flowpath_native import CpuKernels, cpu_instruction_sets
from hypothesis import given, settings
from hypothesis import strategies as st

from common.engine.dtype import TORCH_DTYPES
from common.kv.layout import KVLayout
from tests.support.engine_runs import pool_view

LANES = {"avx512": 16, "avx2": 8, "portable": 4}
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}
MAX_POSITIONS = 720


@dataclass(frozen=True)
class Case:
    """Rows are (start, number of tokens); those of one token come first and are single."""

    layout: KVLayout
    num_heads: int
    rows: tuple[tuple[int, int], ...]
    window: int
    instruction_set: str
    num_threads: int
    seed: int


@st.composite
def cases(draw: st.DrawFn, max_rows: int = 4) -> Case:
    name = draw(st.sampled_from(cpu_instruction_sets()))
    head_dim = 2 * LANES[name] * draw(st.integers(1, 3))
    num_kv_heads = draw(st.integers(1, 3))
    single = st.tuples(st.integers(0, MAX_POSITIONS - 1), st.just(1))
    chunk = st.tuples(st.integers(0, 300), st.integers(2, 260))
    rows = draw(st.lists(single | chunk, min_size=1, max_size=max_rows))
    return Case(
        layout=KVLayout(
            num_layers=draw(st.integers(1, 2)),
            block_size=draw(st.sampled_from([1, 3, 16, 64])),
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=draw(st.sampled_from(list(TORCH_DTYPES))),
        ),
        num_heads=num_kv_heads * draw(st.sampled_from([1, 2, 3, 4, 7, 30])),
        rows=tuple(sorted(rows, key=lambda row: row[1] > 1)),
        window=draw(st.sampled_from([0, 1, 5, 128, 130, 10_000])),
        instruction_set=name,
        num_threads=draw(st.integers(1, 2)),
        seed=draw(st.integers(0, 2**31)),
    )


class Bench:
    """A pool full of random numbers, random block tables, and kernels over them."""

    def __init__(self, case: Case) -> None:
        self.case, layout = case, case.layout
        random = np.random.default_rng(case.seed)
        size = layout.block_size
        blocks_each = [layout.num_blocks_for(start + count) for start, count in case.rows]
        num_blocks = sum(blocks_each) + 1
        self.pool = torch.zeros(num_blocks * layout.block_bytes, dtype=torch.uint8)
        self.view = pool_view(self.pool, layout)
        torch.manual_seed(case.seed)
        self.view.normal_()
        order = random.permutation(num_blocks).astype(np.int32)
        ends = np.cumsum(blocks_each)
        self.block_tables = [
            order[end - count : end] for end, count in zip(ends, blocks_each, strict=True)
        ]
        self.tables = np.zeros((len(blocks_each), max(blocks_each)), dtype=np.int32)
        for row, table in enumerate(self.block_tables):
            self.tables[row, : len(table)] = table
        self.row_of_token = [row for row, (_, count) in enumerate(case.rows) for _ in range(count)]
        self.positions = np.concatenate(
            [np.arange(start, start + count, dtype=np.int32) for start, count in case.rows]
        )
        self.slots = np.array(
            [
                int(self.block_tables[row][position // size]) * size + position % size
                for row, position in zip(self.row_of_token, self.positions.tolist(), strict=True)
            ],
            dtype=np.int64,
        )
        lasts = np.cumsum([count for _, count in case.rows]).tolist()
        self.chunks = np.array(
            [
                (last - count, last, start)
                for last, (start, count) in zip(lasts, case.rows, strict=True)
                if count > 1
            ],
            dtype=np.int32,
        ).reshape(-1, 3)
        angles = torch.randn(MAX_POSITIONS, layout.head_dim // 2)
        self.cosine, self.sine = angles.cos(), angles.sin()
        self.kernels = CpuKernels(
            self.pool.numpy(),
            num_layers=layout.num_layers,
            block_size=layout.block_size,
            num_kv_heads=layout.num_kv_heads,
            head_dim=layout.head_dim,
            block_bytes=layout.block_bytes,
            dtype=layout.dtype,
            num_heads=case.num_heads,
            cosine=self.cosine.numpy(),
            sine=self.sine.numpy(),
            num_threads=case.num_threads,
            instruction_set=case.instruction_set,
        )
        self.kernels.set_batch(self.positions, self.slots, self.tables, self.chunks)
        heads = case.num_heads + 2 * layout.num_kv_heads
        self.qkv = torch.randn(len(self.positions), heads, layout.head_dim).to(
            TORCH_DTYPES[layout.dtype]
        )

    def attend(self, layer: int, window: int, scale: float) -> torch.Tensor:
        out = torch.full_like(self.qkv[:, : self.case.num_heads], float("nan")).contiguous()
        self.kernels.attend(layer, self.qkv.data_ptr(), out.data_ptr(), window, scale)
        return out


def reference_attention(bench: Bench, layer: int, scale: float) -> torch.Tensor:
    case, layout, rows, first_token = bench.case, bench.case.layout, [], 0
    group = case.num_heads // layout.num_kv_heads
    for row, (start, count) in enumerate(case.rows):
        planes = bench.view[torch.from_numpy(bench.block_tables[row]).long(), layer]
        key, value = (
            planes[:, plane].flatten(0, 1)[: start + count].double().repeat_interleave(group, dim=1)
            for plane in (0, 1)
        )
        query = bench.qkv[first_token : first_token + count, : case.num_heads].double()
        scores = torch.einsum("qhd,khd->hqk", query, key) * scale
        position = torch.arange(start, start + count).unsqueeze(1)
        other = torch.arange(start + count).unsqueeze(0)
        is_hidden = other > position
        if case.window:
            is_hidden |= other <= position - case.window
        weights = scores.masked_fill(is_hidden, float("-inf")).softmax(dim=2)
        rows.append(torch.einsum("hqk,khd->qhd", weights, value))
        first_token += count
    return torch.cat(rows)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(cases())
def test_attention_over_blocks_equals_its_definition(case: Case) -> None:
    bench = Bench(case)
    layer, scale = case.layout.num_layers - 1, case.layout.head_dim**-0.5

    out = bench.attend(layer, case.window, scale)

    tolerance = TOLERANCE[case.layout.dtype]
    expected = reference_attention(bench, layer, scale)
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(cases(max_rows=1), st.data())
def test_cutting_a_chunk_anywhere_changes_no_bit(case: Case, data: st.DataObject) -> None:
    case = replace(case, rows=((case.rows[0][0] % 300, 200),))
    whole = Bench(case)
    at = data.draw(st.integers(2, 198))
    expected = whole.attend(0, case.window, 0.25)

    start = case.rows[0][0]
    for first, last in ((0, at), (at, 200)):
        whole.kernels.set_batch(
            whole.positions[first:last],
            whole.slots[first:last],
            whole.tables,
            np.array([[0, last - first, start + first]], dtype=np.int32),
        )
        out = torch.empty(last - first, case.num_heads, case.layout.head_dim, dtype=whole.qkv.dtype)
        part = whole.qkv[first:last].contiguous()
        whole.kernels.attend(0, part.data_ptr(), out.data_ptr(), case.window, 0.25)
        assert torch.equal(out, expected[first:last])


@settings(max_examples=25, deadline=None, derandomize=True)
@given(cases(), st.booleans())
def test_rotation_stores_exactly_the_rows_of_the_batch(case: Case, has_norm: bool) -> None:
    bench, layout = Bench(case), case.layout
    before, qkv = bench.view.clone(), bench.qkv.clone()
    weight = torch.rand(2, layout.head_dim).to(bench.qkv.dtype) + 0.5
    addresses = (weight[0].data_ptr(), weight[1].data_ptr()) if has_norm else (0, 0)

    bench.kernels.rotate_store(0, bench.qkv.data_ptr(), *addresses, 1e-6)

    query_key = qkv[:, : case.num_heads + layout.num_kv_heads].double()
    if has_norm:
        scale = (query_key.square().mean(dim=2, keepdim=True) + 1e-6).rsqrt()
        heads = torch.arange(query_key.shape[1]) >= case.num_heads
        query_key = query_key * scale * weight.double()[heads.long()]
    first, second = query_key.chunk(2, dim=2)
    at = torch.from_numpy(bench.positions).long()
    cosine, sine = bench.cosine[at].double().unsqueeze(1), bench.sine[at].double().unsqueeze(1)
    rotated = torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=2)
    tolerance = TOLERANCE[layout.dtype]
    actual = bench.qkv[:, : rotated.shape[1]].double()
    torch.testing.assert_close(actual, rotated, rtol=tolerance, atol=tolerance)
    assert torch.equal(bench.qkv[:, rotated.shape[1] :], qkv[:, rotated.shape[1] :])

    expected = before
    for token, slot in enumerate(bench.slots):
        block, offset = divmod(int(slot), layout.block_size)
        stored = bench.qkv[token, case.num_heads :]
        expected[block, 0, :, offset] = stored.view(2, layout.num_kv_heads, layout.head_dim)
    assert torch.equal(bench.view, expected)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(cpu_instruction_sets()),
    dtype=st.sampled_from(list(TORCH_DTYPES)),
    rows=st.integers(1, 40),
    size=st.integers(1, 900),
    has_delta=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_norm_and_activation_equal_their_formulas(
    name: str, dtype: str, rows: int, size: int, has_delta: bool, seed: int
) -> None:
    layout = KVLayout(1, 1, 1, 2 * LANES[name], dtype)
    kernels = Bench(Case(layout, 1, ((0, 1),), 0, name, 2, seed)).kernels
    torch_dtype, tolerance = TORCH_DTYPES[dtype], TOLERANCE[dtype]
    x, delta = (torch.randn(rows, size).to(torch_dtype) for _ in range(2))
    weight, total, out = torch.rand(size).to(torch_dtype), x.clone(), torch.empty_like(x)

    address = delta.data_ptr() if has_delta else 0
    kernels.rms_norm(total.data_ptr(), address, weight.data_ptr(), out.data_ptr(), rows, size, 1e-5)

    assert torch.equal(total, x + delta if has_delta else x)
    scale = (total.double().square().mean(dim=1, keepdim=True) + 1e-5).rsqrt()
    expected = total.double() * scale * weight.double()
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)

    gate_up = (torch.randn(rows, 2 * size) * 20).to(torch_dtype)
    kernels.silu_mul(gate_up.data_ptr(), out.data_ptr(), rows, size)
    gate, up = gate_up.double().chunk(2, dim=1)
    expected = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", list(TORCH_DTYPES))
@pytest.mark.parametrize("name", cpu_instruction_sets())
@pytest.mark.parametrize("rows", [((200, 1), (30, 1)), ((0, 150), (100, 40))])
def test_a_nan_in_a_query_reaches_its_output_alone(
    name: str, dtype: str, rows: tuple[tuple[int, int], ...]
) -> None:
    layout = KVLayout(1, 16, 1, 2 * LANES[name], dtype)
    bench = Bench(Case(layout, 2, rows, 0, name, 1, 7))
    bench.qkv[0, 1, 3] = float("nan")

    out = bench.attend(0, 0, 1.0)

    assert out[0, 1].isnan().all()
    assert out[0, 0].isfinite().all()
    assert out[1:].isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positions": np.array([MAX_POSITIONS, 1, 2, 3], dtype=np.int32)}, "rotary tables"),
        ({"positions": np.array([-1, 1, 2, 3], dtype=np.int32)}, "rotary tables"),
        ({"chunks": np.array([[1, 4, MAX_POSITIONS - 2]], dtype=np.int32)}, "rotary tables"),
        ({"slots": np.array([0, 0, 0, 10**9], dtype=np.int64)}, "slot lies outside"),
        ({"slots": np.array([0, 0, -1, 0], dtype=np.int64)}, "slot lies outside"),
        ({"slots": np.array([0], dtype=np.int64)}, "differ in length"),
        ({"tables": np.array([[0], [99]], dtype=np.int32)}, "block table"),
        ({"tables": np.array([[-1], [0]], dtype=np.int32)}, "block table"),
        ({"tables": np.zeros((2, 0), dtype=np.int32)}, "block table"),
        ({"chunks": np.array([[1, 4, 17]], dtype=np.int32)}, "block table"),
        ({"tables": np.zeros((7, 1), dtype=np.int32)}, "differ in length"),
        ({"tables": np.zeros((0, 1), dtype=np.int32)}, "differ in length"),
        ({"chunks": np.array([[0, 4, 0]], dtype=np.int32)}, "do not follow each other"),
        ({"chunks": np.array([[1, 3, 0]], dtype=np.int32)}, "do not follow each other"),
        ({"chunks": np.array([[1, 9, 0]], dtype=np.int32)}, "do not follow each other"),
        ({"chunks": np.array([[1, 4, -1]], dtype=np.int32)}, "do not follow each other"),
        ({"chunks": np.array([[1, 4]], dtype=np.int32)}, "chunks must be"),
    ],
)
def test_a_batch_that_points_out_of_the_pool_is_refused(
    change: dict[str, Any], message: str
) -> None:
    layout = KVLayout(1, 16, 1, 8, "float32")
    bench = Bench(Case(layout, 1, ((3, 1), (4, 3)), 0, "portable", 1, 0))
    batch: dict[str, Any] = {
        "positions": bench.positions,
        "slots": bench.slots,
        "tables": bench.tables,
        "chunks": bench.chunks,
    }

    with pytest.raises(ValueError, match=message):
        bench.kernels.set_batch(**(batch | change))

    assert bench.attend(0, 0, 1.0).isfinite().all()
