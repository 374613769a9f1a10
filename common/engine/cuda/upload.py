"""Many small arrays in one copy to the device."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

ALIGNMENT = 16

Array = NDArray[Any]  # Any: of every type of number that torch knows


class Packed:
    """Arrays end to end in host memory that a device copies from without help.

    torch keeps such memory from being handed out again until the copies from it are done.
    """

    def __init__(self, arrays: Sequence[Array], *, is_pinned: bool) -> None:
        self._offsets: list[int] = []
        end = 0
        for array in arrays:
            self._offsets.append(end)
            end += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        self.num_bytes = end
        self.memory = torch.empty(end, dtype=torch.uint8, pin_memory=is_pinned)
        self._kinds = [(torch.from_numpy(array).dtype, array.nbytes) for array in arrays]
        target = self.memory.numpy()
        for offset, array in zip(self._offsets, arrays, strict=True):
            target[offset : offset + array.nbytes] = array.view(np.uint8).reshape(-1)

    def views(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Return the arrays as they lie in ``memory``, a copy of this one (or this one)."""
        return [
            memory[offset : offset + num_bytes].view(dtype)
            for offset, (dtype, num_bytes) in zip(self._offsets, self._kinds, strict=True)
        ]

    def offset_of(self, index: int) -> int:
        """Return where array ``index`` begins, in bytes."""
        return self._offsets[index]


def upload(arrays: Sequence[Array], device: torch.device) -> list[torch.Tensor]:
    """Copy arrays to the device in one piece, without waiting for what it does before."""
    packed = Packed(arrays, is_pinned=device.type == "cuda")
    return packed.views(packed.memory.to(device, non_blocking=True))
