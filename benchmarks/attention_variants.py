"""FlashInfer's kinds of attention over our pool, one layer each, so that the best can be chosen."""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.report import Cell
from common.engine.cuda.streams import new_stream

WORKSPACE = 512 * 2**20
NUM_CALLS = 20
NUM_RUNS = 5
NUM_REPLAYS = 3


@dataclass(frozen=True, slots=True)
class Setting:
    """``planes`` are (keys, values) of every layer, views of the pool; all in ``dtype``."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    planes: list[tuple[torch.Tensor, torch.Tensor]]

    @property
    def facts(self) -> tuple[int, int, int, int]:
        """What plans ask for first."""
        return self.num_heads, self.num_kv_heads, self.head_dim, self.block_size


def median_layer_ms(run: Callable[[int], object], num_layers: int) -> float:
    """Return the device's milliseconds of one call, from a graph of many over all layers."""
    stream = new_stream(torch.device("cuda", torch.cuda.current_device()))
    with torch.cuda.stream(stream):
        for layer in range(2):
            run(layer)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in range(NUM_CALLS):
                run(call % num_layers)
        times = []
        for _ in range(NUM_RUNS):
            stream.synchronize()
            begin = time.perf_counter()
            for _ in range(NUM_REPLAYS):
                graph.replay()
            stream.synchronize()
            times.append((time.perf_counter() - begin) / NUM_REPLAYS / NUM_CALLS)
    return statistics.median(times) * 1e3


def decode_variants(setting: Setting, batch: int, context: int, seed: int) -> list[dict[str, Cell]]:
    """Time every kind of decode at one batch size and context."""
    import flashinfer  # noqa: PLC0415 - there on GPU machines alone

    pages = -(-context // setting.block_size)
    num_blocks = len(setting.planes[0][0])
    order = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(seed))
    tables = order[torch.arange(batch * pages) % (num_blocks - 1)].to(torch.int32)
    indptr = torch.arange(batch + 1, dtype=torch.int32) * pages
    last = torch.full((batch,), (context - 1) % setting.block_size + 1, dtype=torch.int32)
    shape = (batch, setting.num_heads, setting.head_dim)
    queries = torch.randn(shape, device="cuda", dtype=setting.dtype)
    out = torch.empty_like(queries)
    workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device="cuda")

    def planned(
        backend: str, *, use_tensor_cores: bool = True, use_graph: bool = False
    ) -> Callable[[int], object]:
        buffers: dict[str, Any] = {}  # Any: tensors and a flag, by name
        if use_graph:
            buffers = {
                "use_cuda_graph": True,
                "paged_kv_indptr_buffer": torch.empty_like(indptr, device="cuda"),
                "paged_kv_indices_buffer": torch.empty_like(tables, device="cuda"),
                "paged_kv_last_page_len_buffer": torch.empty_like(last, device="cuda"),
            }
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=use_tensor_cores, backend=backend, **buffers
        )
        wrapper.plan(indptr, tables, last, *setting.facts, q_data_type=setting.dtype)
        return lambda layer: wrapper.run(queries, setting.planes[layer], out=out)

    def xqa() -> Callable[[int], object]:
        padded = tables.view(batch, pages).cuda()
        lengths = torch.full((batch,), context, dtype=torch.int32, device="cuda")
        room = torch.zeros(WORKSPACE, dtype=torch.uint8, device="cuda")

        def run(layer: int) -> object:
            return flashinfer.decode.xqa_batch_decode_with_kv_cache(
                queries,
                setting.planes[layer],
                room,
                padded,
                lengths,
                context,
                bmm1_scale=1 / math.sqrt(setting.head_dim),
                out=out,
                kv_layout="NHD",
            )

        return run

    makers: dict[str, Callable[[], Callable[[int], object]]] = {
        "tensor cores": lambda: planned("auto"),
        "tensor cores, for graphs": lambda: planned("auto", use_graph=True),
        "CUDA cores, for graphs": lambda: planned("auto", use_tensor_cores=False, use_graph=True),
        "fa3": lambda: planned("fa3"),
        "xqa": xqa,
    }
    size = 2 * batch * context * setting.num_kv_heads * setting.head_dim * 2
    return [
        _row("decode", name, make, len(setting.planes), (batch, context, size))
        for name, make in makers.items()
    ]


def prefill_variants(setting: Setting, count: int, seed: int) -> list[dict[str, Cell]]:
    """Time every kind of prefill of one prompt."""
    import flashinfer  # noqa: PLC0415 - there on GPU machines alone

    pages = -(-count // setting.block_size)
    num_blocks = len(setting.planes[0][0])
    order = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(seed))
    bounds = torch.tensor([0, count], dtype=torch.int32)
    page_bounds = torch.tensor([0, pages], dtype=torch.int32)
    last = torch.tensor([(count - 1) % setting.block_size + 1], dtype=torch.int32)
    num_all = setting.num_heads + 2 * setting.num_kv_heads
    heads = torch.randn((count, num_all, setting.head_dim), device="cuda", dtype=setting.dtype)
    first_value = setting.num_heads + setting.num_kv_heads
    queries, keys = heads[:, : setting.num_heads], heads[:, setting.num_heads : first_value]
    values = heads[:, first_value:]
    out = torch.empty(queries.shape, device="cuda", dtype=setting.dtype)
    workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device="cuda")

    def ragged(backend: str) -> Callable[[int], object]:
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend=backend)
        wrapper.plan(bounds, bounds, *setting.facts[:3], causal=True, q_data_type=setting.dtype)
        return lambda _layer: wrapper.run(queries, keys, values, out=out)

    def paged(backend: str) -> Callable[[int], object]:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=backend)
        wrapper.plan(
            *(bounds, page_bounds, order[:pages].to(torch.int32), last),
            *setting.facts,
            causal=True,
            q_data_type=setting.dtype,
        )
        return lambda layer: wrapper.run(queries, setting.planes[layer], out=out)

    makers: dict[str, Callable[[], Callable[[int], object]]] = {
        "ragged fa3": lambda: ragged("fa3"),
        "paged fa3": lambda: paged("fa3"),
        "paged fa2": lambda: paged("fa2"),
    }
    return [
        _row("prefill", name, make, len(setting.planes), (1, count, 0))
        for name, make in makers.items()
    ]


def _row(
    kind: str,
    name: str,
    make: Callable[[], Callable[[int], object]],
    num_layers: int,
    numbers: tuple[int, int, int],
) -> dict[str, Cell]:
    batch, context, size = numbers
    try:
        milliseconds = median_layer_ms(make(), num_layers)
    except Exception as error:  # noqa: BLE001 - a kind that does not run here is a result too
        text = str(error).strip().splitlines()
        print(f"{name}: {type(error).__name__}: {text[0] if text else ''}", flush=True)
        torch.cuda.synchronize()
        milliseconds = math.nan
    rate = size / milliseconds / 1e6 if size else 0.0
    return {
        "kind": kind,
        "variant": name,
        "batch": batch,
        "context": context,
        "layer_ms": milliseconds,
        "gb_per_s": rate,
    }
