"""The process of one rank, started and ended by the process of rank 0."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from common.engine.parallel.messages import Order, Report
from common.engine.parallel.wire import Wire
from common.messages.codec import Codec

MODULE = "common.engine.parallel.rank"
END_SECONDS = 5.0


class RankProcess:
    """Rank ``rank``'s process and rank 0's end of the stream to it.

    The process ends when the stream does, and is killed with the thread that started it: that is to
    be the main thread.
    """

    def __init__(self, rank: int, send_seconds: float) -> None:
        self.rank = rank
        ours, theirs = socket.socketpair()
        ours.settimeout(send_seconds)
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 - our own module, and arguments that are numbers
                [
                    *(sys.executable, "-m", MODULE),
                    *("--stream", str(theirs.fileno()), "--parent", str(os.getpid())),
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )
        self.wire: Wire[Order, Report] = Wire(ours, Codec(Order), Codec(Report), "rank-0")

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    @property
    def is_stopped(self) -> bool:
        """Whether somebody has stopped the process, which computes nothing then."""
        try:
            told = Path(f"/proc/{self.pid}/stat").read_text(encoding="ascii", errors="replace")
        except OSError:
            return False
        return told.rpartition(")")[2].split()[:1] in (["T"], ["t"])

    def describe_end(self) -> str:
        """Say how the process ended, whose stream has; it is given a moment to do so."""
        try:
            code = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            return f"rank {self.rank} (process {self.pid}) has closed its stream"
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        return f"rank {self.rank} (process {self.pid}) {how}"

    def kill(self) -> None:
        """Kill the process, if it still runs, and wait for its end."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Close the stream and see the process end, by itself or killed."""
        self.wire.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
