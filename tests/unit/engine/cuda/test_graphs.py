"""What a decode graph is fed with: its logic on a CPU, where replaying is computing again."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.engine.cuda import graphs
from common.engine.cuda.decoder import CudaDecoder
from common.engine.cuda.device_batch import DeviceBatch, Group, TensorRows
from common.engine.cuda.flashinfer_kernels import GraphPlan
from common.engine.cuda.graphs import DecodeGraphs, input_bytes, ladder
from common.engine.cuda.scales import BlockScales
from common.engine.cuda.torch_kernels import TorchKernels
from common.engine.cuda.upload import Packed
from common.engine.failure import RowsFailed
from common.sampling import SamplingParams
from tests.support.cuda_runs import PooledCudaEngine
from tests.support.engine_runs import GREEDY, row
from tests.support.tiny_models import save_tiny_model

RANDOM = SamplingParams(seed=7, max_tokens=100, temperature=1.0, num_logprobs=3)
SIZES = (1, 2, 4, 8)


class GraphTorchKernels(TorchKernels):
    """Plans a graph by taking its arrays and the step's host side, as FlashInfer does."""

    def graph_plan(self, device: TensorRows, scratch_block: int) -> GraphPlan:
        self.fixed = getattr(self, "fixed", {})
        plan = GraphPlan({})
        self.fixed[id(plan)] = (plan, device)
        return plan

    def begin_graph(self, plan: GraphPlan, host: TensorRows) -> None:
        device = self.fixed[id(plan)][1]
        num_indices = len(host.indices)
        assert torch.equal(device.indices[:num_indices], host.indices)
        assert torch.equal(device.indptr, host.indptr)
        assert torch.equal(device.last_page_len, host.last_page_len)
        none = torch.empty(0)
        group = Group(0, len(host.kv_lens), host, device)
        self.begin(DeviceBatch(*([none] * 3), group, None, None, None, *([none] * 3)))


class Recorded:
    """A graph whose replay calls what was captured."""

    work: Callable[[], None]

    def replay(self) -> None:
        self.work()


@pytest.fixture(params=["auto", "float8_e4m3"])
def ours(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> PooledCudaEngine:
    save_tiny_model("qwen2-window", tmp_path)
    pooled = PooledCudaEngine(tmp_path, kv_cache_dtype=request.param)
    engine, runner = pooled.engine, pooled.engine._runner
    kernels = GraphTorchKernels(
        engine.config, pooled.layout, runner._kernels._view, pooled.device, runner._scales
    )
    runner._kernels = kernels
    runner._decoder = CudaDecoder(engine._model, kernels)
    num_drawn = len(runner.drawn.ids)
    made = DecodeGraphs(runner._decoder, kernels, runner._slab, num_drawn, 64)
    calls: list[tuple[Any, ...]] = []
    compute = made._compute

    def note(*arguments: Any) -> None:
        calls.append(arguments)
        compute(*arguments)

    @contextmanager
    def capture(graph: Recorded, **_options: object) -> Iterator[None]:
        yield
        arguments = calls[-1]
        graph.work = lambda: compute(*arguments)

    stream = type("Stream", (), {"synchronize": lambda self: None})()
    monkeypatch.setattr(made, "_compute", note)
    monkeypatch.setattr(graphs, "Packed", lambda arrays, is_pinned: Packed(arrays, is_pinned=False))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recorded)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    with torch.inference_mode():
        made.capture(SIZES, engine.config.vocab_size, runner.drawn, pooled.told.append)
    runner._graphs = made
    return pooled


