"""Keeps every program of the cluster running, and ends them in order.

A program that ends is started again after a growing wait. Before the cluster was ready for the
first time, exit code 2 (a setting or file is wrong) or repeated ends give it up instead; a worker
that load brought is then let go alone. The first stop signal drains: gateway, then workers, then
controller; the second kills.
"""

import asyncio
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
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


@dataclass(slots=True)
class _Kept:
    """One program that is kept running until ``stop`` is set; ``ended`` says that it is no more."""

    spec: ProcessSpec
    child: Child | None = None
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def send(self, number: signal.Signals) -> None:
        if self.child is not None:
            self.child.send(number)


class Supervisor:
    """Runs ``specs`` until ``stop``; ``tell`` gets one line per fact for the operator."""

    def __init__(
        self, settings: Settings, specs: Iterable[ProcessSpec], settings_file: Path, tell: Tell
    ) -> None:
        self._settings = settings
        self._settings_file = settings_file
        self._tell = tell
        self._kept = {spec.name: _Kept(spec) for spec in specs}
        self._tasks: asyncio.TaskGroup | None = None
        self._is_ready = False
        self._exit_code = 0
        self._stop_asked = asyncio.Event()

    def stop(self) -> None:
        """Drain and end; asked again, end at once."""
        if self._stop_asked.is_set():
            self._tell("killing")
            for kept in self._kept.values():
                kept.send(signal.SIGKILL)
        self._ask_stop()

    async def run(self) -> int:
        """Serve until stopped or given up; return the exit code."""
        async with asyncio.TaskGroup() as tasks:
            for kept in self._kept.values():
                tasks.create_task(self._keep(kept))
            self._tasks = tasks
            watch = tasks.create_task(self._watch_start())
            await self._stop_asked.wait()
            watch.cancel()
            await self._end_all()
        return self._exit_code

    # ---- more and fewer workers ------------------------------------------------------------

    @property
    def worker_names(self) -> tuple[str, ...]:
        """Every worker that is kept or has not ended yet."""
        return tuple(kept.spec.name for kept in self._of(Stage.WORKER))

    def try_add(self, spec: ProcessSpec) -> bool:
        """Keep one more program; False, with nothing started, while all end or its name is used."""
        if self._tasks is None or self._stop_asked.is_set() or spec.name in self._kept:
            return False
        kept = self._kept[spec.name] = _Kept(spec)
        self._tasks.create_task(self._keep(kept))
        return True

    def remove(self, name: str) -> None:
        """End one program in order, for good; its name is free again once it has ended.

        Nothing where it is unknown or ends already.
        """
        kept = self._kept.get(name)
        if self._tasks is None or kept is None or kept.stop.is_set():
            return
        kept.stop.set()
        self._tasks.create_task(self._end([kept]))

    # ---- keeping ---------------------------------------------------------------------------

    async def _keep(self, kept: _Kept) -> None:
        spec, backoff = kept.spec, Backoff()
        while not kept.stop.is_set():
            kept.child = Child(spec, self._settings_file, partial(self._tell_progress, spec.name))
            started = monotonic()
            code = await kept.child.run()
            if kept.stop.is_set():
                break
            wait = backoff.after(monotonic() - started)
            num_ends = backoff.num_quick_ends if spec.is_elastic else backoff.num_ends
            is_hopeless = code == EXIT_CONFIG_ERROR or num_ends >= MAX_FAILED_STARTS
            if is_hopeless and (spec.is_elastic or not self._is_ready):
                self._give_up(kept.child, code)
                break
            told = f"signal {-code}" if code < 0 else f"exit code {code}"
            last = f": {kept.child.output[-1]}" if kept.child.output else ""
            self._tell(f"{spec.name} ended ({told}{last}); starting it again in {wait:g} s")
            log.warning("child_restarts", cause=told, child=spec.name, wait_seconds=wait)
            await _wait(kept.stop, wait)
        kept.ended.set()
        del self._kept[spec.name]

    def _tell_progress(self, name: str, text: str) -> None:
        self._tell(f"  {name}: {text}")

    def _give_up(self, child: Child, code: int) -> None:
        told = "\n".join(child.output) or f"exit code {code}"
        self._tell(f"{child.spec.name} cannot start:\n{told}")
        log.error("given_up", cause=child.spec.name, code=code)
        if child.spec.is_elastic:
            return
        self._exit_code = EXIT_CONFIG_ERROR if code == EXIT_CONFIG_ERROR else EXIT_FAILED
        self._ask_stop()

    # ---- starting --------------------------------------------------------------------------

    async def _watch_start(self) -> None:
        """Tell which process is up, until every gateway is and requests are served."""
        started = monotonic()
        seen: set[str] = set()
        expected = set(self._kept)
        gateways = {kept.spec.name for kept in self._of(Stage.GATEWAY)}
        while not self._stop_asked.is_set():
            report = await ask_status(self._settings, STATUS_SECONDS)
            for name in _names(report) - seen:
                seen.add(name)
                self._tell(f"  {name} is up after {monotonic() - started:.1f} s")
            settings = self._settings
            health = await asyncio.to_thread(ask_health, settings.host, settings.port)
            is_whole = seen.issuperset(gateways)
            if health == 200 and is_whole and not self._stop_asked.is_set():
                self._is_ready = True
                seconds = monotonic() - started
                late = sorted(expected - seen)
                if late:
                    self._tell(f"  still starting: {', '.join(late)}")
                self._tell(f"ready after {seconds:.1f} s: {settings.url}/v1")
                log.info("ready", cause="health", seconds=round(seconds, 3), url=settings.url)
                return
            await _wait(self._stop_asked, READY_POLL_SECONDS)

    # ---- ending ----------------------------------------------------------------------------

    def _ask_stop(self) -> None:
        """Start no program any more."""
        self._stop_asked.set()
        for kept in self._kept.values():
            kept.stop.set()

    async def _end_all(self) -> None:
        if self._is_ready:
            self._tell(
                f"stopping: running requests have {self._settings.drain_seconds:g} s to finish "
                "(again to kill)"
            )
        for stage in Stage:
            await self._end(self._of(stage))

    async def _end(self, ending: list[_Kept]) -> None:
        """Let programs of one stage finish what runs, and kill those that do not end in time."""
        for kept in ending:
            kept.send(signal.SIGTERM)
        grace = STAGE_GRACE_SECONDS
        if any(kept.spec.stage is not Stage.CONTROLLER for kept in ending):
            grace += self._settings.drain_seconds
        deadline = monotonic() + grace
        for kept in ending:
            await _wait(kept.ended, max(0.0, deadline - monotonic()))
        late = [kept for kept in ending if not kept.ended.is_set()]
        if late:
            names = ", ".join(kept.spec.name for kept in late)
            self._tell(f"{names} did not end in {grace:g} s: killing")
        for kept in late:
            kept.send(signal.SIGKILL)
        for kept in late:
            await kept.ended.wait()

    def _of(self, stage: Stage) -> list[_Kept]:
        return [kept for kept in self._kept.values() if kept.spec.stage is stage]


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
