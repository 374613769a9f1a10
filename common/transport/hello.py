"""A hello that the controller refuses: tried again while that may help, then the program's end."""

from time import monotonic

import structlog

from common.errors import ConfigError
from common.messages.control import HelloRefused

log = structlog.get_logger()


class RefusedHello:
    """Since when this process's hello is refused; ``kind`` is what it is in the cluster."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._since: float | None = None

    def accepted(self) -> None:
        """It is refused no more."""
        self._since = None

    def refused(self, message: HelloRefused) -> None:
        """Return when the same hello may yet be accepted, else raise ConfigError."""
        now = monotonic()
        if self._since is None:
            self._since = now
            log.warning(
                "hello_refused", reason=message.message, retry_seconds=message.retry_seconds
            )
        if now - self._since >= message.retry_seconds:
            raise ConfigError(f"the controller refused this {self._kind}: {message.message}")