@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("params", [GREEDY, RANDOM])
@pytest.mark.parametrize("ahead", [True, False])
def test_padded_steps_draw_what_steps_without_graphs_draw(
    ours: PooledCudaEngine, num_rows: int, params: SamplingParams, *, ahead: bool
) -> None:
    prompts = [list(range(3 + at, 3 + at + 5 * (at + 1))) for at in range(num_rows)]
    outputs = ours.generate(prompts, params, 10, ahead=ahead)
    plain = PooledCudaEngine(ours.config.folder, kv_cache_dtype=ours.layout.kv_cache_dtype)
    others = plain.generate(prompts, params, 10, ahead=ahead)
    for output, other in zip(outputs, others, strict=True):
        assert [t.token_id for t in output] == [t.token_id for t in other]
        expected = [t.logprob for t in other]
        # What differs in its last bit may be stored as the neighbouring FP8 number.
        noise = 1e-2 if ours.layout.is_quantised else 1e-4
        assert [t.logprob for t in output] == pytest.approx(expected, abs=noise)


def test_padding_writes_nothing(ours: PooledCudaEngine) -> None:
    tables = [ours.blocks_for(4) for _ in range(3)]
    ours.execute(*[row([5, 6], 0, table, params=None) for table in tables])
    size = ours.layout.block_bytes
    before = ours.pool.clone().view(-1, size)
    ours.execute(*[row([6], 2, table) for table in tables])
    changed = (ours.pool.view(-1, size) != before).any(dim=1).nonzero().squeeze(1).tolist()
    assert changed == sorted(table[0] for table in tables)


@pytest.mark.parametrize("ours", ["float8_e4m3"], indirect=True)
def test_a_graph_gives_nothing_out_of_blocks_with_other_scales(ours: PooledCudaEngine) -> None:
    tables = [ours.blocks_for(18) for _ in range(5)]
    for table in tables:
        ours.execute(row(list(range(5, 22)), 0, table, params=None))
    scales = BlockScales(ours.pool, ours.layout)
    for table in (tables[0], tables[3]):
        scales.trailers[table[0], 1, 0] = 3.0
    steps = [row([9], 17, table) for table in tables]
    with pytest.raises(RowsFailed, match=r"2 of 5 rows failed: \[0, 3\]"):
        ours.execute(*steps)
    with pytest.raises(RowsFailed, match=r"1 of 3 rows failed: \[2\]"):
        ours.execute(*steps[1:4])
    assert len(ours.execute(*steps[1:3], steps[4])) == 3


def test_more_rows_than_the_largest_graph_go_another_way(ours: PooledCudaEngine) -> None:
    tables = [ours.blocks_for(4) for _ in range(9)]
    results = ours.execute(*[row([5 + at], 0, table) for at, table in enumerate(tables)])
    assert [len(tokens) for tokens in results] == [1] * 9


def test_capturing_tells_how_far_it_is(ours: PooledCudaEngine) -> None:
    assert ours.told == [f"decode graphs: {n} of 4 captured" for n in (1, 2, 3, 4)]


def test_more_blocks_than_there_is_room_for_are_refused(ours: PooledCudaEngine) -> None:
    made = ours.engine._runner._graphs
    assert made is not None
    made._inputs = made._inputs[: input_bytes(1, 1)]
    with pytest.raises(ValueError, match="more than a step can name"):
        ours.execute(row([5], 900, list(range(57)), params=GREEDY))


def test_the_ladder_ends_with_the_most_rows() -> None:
    assert ladder(1) == (1,)
    assert ladder(40) == (1, 2, 4, 8, 16, 24, 32, 40)
    assert ladder(256)[-3:] == (192, 224, 256)
    assert ladder(400)[-4:] == (256, 320, 384, 400)


def test_inputs_fit_into_their_room() -> None:
    for num_rows, num_blocks in ((1, 1), (3, 7), (256, 18)):
        arrays = [np.zeros(num_rows, np.int64)] * 2
        arrays += [np.zeros(num_rows + extra, np.int32) for extra in (0, 0, 1, 1, 0, 0)]
        arrays.append(np.zeros(num_rows * num_blocks, np.int32))
        assert Packed(arrays, is_pinned=False).num_bytes <= input_bytes(num_rows, num_blocks)
