"""Everything that can be refused before the first process starts."""

import asyncio
import socket
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from common.config.folders import lock_file
from common.config.settings import Settings
from common.engine.shard import Shard
from common.errors import ConfigError
from common.models.config import ModelConfig

_SOCKET_NAMES = ("controller.control", "controller.admin", "*.handoff", "*.tokens")
"""What FlowPath's processes bind in ``run_dir``."""


def claim_port(host: str, port: int) -> int:
    """Return the port to serve on: the asked one when it is free, for 0 any free one.

    ConfigError when it is in use or may not be bound.
    """
    with _bound(host, port) as probe:
        return int(probe.getsockname()[1])


@contextmanager
def shared_port(host: str, port: int) -> Iterator[None]:
    """Hold a port for several gateways for as long as the block.

    It is bound alone first, so that one which somebody else uses, shared or not, is refused with
    ConfigError; from then on this user's gateways may listen on it beside each other, and nobody
    may take it while one of them is started again.
    """
    with _bound(host, port) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        yield


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    probe = socket.socket(family, socket.SOCK_STREAM)
    try:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
    except OSError as error:
        probe.close()
        raise ConfigError(
            f"port {port} on {host} cannot be used: {error.strerror}; stop what listens there, "
            "or choose another with --port or FLOWPATH_PORT"
        ) from error
    return probe


def clean_run_dir(folder: Path) -> list[str]:
    """Remove socket files that a killed cluster left behind; returns their names.

    Only names of ours: other programs may keep sockets in the same folder. The caller holds the
    folder's lock. ConfigError when a controller still runs in it.
    """
    with lock_file(folder / "controller.lock", "a controller"):
        ours = [path for name in _SOCKET_NAMES for path in folder.glob(name)]
        stale = [path for path in ours if stat.S_ISSOCK(path.lstat().st_mode)]
        for path in stale:
            path.unlink()
    return sorted(path.name for path in stale)


async def prepare_model(settings: Settings, tell: Callable[[str], None]) -> Settings:
    """Return settings that name a checked model folder; the default one is made where missing.

    ``tell`` gets the progress. Raises ModelError, which names the file, for a folder that cannot
    be served, and ConfigError where ``tensor_parallel`` ranks cannot share it.
    """
    if settings.model:
        folder = Path(settings.model)
    else:
        folder = await _default_model(settings, tell)
    Shard(0, settings.tensor_parallel).config(ModelConfig.load(folder))
    named = {"model": str(folder), "served_model_name": settings.model_name}
    return settings.model_copy(update=named)


async def _default_model(settings: Settings, tell: Callable[[str], None]) -> Path:
    # A process of its own: the conversion imports torch.
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "common.models.default_model"),
        *("--cache-dir", str(settings.cache_dir / "models")),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    lines: list[str] = []
    try:
        async for line in process.stderr:
            lines.append(line.decode(errors="replace").rstrip())
            tell(lines[-1])
        answer = (await process.stdout.read()).decode().strip()
        if await process.wait() != 0:
            told = "; ".join(lines[-3:]) or f"exit code {process.returncode}"
            raise ConfigError(f"the default model cannot be made: {told}")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return Path(answer.splitlines()[-1])
