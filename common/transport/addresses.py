"""From settings to the endpoints and keys of one process."""

from common.config.settings import Settings
from common.transport.security import Keys, with_key
from common.transport.sockets import check_bindable


def load_keys(settings: Settings) -> Keys | None:
    """Read this host's keys, where settings name a folder. ConfigError when they are unusable."""
    return Keys.load(settings.keys) if settings.keys is not None else None


def check_network(settings: Settings) -> None:
    """Refuse keys that are unusable, and an address that is none of this host's.

    For programs that have much to load first. ConfigError says what is wrong.
    """
    load_keys(settings)
    if settings.cluster_host:
        check_bindable(settings.socket_address(""))


def controller_endpoint(settings: Settings, keys: Keys | None) -> str:
    """Return the endpoint at which this process reaches its controller."""
    if settings.controller:
        return settings.controller
    if keys is not None and settings.cluster_host:
        return with_key(settings.control_address, keys.public)
    return settings.control_address
