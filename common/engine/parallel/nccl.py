"""Adding up the partial results of ranks on GPUs, over NCCL.

All operations go to torch's current stream, so that they stand in their order between the kernels,
and in a captured graph they are part of it. NCCL's communicator does not end before such graphs.
"""

import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import distributed

from common.engine.shard import Shard

NCCL_SECONDS = 1800.0
"""NCCL's own deadline ends the process: far later than rank 0 notices that a rank does not come."""

MEET_SECONDS = 120.0
"""How long a rank waits for the others to come."""

ABORT_SECONDS = 5.0
"""How long an abort is waited for: the device is let out at once, but NCCL waits for graphs."""

# Any: torch's stubs leave out the group and its options.

log = structlog.get_logger()


class NcclCommunicator:
    """Implements ``common.engine.communicator.Communicator``; unusable before ``connect``."""

    def __init__(self, shard: Shard, rendezvous: Path, device: torch.device) -> None:
        """``rendezvous`` is a file that does not exist yet, in a folder of this user's alone.

        It is there as long as the ranks are.
        """
        self.shard = shard
        self._rendezvous = rendezvous
        self._device = device
        self._group: Any = None
        self._releases: list[Callable[[], None]] = []
        self._summing: Any = distributed.AllreduceOptions()
        self._sharing: Any = distributed.BroadcastOptions()
        # On the current stream itself, not on one that it waits for.
        self._summing.asyncOp = self._sharing.asyncOp = False
        self._sharing.rootRank = 0
        self._sharing.rootTensor = 0

    def connect(self) -> None:
        """Meet the other ranks; RuntimeError when that fails.

        NCCL sets up its connections in the first operation, which may not be a captured one.
        """
        # torch exports its stores at run time alone.
        store = distributed.FileStore(  # type: ignore[attr-defined]
            str(self._rendezvous), self.shard.num_ranks
        )
        store.set_timeout(timedelta(seconds=MEET_SECONDS))
        nccl: Any = distributed.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = timedelta(seconds=NCCL_SECONDS)  # noqa: SLF001 - it has no other name
        self._group = nccl(store, self.shard.rank, self.shard.num_ranks, options)
        greeting = torch.ones(1, device=self._device)
        self.sum(greeting)
        self.share(greeting)
        torch.cuda.current_stream(self._device).synchronize()
        if int(greeting.item()) != self.shard.num_ranks:
            raise RuntimeError(f"NCCL added {self.shard.num_ranks} ones up to {greeting.item()}")

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """Enqueue the addition of the ranks' tensors, in place."""
        _wait(self._connected.allreduce([partial], self._summing))
        return partial

    def share(self, tensor: torch.Tensor) -> None:
        """Enqueue that every rank's tensor becomes that of rank 0."""
        _wait(self._connected.broadcast([tensor], self._sharing))

    def before_parting(self, release: Callable[[], None]) -> None:
        """Have ``close`` call this first (see ``Communicator``)."""
        self._releases.append(release)

    def abort(self) -> None:
        """Let the device out of operations that wait for a rank; a second call does nothing."""
        group, self._group = self._group, None
        if group is None:
            return
        # After a loss captured operations may be running, and NCCL would wait for them for ever.
        aborting = threading.Thread(target=group.abort, name="nccl-abort", daemon=True)
        aborting.start()
        aborting.join(ABORT_SECONDS)
        if aborting.is_alive():
            log.warning("nccl_abort_unfinished", seconds=ABORT_SECONDS)

    def close(self) -> None:
        """Part from the other ranks: no operation is under way, and none follows."""
        for release in self._releases:
            release()
        self.abort()

    @property
    def _connected(self) -> Any:
        if self._group is None:
            raise RuntimeError("the ranks are not connected")
        return self._group


def _wait(work: Any) -> None:
    """Let the current stream wait, where the operation is not on it anyway; the host does not."""
    if work is not None:
        work.wait()
