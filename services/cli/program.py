"""``flowpath gateway|controller|prefill|decode``: this process becomes one program."""

import asyncio
import os
import sys

from common.config.folders import prepare_run_dir
from common.config.load import save_settings
from common.config.settings import Settings
from common.transport.addresses import check_network
from services.cli.supervisor.prepare import prepare_model


def become(program: str, settings: Settings, process_id: str) -> None:
    """Replace this process by ``python -m services.<program>`` with the same settings."""
    check_network(settings)
    if program != "controller":
        settings = asyncio.run(prepare_model(settings, _tell))
    prepare_run_dir(settings.run_dir)
    settings_file = settings.run_dir / f"{process_id}.settings.json"
    save_settings(settings, settings_file)
    command = [
        *(sys.executable, "-m", f"services.{program}"),
        *("--settings", str(settings_file), "--id", process_id),
    ]
    sys.stdout.flush()
    os.execv(sys.executable, command)  # noqa: S606 - no shell, our own interpreter


def _tell(line: str) -> None:
    sys.stderr.write(f"{line}\n")
