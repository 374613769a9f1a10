"""The native kernels of a decoder layer against plain torch, for every instruction set."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from flowpath_native import CpuKernels, cpu_instruction_sets
from hypothesis import given, settings
from hypothesis import strategies as st

from common.engine.cpu_engine import pool_view
from common.engine.dtype import TORCH_DTYPES
from common.kv.layout import KVLayout

LANES = {"avx512": 16, "avx2": 8, "portable": 4}
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}
MAX_POSITIONS = 700


@dataclass(frozen=True)
class Case:
    layout: KVLayout
    num_heads: int
    positions: tuple[int, ...]
    window: int
    instruction_set: str
    num_threads: int
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    name = draw(st.sampled_from(cpu_instruction_sets()))
    head_dim = 2 * LANES[name] * draw(st.integers(1, 3))
    num_kv_heads = draw(st.integers(1, 3))
    return Case(
        layout=KVLayout(
            num_layers=draw(st.integers(1, 2)),
            block_size=draw(st.sampled_from([1, 3, 16, 64])),
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=draw(st.sampled_from(list(TORCH_DTYPES))),
        ),
        num_heads=num_kv_heads * draw(st.integers(1, 9)),
        positions=tuple(draw(st.lists(st.integers(0, MAX_POSITIONS - 1), min_size=1, max_size=4))),
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
        blocks_each = [position // layout.block_size + 1 for position in case.positions]
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
        self.positions = np.array(case.positions, dtype=np.int32)
        self.slots = np.array(
            [
                int(table[-1]) * layout.block_size + position % layout.block_size
                for table, position in zip(self.block_tables, case.positions, strict=True)
            ],
            dtype=np.int64,
        )
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
        self.kernels.set_batch(self.positions, self.slots, self.tables)
        heads = case.num_heads + 2 * layout.num_kv_heads
        self.qkv = torch.randn(len(case.positions), heads, layout.head_dim).to(
            TORCH_DTYPES[layout.dtype]
        )


def reference_attention(bench: Bench, layer: int, scale: float) -> torch.Tensor:
    case, layout = bench.case, bench.case.layout
    rows = []
    for token, position in enumerate(case.positions):
        planes = bench.view[torch.from_numpy(bench.block_tables[token]).long(), layer]
        first = max(0, position + 1 - case.window) if case.window else 0
        key, value = (
            planes[:, plane].flatten(0, 1)[first : position + 1].double() for plane in (0, 1)
        )
        group = case.num_heads // layout.num_kv_heads
        key, value = (part.repeat_interleave(group, dim=1) for part in (key, value))
        query = bench.qkv[token, : case.num_heads].double()
        weights = (torch.einsum("hd,phd->hp", query, key) * scale).softmax(dim=1)
        rows.append(torch.einsum("hp,phd->hd", weights, value))
    return torch.stack(rows)


@settings(max_examples=60, deadline=None)
@given(cases())
def test_paged_attention_equals_attention_over_gathered_keys(case: Case) -> None:
    bench = Bench(case)
    layer = case.layout.num_layers - 1
    out = torch.full_like(bench.qkv[:, : case.num_heads], float("nan")).contiguous()
    scale = case.layout.head_dim**-0.5

    bench.kernels.attend(layer, bench.qkv.data_ptr(), out.data_ptr(), case.window, scale)

    expected = reference_attention(bench, layer, scale)
    torch.testing.assert_close(
        out.double(), expected, rtol=TOLERANCE[case.layout.dtype], atol=TOLERANCE[case.layout.dtype]
    )


@settings(max_examples=60, deadline=None)
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


@settings(max_examples=60, deadline=None)
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
    kernels = Bench(Case(layout, 1, (0,), 0, name, 2, seed)).kernels
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
def test_a_nan_in_a_query_reaches_the_output(name: str, dtype: str) -> None:
    layout = KVLayout(1, 16, 1, 2 * LANES[name], dtype)
    bench = Bench(Case(layout, 2, (200, 30), 0, name, 1, 7))
    bench.qkv[0, 1, 3] = float("nan")
    out = torch.zeros_like(bench.qkv[:, :2]).contiguous()

    bench.kernels.attend(0, bench.qkv.data_ptr(), out.data_ptr(), 0, 1.0)

    assert out[0, 1].isnan().all()
    assert out[0, 0].isfinite().all()
    assert out[1].isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positions": np.array([MAX_POSITIONS, 1], dtype=np.int32)}, "rotary tables"),
        ({"positions": np.array([-1, 1], dtype=np.int32)}, "rotary tables"),
        ({"slots": np.array([0, 10**9], dtype=np.int64)}, "slot lies outside"),
        ({"slots": np.array([0, -1], dtype=np.int64)}, "slot lies outside"),
        ({"slots": np.array([0], dtype=np.int64)}, "differ in length"),
        ({"tables": np.array([[0], [99]], dtype=np.int32)}, "block table"),
        ({"tables": np.array([[0], [-1]], dtype=np.int32)}, "block table"),
        ({"tables": np.zeros((2, 0), dtype=np.int32)}, "block table"),
        ({"tables": np.zeros((3, 1), dtype=np.int32)}, "differ in length"),
    ],
)
def test_a_batch_that_points_out_of_the_pool_is_refused(
    change: dict[str, Any], message: str
) -> None:
    layout = KVLayout(1, 16, 1, 8, "float32")
    bench = Bench(Case(layout, 1, (3, 4), 0, "portable", 1, 0))
    batch: dict[str, Any] = {
        "positions": bench.positions,
        "slots": bench.slots,
        "tables": bench.tables,
    }

    with pytest.raises(ValueError, match=message):
        bench.kernels.set_batch(**(batch | change))

    out = torch.empty(2, 8)
    bench.kernels.attend(0, bench.qkv.data_ptr(), out.data_ptr(), 0, 1.0)
    assert out.isfinite().all()
