"""Adding up the partial results of ranks in processes on CPUs, over gloo and the loopback."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from common.engine.shard import Shard

STEP_SECONDS = 60.0
"""How long one operation waits for the slowest rank: far longer than any step takes."""

LOOPBACK = "127.0.0.1"

# Any: torch's stubs leave out the group and its options.


class GlooCommunicator:
    """Implements ``common.engine.communicator.Communicator``; unusable before ``connect``."""

    def __init__(self, shard: Shard, rendezvous: Path) -> None:
        """``rendezvous`` is a file that does not exist yet, in a folder of this user's alone."""
        self.shard = shard
        self._rendezvous = rendezvous
        self._group: Any = None

    def connect(self) -> None:
        """Meet the other ranks; RuntimeError when one does not come in time."""
        timeout = timedelta(seconds=STEP_SECONDS)
        # torch exports its stores at run time alone.
        store = distributed.FileStore(  # type: ignore[attr-defined]
            str(self._rendezvous), self.shard.num_ranks
        )
        store.set_timeout(timeout)
        gloo: Any = distributed.ProcessGroupGloo
        options = gloo._Options()  # noqa: SLF001 - the only way to name the device
        options._timeout = timeout  # noqa: SLF001
        options._devices = [gloo.create_device(hostname=LOOPBACK)]  # noqa: SLF001
        self._group = gloo(store, self.shard.rank, self.shard.num_ranks, options)

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """Add up the ranks' tensors in place."""
        self._connected.allreduce([partial]).wait()
        return partial

    def share(self, tensor: torch.Tensor) -> None:
        """Overwrite every rank's tensor with that of rank 0."""
        self._connected.broadcast(tensor, 0).wait()

    def before_parting(self, release: Callable[[], None]) -> None:
        """Do nothing: operations on CPUs are not captured."""

    def abort(self) -> None:
        """Do nothing: operations end by themselves when a rank's connections do."""

    def close(self) -> None:
        """Do nothing: the connections end with the ranks."""

    @property
    def _connected(self) -> Any:
        if self._group is None:
            raise RuntimeError("the ranks are not connected")
        return self._group
