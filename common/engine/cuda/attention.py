"""FlashInfer's attention over the pool, one planned wrapper for each kind of row and window.

A wrapper's ``plan`` distributes the work of a batch and enqueues the upload of what it decided from
pinned memory of the wrapper; every layer's ``run`` follows it. So a wrapper is planned once a step,
and not again before the upload has run.
"""

from dataclasses import dataclass
from typing import Any

import torch

from common.engine.cuda.device_batch import Group, TensorRows
from common.engine.cuda.kernels import POOL_DTYPES, PlaceOf, own_place
from common.engine.cuda.memory import INT_WORKSPACE
from common.engine.cuda.model import DTYPES
from common.kv.layout import KVLayout
from common.models.config import ModelConfig

# Any: FlashInfer has no types.
Wrapper = Any


@dataclass(frozen=True, slots=True)
class Shape:
    """What all plans of an engine have in common."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    pool_dtype: torch.dtype

    @classmethod
    def of(cls, config: ModelConfig, layout: KVLayout) -> "Shape":
        """Return the shape of a model over a pool."""
        return cls(
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            layout.block_size,
            DTYPES[layout.dtype],
            POOL_DTYPES[layout.element_dtype],
        )


@dataclass(frozen=True, slots=True)
class Planes:
    """A layer's keys and values in the pool, (blocks, block_size, kv_heads, head_dim) each.

    What they stand for is the stored numbers times their scale; None are numbers of the model's
    own type.
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scale: float | None = None
    value_scale: float | None = None

    @classmethod
    def of(
        cls, view: torch.Tensor, layout: KVLayout, layer: int, place_of: PlaceOf = own_place
    ) -> "Planes":
        """Return a layer of the pool as ``kernels.pool_view`` returns it."""
        place = place_of(layer)
        keys, values = view[:, place, 0], view[:, place, 1]
        if not layout.is_quantised:
            return cls(keys, values)
        return cls(keys, values, *layout.scales_of(layer))


@dataclass(frozen=True, slots=True)
class Workspace:
    """Memory of wrappers: partial results, which all share, and one wrapper's plan, on both sides.

    Wrappers that are never planned in the same step may share a plan's memory as well.
    """

    partial_results: torch.Tensor
    plan: torch.Tensor
    pinned_plan: torch.Tensor

    @classmethod
    def beside(cls, partial_results: torch.Tensor) -> "Workspace":
        """Return a workspace with memory for a plan of its own."""
        plan = torch.empty(INT_WORKSPACE, dtype=torch.uint8, device=partial_results.device)
        pinned = torch.empty(INT_WORKSPACE, dtype=torch.uint8, pin_memory=True)
        return cls(partial_results, plan, pinned)

    def give_to(self, wrapper: Wrapper) -> None:
        """Let a wrapper use this memory instead of what it allocated."""
        # Its own method would pin new memory for every wrapper.
        wrapper._float_workspace_buffer = self.partial_results  # noqa: SLF001
        wrapper._int_workspace_buffer = self.plan  # noqa: SLF001
        wrapper._pin_memory_int_workspace_buffer = self.pinned_plan  # noqa: SLF001


def window_left(window: int | None) -> int:
    """Return how many positions before its own a token sees, in FlashInfer's terms."""
    return -1 if window is None else window - 1


class DecodeAttention:
    """Attention of rows of one token, with tensor cores, split over long contexts."""

    def __init__(self, shape: Shape, window: int | None, workspace: Workspace) -> None:
        self._decode = _decode_module()
        self._shape = shape
        self._window_left = window_left(window)
        self._wrapper = self._decode.BatchDecodeWithPagedKVCacheWrapper(
            workspace.partial_results, "NHD", use_tensor_cores=True
        )
        workspace.give_to(self._wrapper)
        _first_decode_plan(self._wrapper, shape, self._window_left, 1, 0)

    def plan(self, group: Group) -> None:
        """Plan a step's rows; waits for nothing."""
        host, device = group.host, group.device
        wrapper = self._wrapper
        _fast_plan(self._decode, wrapper, self._shape, self._window_left, host)
        # It was given the host's arrays to plan with: the kernels read the device's.
        wrapper._paged_kv_indptr_buf = device.indptr  # noqa: SLF001
        wrapper._paged_kv_indices_buf = device.indices  # noqa: SLF001
        wrapper._paged_kv_last_page_len_buf = device.last_page_len  # noqa: SLF001
        wrapper._qo_indptr_buf = device.qo_indptr  # noqa: SLF001

    def run(self, queries: torch.Tensor, planes: Planes, out: torch.Tensor) -> None:
        """Enqueue one layer; queries and ``out`` are (rows, heads, head_dim)."""
        _run_paged(self._wrapper, queries, planes, out)


