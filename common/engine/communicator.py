"""How the ranks of one engine add up their partial results."""

from collections.abc import Callable
from typing import Protocol

import torch

from common.engine.shard import WHOLE, Shard


class Communicator(Protocol):
    """Collective operations of all ranks: each makes the same calls in the same order.

    RuntimeError when a rank is gone or does not come; none of the calls may be made after it.
    """

    @property
    def shard(self) -> Shard:
        """Which of the ranks this one is."""
        ...

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """Add up the ranks' contiguous tensors in place; return the sum, the same in all ranks."""
        ...

    def share(self, tensor: torch.Tensor) -> None:
        """Overwrite every rank's contiguous tensor with that of rank 0."""
        ...

    def before_parting(self, release: Callable[[], None]) -> None:
        """Have ``release`` called before the connection ends: it lets go of captured operations."""
        ...


class Alone:
    """The communicator of the only rank."""

    shard = WHOLE

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """Return the tensor: it is the sum."""
        return partial

    def share(self, tensor: torch.Tensor) -> None:
        """Leave the tensor as it is."""

    def before_parting(self, release: Callable[[], None]) -> None:
        """Do nothing: there is no connection."""


ALONE = Alone()
