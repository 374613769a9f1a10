"""A process's metrics on a loopback port, for Prometheus on the same host."""

from collections.abc import Iterator
from contextlib import contextmanager

import structlog
from prometheus_client import CollectorRegistry, start_http_server

from common.errors import ConfigError

METRICS_HOST = "127.0.0.1"

log = structlog.get_logger()


@contextmanager
def metrics_served(registry: CollectorRegistry, port: int | None) -> Iterator[None]:
    """Answer GET /metrics on a loopback port for as long as the block; None opens nothing.

    Runs in a thread of its own. ConfigError when the port cannot be used.
    """
    if port is None:
        yield
        return
    try:
        server, thread = start_http_server(port, METRICS_HOST, registry)
    except OSError as error:
        raise ConfigError(
            f"metrics port {port} on {METRICS_HOST} cannot be used: {error.strerror}; change "
            "metrics_port_base"
        ) from error
    log.info("metrics_listening", url=f"http://{METRICS_HOST}:{port}/metrics")
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
