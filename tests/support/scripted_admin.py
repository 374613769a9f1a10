"""The controller's side of the admin channel, played by a test over a real socket."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from common.config.settings import Settings
from common.ids import Epoch, new_epoch
from common.messages.admin import CliToController, ControllerToCli, ScalerHello
from common.messages.codec import Codec
from common.transport.channels import ADMIN
from common.transport.sockets import Context, Identity, RouterHub, new_context
from tests.support.board import Board

Answer = Callable[[CliToController], ControllerToCli | None]


class ScriptedAdmin:
    """Answers what comes with ``answer``, and says the rest when told to."""

    def __init__(self, context: Context, settings: Settings, answer: Answer) -> None:
        self.got: list[CliToController] = []
        self.answer = answer
        self.board = Board()
        self._scaler: tuple[str, Epoch] | None = None
        self._hub: RouterHub[ControllerToCli, CliToController] = RouterHub(
            context,
            ADMIN,
            settings.admin_endpoint,
            Identity("controller", new_epoch()),
            Codec(ControllerToCli),
            Codec(CliToController),
        )

    async def play(self) -> None:
        """Answer until closed."""
        async for received in self._hub.received():
            sender = (received.envelope.sender, received.envelope.epoch)
            if isinstance(received.message, ScalerHello):
                self._scaler = sender
            self.got.append(received.message)
            if (answer := self.answer(received.message)) is not None:
                assert self._hub.try_send(sender, answer, "test")
            self.board.post()

    def say(self, message: ControllerToCli) -> None:
        """Send a message to the scaler that has said hello, whoever else asks meanwhile."""
        assert self._scaler is not None
        assert self._hub.try_send(self._scaler, message, "test")

    async def hears(self, message: CliToController) -> None:
        """Wait until a message has come."""
        await self.board.wait_for(f"{message}", lambda: message in self.got)

    def close(self) -> None:
        """Go silent for good."""
        self._hub.close()


@asynccontextmanager
async def scripted_admin(settings: Settings, answer: Answer) -> AsyncIterator[ScriptedAdmin]:
    """Play the controller of these settings as long as the block."""
    context = new_context()
    admin = ScriptedAdmin(context, settings, answer)
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(admin.play())
            try:
                yield admin
            finally:
                admin.close()
    finally:
        context.destroy(linger=0)
