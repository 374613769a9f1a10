"""Moves layers between a pool in page-locked host memory and a ring on a GPU.

Theory of operation
-------------------
Three streams of the device, ordered by events; the host enqueues a pass and waits once, at its
end. Per layer l::

    loads     wait for the store of l - 2, copy l to the device
    compute   waits for the load of l
    stores    wait for the computation of l, copy its new tokens' blocks to the host

Copies both ways and the computation go on at the same time (papers 2.4). A layer of successive
blocks is one strided copy.
"""

from collections.abc import Callable
from time import perf_counter
from typing import Any

import flowpath_native
import numpy as np
import torch

from common.engine.cuda.streams import new_event, new_stream, timed_event
from common.engine.layerwise.stream import (
    NUM_SLOTS,
    Moves,
    Span,
    SpanKind,
    layers_of,
    ring_layout,
    slot_of,
)
from common.kv.layout import KVLayout

Runs = list[tuple[int, int, int]]
"""(pool block, ring block, blocks)"""
Noted = tuple[SpanKind, int, torch.cuda.Event, torch.cuda.Event, int]


class CudaLayerStream:
    """Implements ``LayerMover``. ``pool`` is uint8 memory of the host, ``ring`` of a device.

    Without page-locked memory copies are slow and do not overlap. ``tell`` is given every span when
    a pass is over.
    """

    def __init__(
        self,
        pool: torch.Tensor,
        layout: KVLayout,
        ring: torch.Tensor,
        tell: Callable[[Span], None] | None = None,
    ) -> None:
        import cupy  # noqa: PLC0415 - there on GPU machines alone

        self._runtime: Any = cupy.cuda.runtime  # Any: CuPy has no types
        self._num_layers = layout.num_layers
        self._layer_bytes = layout.planes * layout.plane_elements * layout.element_bytes
        self._pool = layers_of(pool, layout, self._layer_bytes)
        self._ring = layers_of(ring, ring_layout(layout), self._layer_bytes)
        self._tell = tell
        self._device = ring.device
        self._loads, self._stores = new_stream(ring.device), new_stream(ring.device)
        self._compute: torch.cuda.Stream | None = None
        self._to_load: Runs = []
        self._to_store: Runs = []
        self._loaded: list[torch.cuda.Event] = []
        self._noted: list[Noted] = []
        self._computing_since: torch.cuda.Event | None = None
        # What was enqueued on other streams before, such as the ring's zeros.
        torch.cuda.synchronize(ring.device)

    def begin(self, loads: Moves, stores: Moves) -> None:
        """Enqueue the first layers' loads (see ``LayerMover``)."""
        self._to_load, self._to_store = _runs(loads), _runs(stores)
        self._loaded, self._noted = [], []
        if self._tell is not None:
            self._began = timed_event()
            self._began_at = perf_counter()
            self._began.record(self._loads)
        for layer in range(min(NUM_SLOTS, self._num_layers)):
            self._load(layer)

    def wait_loaded(self, layer: int) -> None:
        """Have the current stream wait for the layer's load."""
        compute = self._compute = torch.cuda.current_stream(self._device)
        compute.wait_event(self._loaded[layer])
        self._computing_since = self._mark(compute)

    def computed(self, layer: int) -> None:
        """Enqueue the layer's store behind the stream that waited for its load."""
        compute, since = self._compute, self._computing_since
        assert compute is not None, "its load was waited for"
        self._note(SpanKind.COMPUTE, layer, since, compute, 0)
        done = new_event()
        done.record(compute)
        self._stores.wait_event(done)
        self._move(SpanKind.STORE, layer, self._to_store, self._stores)
        if layer + NUM_SLOTS < self._num_layers:
            stored = new_event()
            stored.record(self._stores)
            self._loads.wait_event(stored)
            self._load(layer + NUM_SLOTS)

    def finish(self) -> None:
        """Wait for the last store, behind which nothing is under way any more."""
        self._stores.synchronize()
        if self._tell is not None:
            for kind, layer, began, ended, num_bytes in self._noted:
                begin, end = (
                    self._began_at + self._began.elapsed_time(event) / 1e3
                    for event in (began, ended)
                )
                self._tell(Span(kind, layer, begin, end, num_bytes))

    def abandon(self) -> None:
        """Wait for everything that was enqueued."""
        torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """Have nothing to let go of."""

    def _load(self, layer: int) -> None:
        self._move(SpanKind.LOAD, layer, self._to_load, self._loads)
        loaded = new_event()
        loaded.record(self._loads)
        self._loaded.append(loaded)

    def _move(self, kind: SpanKind, layer: int, runs: Runs, stream: torch.cuda.Stream) -> None:
        since = self._mark(stream)
        is_load = kind is SpanKind.LOAD
        slot = slot_of(layer)
        for block, place, count in runs:
            there, here = self._pool[block, layer], self._ring[place, slot]
            target, source = (here, there) if is_load else (there, here)
            pitches = (self._ring.stride(0), self._pool.stride(0))
            target_pitch, source_pitch = pitches if is_load else pitches[::-1]
            self._runtime.memcpy2DAsync(
                *(target.data_ptr(), target_pitch, source.data_ptr(), source_pitch),
                *(self._layer_bytes, count),
                self._runtime.memcpyHostToDevice if is_load else self._runtime.memcpyDeviceToHost,
                stream.cuda_stream,
            )
        num_bytes = sum(count for _, _, count in runs) * self._layer_bytes
        self._note(kind, layer, since, stream, num_bytes)

    def _mark(self, stream: torch.cuda.Stream) -> torch.cuda.Event | None:
        """Return an event there, where times are to be told."""
        if self._tell is None:
            return None
        event = timed_event()
        event.record(stream)
        return event

    def _note(
        self,
        kind: SpanKind,
        layer: int,
        since: torch.cuda.Event | None,
        stream: torch.cuda.Stream,
        num_bytes: int,
    ) -> None:
        until = self._mark(stream)
        if since is not None and until is not None:
            self._noted.append((kind, layer, since, until, num_bytes))


def _runs(moves: Moves) -> Runs:
    if not moves:
        return []
    pairs = np.asarray(moves, dtype=np.int32).reshape(-1, 2)
    aligned = flowpath_native.align(
        np.ascontiguousarray(pairs[:, 0]), np.ascontiguousarray(pairs[:, 1])
    )
    return [(int(block), int(place), int(count)) for block, place, count in aligned.tolist()]
