"""``python -m common.engine.parallel.rank``: the process of a rank other than 0.

The main thread takes orders and starts steps, a second one finishes them and reports: so a device
has its next step before it is done with the last.
"""

import argparse
import os
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import assert_never

from common.config.program import die_with_parent, run_and_end
from common.engine.parallel.follower import CpuFollower, Finish, Follower
from common.engine.parallel.messages import (
    MAX_TEXT,
    ComputeStep,
    Join,
    Joined,
    LoadShard,
    MakePool,
    Order,
    PoolMade,
    RankFailed,
    Report,
    StepDone,
)
from common.engine.parallel.wire import Ended, Wire, unpack_arrays
from common.errors import FlowPathError
from common.messages.codec import Codec

EXIT_FAILED = 1
RANK_ERRORS = (FlowPathError, RuntimeError, ValueError, OSError, MemoryError)
"""What ends a rank with a reason: its own errors and those of the engine's libraries."""


class Rank:
    """Does what rank 0 orders, until the stream ends."""

    def __init__(self, wire: Wire[Report, Order]) -> None:
        self._wire = wire
        self._follower: Follower | None = None
        self._finisher = ThreadPoolExecutor(1, "finish")

    def serve(self) -> None:
        """Take orders; Ended when rank 0 is gone."""
        while True:
            order, payload = self._wire.receive()
            match order:
                case LoadShard():
                    self._follower = make_follower(order)
                case MakePool():
                    handle = self._loaded.make_pool(order.num_blocks)
                    self._wire.send(PoolMade(handle=handle))
                case Join():
                    self._loaded.join()
                    self._wire.send(Joined())
                case ComputeStep():
                    arrays = unpack_arrays(order.arrays, payload)
                    finish = self._loaded.start(arrays)
                    self._finisher.submit(self._finish, order.number, finish)
                case _:
                    assert_never(order)

    def _finish(self, number: int, finish: Finish) -> None:
        try:
            finish()
            self._wire.send(StepDone(number=number))
        except BaseException as error:  # noqa: BLE001 - whatever it is, the step is not done
            # The main thread waits for orders that nobody could carry out any more.
            if not isinstance(error, RANK_ERRORS):
                traceback.print_exc()
            last_words(self._wire, error)
            os._exit(EXIT_FAILED)

    @property
    def _loaded(self) -> Follower:
        if self._follower is None:
            raise ValueError("the first order is LoadShard")
        return self._follower


def make_follower(order: LoadShard) -> Follower:
    """Return the rank's follower for its device."""
    if order.settings.engine == "cpu":
        return CpuFollower(order)
    # What is for GPUs is not imported for CPUs.
    from common.engine.parallel.cuda_follower import CudaFollower  # noqa: PLC0415

    return CudaFollower(order)


def last_words(wire: Wire[Report, Order], error: BaseException) -> None:
    """Tell rank 0 why this rank ends, if it still listens."""
    try:
        wire.send(RankFailed(reason=f"{error}"[:MAX_TEXT] or type(error).__name__))
    except OSError:
        sys.stderr.write(f"a rank failed, and rank 0 is gone: {error}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Serve as a rank until rank 0 closes the stream; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m common.engine.parallel.rank")
    parser.add_argument("--stream", type=int, required=True, help="descriptor of the stream")
    parser.add_argument("--parent", type=int, required=True, help="process id of rank 0")
    given = parser.parse_args(argv)
    die_with_parent(given.parent)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # rank 0 says when to end
    wire: Wire[Report, Order] = Wire(
        socket.socket(fileno=given.stream), Codec(Report), Codec(Order), "rank"
    )
    try:
        Rank(wire).serve()
    except Ended:
        return 0
    except RANK_ERRORS as error:
        last_words(wire, error)
    except BaseException as error:
        last_words(wire, error)
        raise
    return EXIT_FAILED


if __name__ == "__main__":
    run_and_end(main)
