"""The gateway's listening socket, alone on its port or beside other gateways' ones."""

import socket

from common.errors import ConfigError

BACKLOG = 2048


def bind_listener(host: str, port: int, *, is_shared: bool) -> socket.socket:
    """Listen on a port; ``is_shared`` lets other gateways of this user listen on it too.

    The kernel then deals connections out between them. Raises ConfigError when the port is in
    use by anybody else.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server(
            (host, port), family=family, backlog=BACKLOG, reuse_port=is_shared
        )
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror}; "
            "stop what uses it, or set FLOWPATH_PORT"
        ) from error
