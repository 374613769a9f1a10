"""``python -m services.prefill``; with ``combined`` set the worker takes the decode role too."""

import sys
from collections.abc import Sequence

from common.config.program import run_and_end, run_program
from common.config.settings import Settings
from common.ids import WorkerId
from common.messages.fields import Role


def main(argv: Sequence[str] | None = None) -> int:
    """Run the worker until SIGTERM or SIGINT; returns the exit code."""
    return run_program("prefill", "", sys.argv[1:] if argv is None else argv, _run)


def _run(settings: Settings, worker_id: str) -> int:
    from common.worker.program import run  # noqa: PLC0415 - torch loads for seconds; errors first

    role = Role.COMBINED if settings.combined else Role.PREFILL
    return run(settings, role, WorkerId(worker_id or f"{role}-0"))


if __name__ == "__main__":
    run_and_end(main)
