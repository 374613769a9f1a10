"""``flowpath serve`` from settings to exit code."""

import asyncio
import signal
from contextlib import ExitStack, closing, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from common.config import processor
from common.config.folders import lock_file, prepare_run_dir
from common.config.load import save_settings
from common.config.settings import Settings
from common.engine.parallel.rendezvous import remove_abandoned
from common.telemetry.logging import configure_logging
from common.transport.addresses import check_network, controller_endpoint, load_keys
from services.cli.supervisor.plan import plan_processes
from services.cli.supervisor.prepare import (
    claim_port,
    clean_run_dir,
    prepare_model,
    shared_port,
)
from services.cli.supervisor.scaler import ProcessScaler, ScalerLink
from services.cli.supervisor.store import choose_store
from services.cli.supervisor.supervisor import Supervisor, Tell
from services.cli.terminal import out


def flowpath_version() -> str:
    """Return the installed version."""
    try:
        return version("flowpath")
    except PackageNotFoundError:
        return "unknown (not installed)"


def serve(settings: Settings, *, is_port_free: bool) -> int:
    """Run the whole cluster until a stop signal; return the exit code.

    Raises ConfigError, with nothing started, when something is wrong with the settings.
    ``is_port_free`` says that the port was claimed already.
    """
    with ExitStack() as port:
        if settings.gateways > 1:
            port.enter_context(shared_port(settings.host, settings.port))
        elif not is_port_free:
            claim_port(settings.host, settings.port)
        return _serve_on_port(settings)


def _serve_on_port(settings: Settings) -> int:
    was_there = settings.run_dir.exists()
    prepare_run_dir(settings.run_dir)
    with lock_file(settings.run_dir / "serve.lock", "another flowpath serve"):
        clean_run_dir(settings.run_dir)
        try:
            file = configure_logging("serve", settings.log_dir, settings.log_level)
            with closing(file):
                return asyncio.run(_serve(settings, out()))
        finally:
            remove_abandoned()
            tidy(settings.run_dir, remove_folder=not was_there)


_TRANSPORTS = {"auto": "auto (shared memory; CUDA IPC between GPUs)", "shm": "shm (shared memory)"}


def told_dtype(settings: Settings) -> str:
    """Return the element type of the workers, as far as it is known before they start."""
    if settings.dtype != "auto":
        return settings.dtype
    here = "bfloat16" if processor.has_native_bfloat16() else "float32"
    if settings.device != "cpu" and processor.may_have_gpu():
        return f"auto (bfloat16 on a GPU, {here} on this processor)"
    return f"auto ({here})"


async def _serve(settings: Settings, console: Console) -> int:
    def tell(line: str) -> None:
        console.print(escape(line))

    tell(f"FlowPath {flowpath_version()}")
    check_network(settings)
    settings = choose_store(await prepare_model(settings, tell))
    specs = plan_processes(settings)
    settings_file = settings.run_dir / "settings.json"
    save_settings(settings, settings_file)
    supervisor = Supervisor(settings, specs, settings_file, tell)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, supervisor.stop)
    usual = _TRANSPORTS.get(settings.transport, settings.transport)
    if settings.tensor_parallel > 1:
        usual = "ranks (each KV head from rank to rank, within this host)"
    transport = "local (a worker does both)" if settings.combined else usual
    processes = ", ".join(spec.name for spec in specs)
    for name, value in (
        ("url", f"{settings.url}/v1"),
        ("model", f"{settings.model_name} ({settings.model})"),
        ("dtype", told_dtype(settings)),
        ("processes", processes),
        *([("elastic", f"up to {settings.max_workers} workers")] if settings.max_workers else []),
        ("transport", transport),
        ("store", settings.store),
        ("logs", str(settings.log_dir)),
    ):
        tell(f"  {name:<10} {value}")
    if settings.cluster_host:
        endpoint = controller_endpoint(settings, load_keys(settings))
        tell(f"  join       --controller '{endpoint}' on other hosts")
    async with asyncio.TaskGroup() as tasks:
        scaling = tasks.create_task(_scale(settings, supervisor, tell))
        code = await supervisor.run()
        scaling.cancel()
    tell("stopped")
    return code


async def _scale(settings: Settings, supervisor: Supervisor, tell: Tell) -> None:
    """Add and stop workers as the controller asks for, where there is a budget for it."""
    if settings.max_workers:
        scaler = ProcessScaler(supervisor, is_combined=settings.combined)
        await ScalerLink(settings, scaler, tell).run()


def tidy(run_dir: Path, *, remove_folder: bool) -> None:
    """Leave nothing of ours behind in the folder of sockets; every process has ended.

    With ``remove_folder`` the folder goes too, unless it holds something else, such as logs.
    """
    if not run_dir.exists():  # as when a session's end takes XDG_RUNTIME_DIR away
        return
    clean_run_dir(run_dir)
    for name in ("settings.json", "controller.lock", "serve.lock"):
        (run_dir / name).unlink(missing_ok=True)
    if remove_folder:
        with suppress(OSError):  # not empty
            run_dir.rmdir()
