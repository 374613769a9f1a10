"""Asking the gateway for its health."""

import http.client

PROBE_SECONDS = 1.0


def ask_health(host: str, port: int) -> int | None:
    """Return the status code of ``/health``, or None when nobody answers in time. Blocks."""
    connection = http.client.HTTPConnection(host, port, timeout=PROBE_SECONDS)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
