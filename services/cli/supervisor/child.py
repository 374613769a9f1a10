"""One child process: its own process group, its output kept, its end awaited."""

import asyncio
import os
import signal
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path

import structlog

from common.telemetry.notices import NOTICE
from common.telemetry.progress import PROGRESS
from services.cli.supervisor.plan import ProcessSpec

MAX_OUTPUT_LINES = 50

log = structlog.get_logger()


class Child:
    """One life of one program; ``run`` starts it and returns its exit code.

    It has a process group of its own, so that Ctrl-C in a terminal reaches the supervisor alone,
    and dies with us, however we end. ``output`` holds its last lines.
    """

    def __init__(
        self, spec: ProcessSpec, settings_file: Path, tell: Callable[[str], None] | None = None
    ) -> None:
        """``tell`` gets what the program says of its progress."""
        self.spec = spec
        self._tell = tell
        self.output: deque[str] = deque(maxlen=MAX_OUTPUT_LINES)
        self.pid = 0
        self._settings_file = settings_file
        self._process: asyncio.subprocess.Process | None = None
        self._early_signal: signal.Signals | None = None

    async def run(self) -> int:
        """Start the process, wait for its end, and return its exit code (negative: a signal)."""
        spec = self.spec
        self._process = process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", spec.module, "--settings", str(self._settings_file)),
            *("--id", spec.name, "--parent", str(os.getpid())),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            process_group=0,
        )
        self.pid = process.pid
        log.info("child_started", cause="serve", child=spec.name, child_pid=process.pid)
        if self._early_signal is not None:
            self.send(self._early_signal)
        assert process.stdout is not None
        while line := await _read_line(process.stdout):
            text = line.decode(errors="replace").rstrip()
            if self._tell is not None and text.startswith(PROGRESS):
                self._tell(text.removeprefix(PROGRESS))
                continue
            if text.startswith(NOTICE):
                continue  # its log has it
            self.output.append(text)
            log.info("child_output", cause=spec.name, child=spec.name, line=text)
        code = await process.wait()
        log.info("child_ended", cause="exit", child=spec.name, child_pid=process.pid, code=code)
        return code

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process, or with SIGKILL to its whole group; none when it ended.

        A process that is just being started gets it right after.
        """
        process = self._process
        if process is None:
            self._early_signal = number
            return
        if process.returncode is not None:
            return
        try:
            if number is signal.SIGKILL:
                os.killpg(process.pid, number)
            else:
                process.send_signal(number)
        except ProcessLookupError:
            log.debug("child_gone", cause=number.name, child=self.spec.name)


async def _read_line(stream: asyncio.StreamReader) -> bytes:
    """Return one line; of an overlong one its parts."""
    try:
        return await stream.readuntil(b"\n")
    except asyncio.IncompleteReadError as error:
        return error.partial
    except asyncio.LimitOverrunError as error:
        return await stream.read(error.consumed)
