"""The worker's side of the control channel: registration, heartbeats, orders."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic

import structlog

from common.messages.control import (
    Cancel,
    ControllerToWorker,
    CopyPrefix,
    Directive,
    Fenced,
    Goodbye,
    HeartbeatAnswered,
    HelloRefused,
    HelloRequested,
    KVIndexRequested,
    LookUpPrefix,
    MigrateDecode,
    PeerJoined,
    PeerLeft,
    PlaceDecode,
    PlacementUnknown,
    PlaceRequest,
    PrefixUnavailable,
    SetDraining,
    SwitchRole,
    WorkerAccepted,
    WorkerToController,
)
from common.transport.hello import RefusedHello
from common.transport.sockets import DealerLink
from common.worker.own_role import OwnRole

log = structlog.get_logger()

HELLO_RETRY_SECONDS = 1.0
TRIES_PER_LINE = 15
CATCH_UP_SECONDS = 1.0
MIN_BEAT_SECONDS = 0.02
"""Between two heartbeats, however much there is to tell."""

Order = (
    PlaceRequest
    | PlaceDecode
    | PlacementUnknown
    | Cancel
    | PeerJoined
    | PeerLeft
    | WorkerAccepted
    | SwitchRole
    | Directive
    | SetDraining
    | MigrateDecode
    | CopyPrefix
    | PrefixUnavailable
    | LookUpPrefix
    | KVIndexRequested
)


News = tuple[WorkerToController, tuple[bytes, ...]]
"""A message with its raw frames."""


class WasFenced(Exception):  # noqa: N818  # an outcome, not an error
    """The controller declared this incarnation dead; a new one must begin."""


class ControlLink:
    """Keeps the worker registered and hands the controller's orders on.

    ``news`` is what is sent as a heartbeat, whose own message is the last. A controller that is not
    heard from for ``death_seconds`` is told of in the log.
    """

    def __init__(
        self,
        link: DealerLink[WorkerToController, ControllerToWorker],
        own: OwnRole,
        news: Callable[[], Sequence[News]],
        on_order: Callable[[Order, tuple[bytes, ...]], None],
        death_seconds: float,
    ) -> None:
        self._link = link
        self._own = own
        self._news = news
        self._on_order = on_order
        self._heartbeat_seconds = HELLO_RETRY_SECONDS
        self._is_registered = False
        self._is_new_controller = False
        self._refusal = RefusedHello("worker")
        self._accepted = asyncio.Event()
        self._death_seconds = death_seconds
        self._heard_at = monotonic()
        self._is_silent = False
        self._awaited_sequence = 0
        self._caught_up = asyncio.Event()
        self._hurry = asyncio.Event()

    def send(self, message: WorkerToController, cause: str) -> None:
        """Report to the controller."""
        if not self._link.try_send(message, cause):
            log.error("control_queue_full", message=type(message).__name__)

    async def receive(self) -> None:
        """Take orders until the socket is closed.

        Raises ConfigError when the controller refuses this worker, WasFenced when it fences it.
        """
        async for received in self._link.received():
            message = received.message
            self._note_heard()
            match message:
                case WorkerAccepted():
                    self._accept(message)
                case HelloRefused():
                    self._refusal.refused(message)
                case HelloRequested():
                    if message.epoch == self._own.info.epoch:
                        self._is_new_controller = True
                        self._link.try_send(self._own.hello, "hello requested")
                case Fenced():
                    if message.epoch == self._own.info.epoch:
                        raise WasFenced(message.message)
                case HeartbeatAnswered():
                    if message.sequence >= self._awaited_sequence:
                        self._caught_up.set()
                case (
                    PlaceRequest()
                    | PlaceDecode()
                    | PlacementUnknown()
                    | Cancel()
                    | PeerJoined()
                    | PeerLeft()
                    | SwitchRole()
                    | Directive()
                    | SetDraining()
                    | MigrateDecode()
                    | CopyPrefix()
                    | KVIndexRequested()
                    | PrefixUnavailable()
                    | LookUpPrefix()
                ):
                    self._on_order(message, received.payload)

    def _accept(self, message: WorkerAccepted) -> None:
        """Take a registration; hellos that had to wait are answered too, and told of once."""
        if not self._is_registered or self._is_new_controller:
            log.info("registered", role=message.role, num_peers=len(message.peers))
        self._is_registered = True
        self._is_new_controller = False
        self._refusal.accepted()
        self._heartbeat_seconds = message.heartbeat_seconds
        self._accepted.set()
        self._on_order(message, ())

    async def beat(self) -> None:
        """Say hello until accepted, then send heartbeats for ever."""
        num_tries = 0
        while not self._is_registered:
            self._link.try_send(self._own.hello, "start")
            try:
                async with asyncio.timeout(HELLO_RETRY_SECONDS):
                    await self._accepted.wait()
            except TimeoutError:
                if num_tries % TRIES_PER_LINE == 0:
                    log.warning("waiting_for_controller", endpoint=self._link.endpoint)
                num_tries += 1
        while True:
            self._hurry.clear()
            self._send_news("heartbeat")
            await asyncio.sleep(min(MIN_BEAT_SECONDS, self._heartbeat_seconds))
            with suppress(TimeoutError):
                async with asyncio.timeout(self._heartbeat_seconds - MIN_BEAT_SECONDS):
                    await self._hurry.wait()
            self._note_silence()

    def beat_soon(self) -> None:
        """Send the next heartbeat at once, or as soon as ``MIN_BEAT_SECONDS`` have passed."""
        self._hurry.set()

    async def catch_up(self, cause: str) -> None:
        """Send a heartbeat, and take all that the controller ordered before it read that.

        Gives up after ``CATCH_UP_SECONDS``.
        """
        if not self._is_registered or self._is_silent:
            return
        self._caught_up.clear()
        self._send_news(cause)
        self._awaited_sequence = self._link.last_sequence
        with suppress(TimeoutError):
            async with asyncio.timeout(CATCH_UP_SECONDS):
                await self._caught_up.wait()

    def _send_news(self, cause: str) -> None:
        for message, payload in self._news():
            self._link.try_send(message, cause, payload)

    def _note_heard(self) -> None:
        now = monotonic()
        if self._is_silent:
            self._is_silent = False
            log.info("controller_back", silent_seconds=round(now - self._heard_at, 1))
        self._heard_at = now

    def _note_silence(self) -> None:
        silent_seconds = monotonic() - self._heard_at
        if silent_seconds > self._death_seconds and not self._is_silent:
            self._is_silent = True
            log.warning(
                "controller_silent",
                endpoint=self._link.endpoint,
                silent_seconds=round(silent_seconds, 1),
            )

    def leave(self, reason: str) -> None:
        """Say goodbye."""
        self._link.try_send(Goodbye(reason=reason), "stop")
