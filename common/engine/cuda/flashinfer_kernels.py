"""Kernels of FlashInfer and our own: bfloat16 and float16 on GPUs since Ampere."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from common.engine.cuda.attention import (
    ChunkAttention,
    DecodeAttention,
    FreshAttention,
    GraphDecodeAttention,
    Planes,
    Shape,
    Workspace,
)
from common.engine.cuda.device_batch import DeviceBatch, Group, TensorRows
from common.engine.cuda.kernels import PlaceOf, own_place
from common.engine.cuda.rotate_store import HEAD_DIMS, RotateStore
from common.engine.cuda.scales import BlockScales
from common.engine.cuda.streams import new_event
from common.kv.layout import KVLayout
from common.models.config import ModelConfig

MIN_CAPABILITY = (8, 0)
MIN_FP8_CAPABILITY = (8, 9)


class Attention(Protocol):
    """One planned kind of attention over the pool."""

    def run(self, queries: torch.Tensor, planes: Planes, out: torch.Tensor) -> None:
        """Enqueue one layer."""
        ...


def why_not(config: ModelConfig, layout: KVLayout, device: torch.device) -> str | None:
    """Return why these kernels cannot run the model over such a pool, None where they can."""
    if device.type != "cuda":
        return f"the device is {device.type}"
    if layout.dtype == "float32":
        return "FlashInfer has no float32 kernels"
    if config.head_dim not in HEAD_DIMS:
        return f"head_dim {config.head_dim} is none of {HEAD_DIMS}"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        return "the GPU is older than Ampere"
    if layout.is_quantised and capability < MIN_FP8_CAPABILITY:
        return "the GPU is older than Ada and Hopper, which have FP8 numbers"
    for name in ("flashinfer", "cupy"):
        try:
            __import__(name)
        except ImportError as error:
            return f"{name} cannot be imported ({error})"
    return None


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """The attention of one decode graph, for each kind of window."""

    attentions: dict[int | None, GraphDecodeAttention]


class FlashInferKernels:
    """Implements ``Kernels``, and decodes whose launches are captured in a graph beside it.

    All work goes to torch's current stream. Plans lie in pinned memory until their upload has run,
    so that planning a step waits for the uploads of the step before. They are over as soon as the
    step before that one is done, long before the latest step itself.
    """

    def __init__(
        self,
        config: ModelConfig,
        layout: KVLayout,
        view: torch.Tensor,
        device: torch.device,
        partial_result_bytes: int,
        scales: BlockScales | None = None,
        place_of: PlaceOf = own_place,
    ) -> None:
        """``view`` is the pool as ``kernels.pool_view`` returns it, on ``device``.

        ``scales`` are those of a quantised pool.
        """
        import flashinfer  # noqa: PLC0415 - there on GPU machines alone

        self._rms_norm: Callable[..., torch.Tensor] = flashinfer.rmsnorm
        self._add_rms_norm: Callable[..., None] = flashinfer.fused_add_rmsnorm
        self._silu_mul: Callable[..., torch.Tensor] = flashinfer.silu_and_mul
        self._epsilon = config.rms_norm_eps
        self._config = config
        self._planes = [
            Planes.of(view, layout, layer, place_of) for layer in range(config.num_layers)
        ]
        self.rotate_store = RotateStore(config, layout, view, device, scales, place_of)
        self.shape = Shape.of(config, layout)
        partial = torch.empty(partial_result_bytes, dtype=torch.uint8, device=device)
        self.windows = tuple(dict.fromkeys(config.layer_windows))
        shape, windows = self.shape, self.windows
        self._decodes = {w: DecodeAttention(shape, w, Workspace.beside(partial)) for w in windows}
        self._fresh = {w: FreshAttention(shape, w, Workspace.beside(partial)) for w in windows}
        self._chunks = {w: ChunkAttention(shape, w, Workspace.beside(partial)) for w in windows}
        self._tails = {w: DecodeAttention(shape, w, Workspace.beside(partial)) for w in windows}
        self._graph_workspaces = {w: Workspace.beside(partial) for w in windows}
        self._uploaded = new_event()
        self._batch: DeviceBatch | None = None
        self._graph: GraphPlan | None = None

    def begin(self, batch: DeviceBatch) -> None:
        """Plan the attention of every group of rows, for each kind of window."""
        self._batch, self._graph = batch, None
        self._uploaded.synchronize()
        last_window = self._config.layer_windows[-1]
        for window in self.windows:
            if batch.decodes is not None:
                self._decodes[window].plan(batch.decodes)
            if batch.fresh is not None:
                self._fresh[window].plan(batch.fresh)
            if batch.chunks is not None:
                self._chunks[window].plan(batch.chunks)
            if window == last_window and batch.tail is not None and batch.tail.last:
                self._tails[window].plan(batch.tail)
        self._uploaded.record()

    def graph_plan(self, device: TensorRows, scratch_block: int) -> GraphPlan:
        """Return the attention of a decode graph over arrays that stay where they are."""
        return GraphPlan(
            {
                window: GraphDecodeAttention(
                    self.shape, window, self._graph_workspaces[window], device, scratch_block
                )
                for window in self.windows
            }
        )

    def begin_graph(self, graph: GraphPlan, host: TensorRows) -> None:
        """Plan a graph's attention of a step's rows, and let ``attend`` use it.

        The same numbers go to the graph's arrays by another way.
        """
        self._graph = graph
        self._uploaded.synchronize()
        for attention in graph.attentions.values():
            attention.plan(host)
        self._uploaded.record()

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the RMSNorm of (rows, size)."""
        return self._rms_norm(x, weight, self._epsilon)

    def add_rms_norm(
        self, delta: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        """Add ``delta`` to ``residual`` in place; ``delta`` becomes the RMSNorm of the sum."""
        self._add_rms_norm(delta, residual, weight, self._epsilon)
        return delta

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return silu(gate) * up of (rows, 2 * size), gate first."""
        return self._silu_mul(gate_up)

    def attend(self, layer: int, heads: torch.Tensor) -> torch.Tensor:
        """Return causal attention of all the batch's tokens, (tokens, num_heads * head_dim)."""
        config = self._config
        window = config.layer_windows[layer]
        split = heads.view(len(heads), -1, config.head_dim)
        queries = split[:, : config.num_heads]
        out = heads.new_empty((len(heads), config.num_heads, config.head_dim))
        planes = self._planes[layer]
        if self._graph is not None:
            self._graph.attentions[window].run(queries, planes, out)
            return out.view(len(heads), -1)
        batch = self._batch
        assert batch is not None  # begin comes first
        if batch.fresh is not None:
            part = slice(batch.fresh.first, batch.fresh.last)
            keys = split[part, config.num_heads : config.num_heads + config.num_kv_heads]
            values = split[part, config.num_heads + config.num_kv_heads :]
            self._fresh[window].run(queries[part], keys, values, out[part])
        paged: tuple[tuple[Group | None, Attention], ...] = (
            (batch.decodes, self._decodes[window]),
            (batch.chunks, self._chunks[window]),
        )
        for group, attention in paged:
            if group is not None:
                part = slice(group.first, group.last)
                attention.run(queries[part], planes, out[part])
        return out.view(len(heads), -1)

    def attend_tail(self, layer: int, heads: torch.Tensor) -> torch.Tensor:
        """Return the attention of the sampled tokens alone; ``heads`` has only theirs."""
        config = self._config
        queries = heads.view(len(heads), -1, config.head_dim)[:, : config.num_heads]
        out = heads.new_empty((len(heads), config.num_heads, config.head_dim))
        self._tails[config.layer_windows[layer]].run(queries, self._planes[layer], out)
        return out.view(len(heads), -1)