class GraphDecodeAttention:
    """Attention of exactly ``len(rows.kv_lens)`` rows, over arrays that stay where they are."""

    def __init__(
        self,
        shape: Shape,
        window: int | None,
        workspace: Workspace,
        device: TensorRows,
        scratch_block: int,
    ) -> None:
        """``device`` are the arrays that each step fills before the graph is replayed."""
        self._decode = _decode_module()
        self._shape = shape
        self._window_left = window_left(window)
        self._wrapper = self._decode.BatchDecodeWithPagedKVCacheWrapper(
            workspace.partial_results,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=device.indptr,
            paged_kv_indices_buffer=device.indices,
            paged_kv_last_page_len_buffer=device.last_page_len,
        )
        workspace.give_to(self._wrapper)
        num_rows = len(device.last_page_len)
        _first_decode_plan(self._wrapper, shape, self._window_left, num_rows, scratch_block)

    def plan(self, host: TensorRows) -> None:
        """Plan a step's rows; the same numbers go to the device's arrays by another way."""
        _fast_plan(self._decode, self._wrapper, self._shape, self._window_left, host)

    def run(self, queries: torch.Tensor, planes: Planes, out: torch.Tensor) -> None:
        """Enqueue one layer; queries and ``out`` are (rows, heads, head_dim)."""
        _run_paged(self._wrapper, queries, planes, out)


class FreshAttention:
    """Causal attention of whole prompts over the keys and values just computed."""

    def __init__(self, shape: Shape, window: int | None, workspace: Workspace) -> None:
        import flashinfer  # noqa: PLC0415 - there on GPU machines alone

        self._shape = shape
        self._window_left = window_left(window)
        self._wrapper: Wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
            workspace.partial_results, "NHD"
        )
        workspace.give_to(self._wrapper)

    def plan(self, group: Group) -> None:
        """Plan a step's rows; waits for nothing."""
        shape = self._shape
        self._wrapper.plan(
            group.host.qo_indptr,
            group.host.qo_indptr,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            causal=True,
            window_left=self._window_left,
            q_data_type=shape.dtype,
            kv_data_type=shape.dtype,
        )

    def run(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Enqueue one layer; all are (tokens, heads, head_dim) of their heads."""
        self._wrapper.run(queries, keys, values, out=out)


class ChunkAttention:
    """Causal attention of chunks whose sequences have earlier tokens in the pool."""

    def __init__(self, shape: Shape, window: int | None, workspace: Workspace) -> None:
        import flashinfer  # noqa: PLC0415 - there on GPU machines alone

        self._shape = shape
        self._window_left = window_left(window)
        self._wrapper: Wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            workspace.partial_results, "NHD"
        )
        workspace.give_to(self._wrapper)

    def plan(self, group: Group) -> None:
        """Plan a step's rows; waits for nothing."""
        shape, host = self._shape, group.host
        self._wrapper.plan(
            host.qo_indptr,
            host.indptr,
            host.indices,
            host.last_page_len,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.block_size,
            causal=True,
            window_left=self._window_left,
            q_data_type=shape.dtype,
            kv_data_type=shape.pool_dtype,
            seq_lens=host.kv_lens,
            max_token_per_sequence=int(host.qo_indptr.diff().max()),
        )

    def run(self, queries: torch.Tensor, planes: Planes, out: torch.Tensor) -> None:
        """Enqueue one layer; queries and ``out`` are (tokens, heads, head_dim)."""
        _run_paged(self._wrapper, queries, planes, out)


def _decode_module() -> Any:  # Any: FlashInfer has no types
    from flashinfer import decode  # noqa: PLC0415 - there on GPU machines alone

    return decode


def _run_paged(wrapper: Wrapper, queries: torch.Tensor, planes: Planes, out: torch.Tensor) -> None:
    wrapper.run(
        queries,
        (planes.keys, planes.values),
        k_scale=planes.key_scale,
        v_scale=planes.value_scale,
        out=out,
    )


def _first_decode_plan(
    wrapper: Wrapper, shape: Shape, left: int, num_rows: int, block: int
) -> None:
    """Choose and compile the kernel: what the fast plan takes for granted."""
    wrapper.plan(
        torch.arange(num_rows + 1, dtype=torch.int32),
        torch.full((num_rows,), block, dtype=torch.int32),
        torch.ones(num_rows, dtype=torch.int32),
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
        shape.block_size,
        window_left=left,
        q_data_type=shape.dtype,
        kv_data_type=shape.pool_dtype,
    )


def _fast_plan(decode: Any, wrapper: Wrapper, shape: Shape, left: int, host: TensorRows) -> None:
    # Any: FlashInfer has no types. The usual plan looks at every length in Python.
    decode.fast_decode_plan(
        wrapper,
        host.indptr,
        host.indices,
        host.last_page_len,
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
        shape.block_size,
        window_left=left,
        q_data_type=shape.dtype,
        kv_data_type=shape.pool_dtype,
        global_override_indptr_cpu=host.indptr,
    )
