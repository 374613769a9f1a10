#!/opt/flowpath/bin/python
"""Says by its exit code whether the program of a container is healthy.

``flowpath-health gateway PORT``: /health answers 200, so requests can be served.
``flowpath-health controller FOLDER``: its socket in the folder of sockets greets.
``flowpath-health worker ID``: the controller counts the worker as ready. A setting worker_id goes
before ``ID``.

The first two run every few seconds, so they load nothing but the standard library.
"""

import sys
from pathlib import Path

DEADLINE_SECONDS = 4.0
GREETING = b"\xff"
"""What a ZeroMQ socket sends first to whoever connects."""


def _gateway_fault(port: str) -> str:
    import http.client  # noqa: PLC0415 - each check loads what it needs alone
    import json  # noqa: PLC0415

    connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=DEADLINE_SECONDS)
    try:
        connection.request("GET", "/health")
        response = connection.getresponse()
        body = response.read()
    finally:
        connection.close()
    if response.status == 200:
        return ""
    return str(json.loads(body).get("reason", body)) if body else f"HTTP {response.status}"


def _controller_fault(folder: str) -> str:
    import socket  # noqa: PLC0415

    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(DEADLINE_SECONDS)
        client.connect(str(Path(folder) / "controller.admin"))
        return "" if client.recv(1) == GREETING else "its socket says nothing"


def _worker_fault(name: str) -> str:
    import asyncio  # noqa: PLC0415

    from common.config.load import load_settings  # noqa: PLC0415
    from common.messages.fields import WorkerState  # noqa: PLC0415
    from services.cli.admin import ask_status  # noqa: PLC0415

    settings = load_settings().settings
    name = settings.worker_id or name
    report = asyncio.run(ask_status(settings, DEADLINE_SECONDS))
    if report is None:
        return "the controller does not answer"
    for worker in report.workers:
        if worker.id == name:
            return "" if worker.state is WorkerState.READY else f"{name} is {worker.state}"
    return f"the controller knows no {name}"


CHECKS = {"gateway": _gateway_fault, "controller": _controller_fault, "worker": _worker_fault}


def main(program: str, argument: str) -> int:
    """Print what is wrong, if anything; return the exit code."""
    try:
        fault = CHECKS[program](argument)
    except (OSError, ValueError) as error:
        fault = str(error)
    sys.stdout.write(f"{fault or 'healthy'}\n")
    return 1 if fault else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
