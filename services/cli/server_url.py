"""Addresses of servers, as the operator gives them."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from common.errors import ConfigError

_USUAL_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class ServerUrl:
    """Where a server is; ``path`` is what stands behind its host."""

    scheme: str
    host: str
    port: int
    path: str


def parse_server_url(url: str, *schemes: str) -> ServerUrl:
    """Read an address of one of ``schemes``. ConfigError when it is none."""
    wanted = " or ".join(f"{scheme}://" for scheme in schemes)
    try:
        parts = urlsplit(url)
        if parts.scheme not in schemes or not parts.hostname:
            raise ConfigError(f"{url} is no {wanted} address")
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{url} is no {wanted} address: {error}") from error
    usual = _USUAL_PORTS[parts.scheme]
    return ServerUrl(parts.scheme, parts.hostname, usual if port is None else port, parts.path)
