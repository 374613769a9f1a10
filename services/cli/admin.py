"""The admin channel from the operator's side: one question, one answer, one deadline."""

import asyncio
import os

from common.config.settings import Settings
from common.errors import ConfigError
from common.ids import new_epoch
from common.messages.admin import (
    AdminRefused,
    CliToController,
    ControllerToCli,
    GetStatus,
    StatusReport,
)
from common.messages.codec import Codec
from common.transport.channels import ADMIN
from common.transport.sockets import DealerLink, Identity, new_context


async def ask_status(settings: Settings, deadline_seconds: float) -> StatusReport | None:
    """Return the controller's report, or None when none came in time."""
    context = new_context()
    try:
        link = DealerLink[CliToController, ControllerToCli](
            context,
            ADMIN,
            settings.admin_endpoint,
            Identity(f"cli-{os.getpid()}", new_epoch()),
            Codec(CliToController),
            Codec(ControllerToCli),
        )
        try:
            async with asyncio.timeout(deadline_seconds):
                link.try_send(GetStatus(), "status")
                async for received in link.received():
                    match received.message:
                        case StatusReport():
                            return received.message
                        case AdminRefused(message=message):
                            raise ConfigError(f"the controller refused: {message}")
                        case _:
                            continue
        except TimeoutError:
            return None
        finally:
            link.close()
        return None
    finally:
        context.destroy(linger=0)
