"""Keeps every program of the cluster running, and ends them in order.

A program that ends is started again after a growing wait. Before the cluster was ready for the
first time, exit code 2 (a setting or file is wrong) or repeated ends give it up instead. The first
stop signal drains: gateway, then workers, then controller; the second kills.
"""

import asyncio
import signal
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from time import monotonic

import structlog

from common.config.program import EXIT_CONFIG_ERROR
from common.config.settings import Settings
from common.messages.admin import StatusReport
from services.cli.admin import ask_status
from services.cli.supervisor.child import Child
from services.cli.supervisor.plan import MAX_FAILED_STARTS, Backoff, ProcessSpec, Stage
from services.cli.supervisor.probe import ask_health

READY_POLL_SECONDS = 0.1
STATUS_SECONDS = 1.0
STAGE_GRACE_SECONDS = 10.0
EXIT_FAILED = 1

Tell = Callable[[str], None]
log = structlog.get_logger()


class Supervisor:
    """Runs ``specs`` until ``stop``; ``tell`` gets one line per fact for the operator."""

    def __init__(
        self, settings: Settings, specs: Iterable[ProcessSpec], settings_file: Path, tell: Tell
    ) -> None:
        self._settings = settings
        self._specs = tuple(specs)
        self._gateway_names = {spec.name for spec in self._specs if spec.stage is Stage.GATEWAY}
        self._settings_file = settings_file
        self._tell = tell
        self._children: dict[str, Child] = {}
        self._is_ready = False
        self._exit_code = 0
        self._stop_asked = asyncio.Event()
        self._ended = {spec.name: asyncio.Event() for spec in self._specs}

    def stop(self) -> None:
        """Drain and end; asked again, end at once."""
        if self._stop_asked.is_set():
            self._tell("killing")
            self._signal(self._children, signal.SIGKILL)
        self._stop_asked.set()

    async def run(self) -> int:
        """Serve until stopped or given up; return the exit code."""
        async with asyncio.TaskGroup() as tasks:
            for spec in self._specs:
                tasks.create_task(self._keep(spec))
            watch = tasks.create_task(self._watch_start())
            await self._stop_asked.wait()
            watch.cancel()
            await self._end_all()
        return self._exit_code

    # ---- keeping ---------------------------------------------------------------------------

    async def _keep(self, spec: ProcessSpec) -> None:
        backoff = Backoff()
        while not self._stop_asked.is_set():
            child = Child(spec, self._settings_file, partial(self._tell_progress, spec.name))
            self._children[spec.name] = child
            started = monotonic()
            code = await child.run()
            if self._stop_asked.is_set():
                break
            wait = backoff.after(monotonic() - started)
            is_wrong = code == EXIT_CONFIG_ERROR
            if not self._is_ready and (is_wrong or backoff.num_ends >= MAX_FAILED_STARTS):
                self._give_up(child, code)
                break
            told = f"signal {-code}" if code < 0 else f"exit code {code}"
            last = f": {child.output[-1]}" if child.output else ""
            self._tell(f"{spec.name} ended ({told}{last}); starting it again in {wait:g} s")
            log.warning("child_restarts", cause=told, child=spec.name, wait_seconds=wait)
            await _wait(self._stop_asked, wait)
        self._ended[spec.name].set()

    def _tell_progress(self, name: str, text: str) -> None:
        self._tell(f"  {name}: {text}")

    def _give_up(self, child: Child, code: int) -> None:
        told = "\n".join(child.output) or f"exit code {code}"
        self._tell(f"{child.spec.name} cannot start:\n{told}")
        log.error("given_up", cause=child.spec.name, code=code)
        self._exit_code = EXIT_CONFIG_ERROR if code == EXIT_CONFIG_ERROR else EXIT_FAILED
        self._stop_asked.set()

    # ---- starting --------------------------------------------------------------------------

    async def _watch_start(self) -> None:
        """Tell which process is up, until every gateway is and requests are served."""
        started = monotonic()
        seen: set[str] = set()
        while not self._stop_asked.is_set():
            report = await ask_status(self._settings, STATUS_SECONDS)
            for name in _names(report) - seen:
                seen.add(name)
                self._tell(f"  {name} is up after {monotonic() - started:.1f} s")
            settings = self._settings
            health = await asyncio.to_thread(ask_health, settings.host, settings.port)
            is_whole = seen.issuperset(self._gateway_names)
            if health == 200 and is_whole and not self._stop_asked.is_set():
                self._is_ready = True
                seconds = monotonic() - started
                late = sorted(set(self._ended) - seen)
                if late:
                    self._tell(f"  still starting: {', '.join(late)}")
                self._tell(f"ready after {seconds:.1f} s: {settings.url}/v1")
                log.info("ready", cause="health", seconds=round(seconds, 3), url=settings.url)
                return
            await _wait(self._stop_asked, READY_POLL_SECONDS)

    # ---- ending ----------------------------------------------------------------------------

    async def _end_all(self) -> None:
        if self._is_ready:
            self._tell(
                f"stopping: running requests have {self._settings.drain_seconds:g} s to finish "
                "(again to kill)"
            )
        for stage in Stage:
            names = [spec.name for spec in self._specs if spec.stage is stage]
            self._signal(names, signal.SIGTERM)
            grace = STAGE_GRACE_SECONDS
            if stage is not Stage.CONTROLLER:
                grace += self._settings.drain_seconds
            late = await self._await_end(names, grace)
            if late:
                self._tell(f"{', '.join(late)} did not end in {grace:g} s: killing")
            self._signal(late, signal.SIGKILL)
        for name in self._ended:
            await self._ended[name].wait()

    async def _await_end(self, names: list[str], seconds: float) -> list[str]:
        """Wait for the ends of processes; return those that still run."""
        deadline = monotonic() + seconds
        for name in names:
            await _wait(self._ended[name], max(0.0, deadline - monotonic()))
        return [name for name in names if not self._ended[name].is_set()]

    def _signal(self, names: Iterable[str], number: signal.Signals) -> None:
        for name in names:
            if (child := self._children.get(name)) is not None:
                child.send(number)


async def _wait(event: asyncio.Event, seconds: float) -> None:
    """Wait until the event is set, or the time is over."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return


def _names(report: StatusReport | None) -> set[str]:
    if report is None:
        return set()
    members = [str(worker.id) for worker in report.workers]
    members += [str(gateway.id) for gateway in report.gateways]
    return {"controller", *members}
