"""A step's arrays as tensors, on the host (for planning) and on the device."""

from dataclasses import dataclass

import torch

from common.engine.cuda.step_batch import Longs, PagedRows, StepBatch
from common.engine.cuda.upload import Array, Packed

TensorRows = PagedRows[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Group:
    """Rows of one kind: their tokens are ``first .. last - 1`` of the step.

    ``host`` and ``device`` are the same numbers; ``host`` may be pinned memory of a copy that has
    yet to run, and is only read.
    """

    first: int
    last: int
    host: TensorRows
    device: TensorRows


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """See ``StepBatch``; the tensors are on the device."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    decodes: Group | None
    fresh: Group | None
    chunks: Group | None
    tail: Group | None
    sampled_tokens: torch.Tensor
    pending_tokens: torch.Tensor
    pending_places: torch.Tensor

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole step."""
        return len(self.positions)


def to_device(batch: StepBatch, pending_places: Longs, device: torch.device) -> DeviceBatch:
    """Copy a batch to the device in one piece.

    ``pending_places`` says where among the tokens drawn last each pending one is.
    """
    groups = (batch.decodes, batch.fresh, batch.chunks, batch.tail)
    arrays: list[Array] = [batch.token_ids, batch.sampled_tokens, batch.pending_tokens]
    arrays += [pending_places, batch.positions, batch.slots]
    for rows in groups:
        if rows is not None:
            arrays += rows.arrays()
    packed = Packed(arrays, is_pinned=device.type == "cuda")
    hosts = packed.views(packed.memory)
    devices = packed.views(packed.memory.to(device, non_blocking=True))
    token_ids, sampled, pending, places, positions, slots = devices[:6]
    at, first = 6, 0
    made: list[Group | None] = []
    for rows in groups:
        if rows is None:
            made.append(None)
            continue
        if rows is batch.tail:
            first = 0
        last = first + int(rows.qo_indptr[-1])
        host, there = PagedRows(*hosts[at : at + 5]), PagedRows(*devices[at : at + 5])
        made.append(Group(first, last, host, there))
        at, first = at + 5, last
    decodes, fresh, chunks, tail = made
    return DeviceBatch(
        token_ids, positions, slots, decodes, fresh, chunks, tail, sampled, pending, places
    )
