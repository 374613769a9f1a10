"""``python -m services.controller``."""

import asyncio
import signal
import sys
from collections.abc import Sequence

import uvloop

from common.config.folders import lock_file, prepare_run_dir
from common.config.host import host_id
from common.config.program import run_program
from common.config.settings import Settings
from common.telemetry.logging import configure_logging
from services.controller.server import ControllerServer


def main(argv: Sequence[str] | None = None) -> int:
    """Run the controller until SIGTERM or SIGINT; returns the exit code."""
    return run_program("controller", "controller", sys.argv[1:] if argv is None else argv, _run)


def _run(settings: Settings, process_id: str) -> int:
    prepare_run_dir(settings.run_dir)
    configure_logging(
        process_id, settings.log_dir, settings.log_level, to_stderr=settings.log_stderr
    )
    with lock_file(settings.run_dir / "controller.lock", "another controller"):
        uvloop.run(_serve(settings))
    return 0


async def _serve(settings: Settings) -> None:
    server = ControllerServer(settings, host_id())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stop)
    await server.serve()


if __name__ == "__main__":
    sys.exit(main())
