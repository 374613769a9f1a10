"""The admin channel from the operator's side: one question, one answer, one deadline."""

import asyncio
import os
from typing import TypeAlias

from common.config.settings import Settings
from common.errors import ConfigError
from common.ids import new_epoch
from common.messages.admin import (
    AdminRefused,
    CliToController,
    ControllerToCli,
    GetStatus,
    OrderDone,
    OrderDrain,
    OrderRole,
    OrderRoles,
    StatusReport,
)
from common.messages.codec import Codec
from common.transport.channels import ADMIN
from common.transport.sockets import Context, DealerLink, Identity, new_context

DEADLINE_SECONDS = 3.0

AdminLink: TypeAlias = DealerLink[CliToController, ControllerToCli]
Order: TypeAlias = OrderRole | OrderRoles | OrderDrain


def admin_link(context: Context, settings: Settings, name: str) -> AdminLink:
    """Connect to the controller of this host; it need not be there yet."""
    return AdminLink(
        context,
        ADMIN,
        settings.admin_endpoint,
        Identity(name, new_epoch()),
        Codec(CliToController),
        Codec(ControllerToCli),
    )


async def ask_status(settings: Settings, deadline_seconds: float) -> StatusReport | None:
    """Return the controller's report, or None when none came in time."""
    answer = await _ask(settings, GetStatus(), deadline_seconds)
    assert not isinstance(answer, OrderDone), "a question about the state is no order"
    return answer


async def need_status(settings: Settings) -> StatusReport:
    """Return the controller's report. ConfigError when none came in time."""
    report = await ask_status(settings, DEADLINE_SECONDS)
    if report is None:
        raise _no_controller(settings)
    return report


async def give_order(settings: Settings, order: Order) -> str:
    """Have the controller carry an order out; return what it says.

    ConfigError when it refuses, with its reason, or does not answer in time.
    """
    answer = await _ask(settings, order, DEADLINE_SECONDS)
    if answer is None:
        raise _no_controller(settings)
    assert isinstance(answer, OrderDone), "an order is answered as such"
    return answer.message


async def _ask(
    settings: Settings, question: GetStatus | Order, deadline_seconds: float
) -> StatusReport | OrderDone | None:
    """Return the answer that fits the question, or None when none came in time."""
    expected = StatusReport if isinstance(question, GetStatus) else OrderDone
    context = new_context()
    try:
        link = admin_link(context, settings, f"cli-{os.getpid()}")
        try:
            async with asyncio.timeout(deadline_seconds):
                link.try_send(question, type(question).__name__)
                async for received in link.received():
                    answer = received.message
                    if isinstance(answer, AdminRefused):
                        raise ConfigError(f"the controller refused: {answer.message}")
                    if isinstance(answer, expected):
                        return answer
        except TimeoutError:
            return None
        finally:
            link.close()
        return None
    finally:
        context.destroy(linger=0)


def _no_controller(settings: Settings) -> ConfigError:
    return ConfigError(
        f"no controller answered at {settings.run_dir} within {DEADLINE_SECONDS:g} s; is "
        "`flowpath serve` or `flowpath controller` running for this user, port and "
        "FLOWPATH_RUN_DIR? Of several hosts, run this on the controller's"
    )
