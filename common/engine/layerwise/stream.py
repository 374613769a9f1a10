"""Moves layers between the pool and the ring while the layers between them are computed.

Theory of operation
-------------------
The ring has two places for a layer, used in turn. Per pass and layer l (papers 2.4)::

    loader    waits until layer l - 2 is stored, brings layer l
    engine    waits until layer l is loaded, computes it
    storer    waits until layer l is computed, takes its new tokens' blocks back

So while the engine computes a layer, the one after it comes and the one before it goes. The time of
a pass is about that of the slower of computing and moving, plus the first load and the last store.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from time import perf_counter
from typing import Protocol

import torch

from common.kv.layout import KVLayout

NUM_SLOTS = 2
"""Layers in the ring."""

Moves = Sequence[tuple[int, int]]
"""(pool block, ring block)"""


class SpanKind(StrEnum):
    """What was done with a layer."""

    LOAD = "load"
    COMPUTE = "compute"
    STORE = "store"


@dataclass(frozen=True, slots=True)
class Span:
    """When it was done, in seconds of ``perf_counter``; ``num_bytes`` are those that moved."""

    kind: SpanKind
    layer: int
    begin: float
    end: float
    num_bytes: int = 0


def ring_layout(layout: KVLayout) -> KVLayout:
    """Return the layout of the ring's blocks: those of the pool, of two layers.

    ValueError for quantised blocks, whose scales belong to all layers.
    """
    if layout.is_quantised:
        raise ValueError(f"blocks of {layout.element_dtype} do not go layer by layer")
    return KVLayout(
        NUM_SLOTS, layout.block_size, layout.num_kv_heads, layout.head_dim, layout.dtype
    )


def slot_of(layer: int) -> int:
    """Return where in the ring's blocks a layer lies."""
    return layer % NUM_SLOTS


class LayerMover(Protocol):
    """Both directions between one pool and one ring. One pass at a time."""

    def begin(self, loads: Moves, stores: Moves) -> None:
        """Begin a pass: bring the first layers."""
        ...

    def wait_loaded(self, layer: int) -> None:
        """Have what is computed next wait until the layer is in its place of the ring."""
        ...

    def computed(self, layer: int) -> None:
        """The layer's new K and V are in the ring, or will be by what was enqueued: let them go."""
        ...

    def finish(self) -> None:
        """Wait until all layers are back in the pool; RuntimeError where one could not be moved."""
        ...

    def abandon(self) -> None:
        """End a pass that failed: nothing of it moves any more."""
        ...

    def close(self) -> None:
        """Let go of what it moves with."""
        ...


class LayerStream:
    """Implements ``LayerMover`` for a pool and a ring in host memory, with a thread each way.

    ``pool`` and ``ring`` are uint8 memory of whole blocks; ``tell`` is given every span, from any
    thread.
    """

    def __init__(
        self,
        pool: torch.Tensor,
        layout: KVLayout,
        ring: torch.Tensor,
        tell: Callable[[Span], None] | None = None,
    ) -> None:
        self._num_layers = layout.num_layers
        self._layer_bytes = layout.planes * layout.plane_elements * layout.element_bytes
        self._pool = layers_of(pool, layout, self._layer_bytes)
        self._ring = layers_of(ring, ring_layout(layout), self._layer_bytes)
        self._tell = tell
        self._loader = ThreadPoolExecutor(1, "layer-load")
        self._storer = ThreadPoolExecutor(1, "layer-store")
        self._loaded: list[threading.Event] = []
        self._stored: list[threading.Event] = []
        self._is_failed = threading.Event()
        self._loads: Future[None] | None = None
        self._stores: list[Future[None]] = []
        self._computing_since = 0.0

    def begin(self, loads: Moves, stores: Moves) -> None:
        """Begin a pass: bring the first layers."""
        self._loaded = [threading.Event() for _ in range(self._num_layers)]
        self._stored = [threading.Event() for _ in range(self._num_layers)]
        self._is_failed.clear()
        self._to_store = _indices(stores)
        self._stores = []
        self._loads = self._loader.submit(self._load_all, _indices(loads))

    def wait_loaded(self, layer: int) -> None:
        """Wait until the layer is in its place of the ring, and nothing reads that any more."""
        self._loaded[layer].wait()
        self._raise_failure()
        self._computing_since = perf_counter()

    def computed(self, layer: int) -> None:
        """The layer's new K and V are in the ring: let them go."""
        self._note(SpanKind.COMPUTE, layer, self._computing_since, 0)
        self._stores.append(self._storer.submit(self._store, layer))

    def finish(self) -> None:
        """Wait until all layers are back in the pool; RuntimeError where one could not be moved."""
        assert self._loads is not None, "a pass has begun"
        self._loads.result()
        for stored in self._stores:
            stored.result()

    def abandon(self) -> None:
        """End a pass that failed: nothing of it moves any more."""
        self._fail()
        for moving in (self._loads, *self._stores):
            if moving is not None and not moving.cancel():
                moving.exception()

    def close(self) -> None:
        """End both threads."""
        self._loader.shutdown()
        self._storer.shutdown()

    def _load_all(self, moves: tuple[torch.Tensor, torch.Tensor]) -> None:
        try:
            for layer in range(self._num_layers):
                if layer >= NUM_SLOTS:
                    self._stored[layer - NUM_SLOTS].wait()
                if self._is_failed.is_set():
                    return
                began = perf_counter()
                blocks, places = moves
                slot = slot_of(layer)
                self._ring[:, slot].index_copy_(
                    0, places, self._pool[:, layer].index_select(0, blocks)
                )
                self._note(SpanKind.LOAD, layer, began, len(blocks) * self._layer_bytes)
                self._loaded[layer].set()
        except BaseException:
            self._fail()
            raise

    def _store(self, layer: int) -> None:
        try:
            began = perf_counter()
            blocks, places = self._to_store
            slot = slot_of(layer)
            self._pool[:, layer].index_copy_(0, blocks, self._ring[:, slot].index_select(0, places))
            self._note(SpanKind.STORE, layer, began, len(blocks) * self._layer_bytes)
            self._stored[layer].set()
        except BaseException:
            self._fail()
            raise

    def _fail(self) -> None:
        """Let everybody who waits go on, and find that the pass has failed."""
        self._is_failed.set()
        for event in (*self._loaded, *self._stored):
            event.set()

    def _raise_failure(self) -> None:
        if self._is_failed.is_set():
            raise RuntimeError("a layer could not be moved between the pool and the ring")

    def _note(self, kind: SpanKind, layer: int, began: float, num_bytes: int) -> None:
        if self._tell is not None:
            self._tell(Span(kind, layer, began, perf_counter(), num_bytes))


def layers_of(memory: torch.Tensor, layout: KVLayout, layer_bytes: int) -> torch.Tensor:
    """Return memory as (blocks, layers, bytes of a layer), without the blocks' padding."""
    num_blocks = memory.numel() // layout.block_bytes
    return memory.as_strided(
        (num_blocks, layout.num_layers, layer_bytes), (layout.block_bytes, layer_bytes, 1)
    )


def _indices(moves: Moves) -> tuple[torch.Tensor, torch.Tensor]:
    pairs = torch.tensor(moves, dtype=torch.int64).reshape(-1, 2)
    return pairs[:, 0].contiguous(), pairs[:, 1].contiguous()
