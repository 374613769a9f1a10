"""Loads given prompts from the store while a worker begins to serve.

They go the way of requests' prefixes, one at a time, so that a request waits for one of them at
most. What comes is cached like any prefix, and gives way to what is used more.
"""

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from common.config.settings import Settings
from common.errors import ConfigError
from common.ids import RequestId
from common.worker.phases import PrefixLoaded
from common.worker.stored_prefixes import StoredPrefixes

log = structlog.get_logger()

MAX_FILE_BYTES = 64 * 2**20
MAX_TOKEN_ID = 2**31 - 1
POOL_SHARE = 2
"""Of the pool at most 1 / 2 is loaded ahead of requests."""

Prompts = tuple[tuple[int, ...], ...]


def prompts_to_preload(settings: Settings) -> Prompts:
    """Return what the settings name, perhaps nothing; ConfigError where that is of no use."""
    if not settings.store_preload:
        return ()
    if not settings.has_store:
        raise ConfigError(f"store_preload {settings.store_preload}: there is no store to load from")
    return read_prompts(Path(settings.store_preload))


def read_prompts(path: Path) -> Prompts:
    """Return the prompts of a file; ConfigError names the line that is none.

    A line is an object with ``tokens``, as ``/tokenize`` answers; empty lines do not count.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"store_preload {path}: it has more than {MAX_FILE_BYTES} bytes")
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"store_preload {path}: {error}") from error
    return tuple(
        _parse(line, f"store_preload {path}, line {number}")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    )


def _parse(line: str, where: str) -> tuple[int, ...]:
    try:
        told = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: {error}") from error
    tokens = told.get("tokens") if isinstance(told, dict) else None
    if not isinstance(tokens, list) or not all(_is_token(token) for token in tokens):
        raise ConfigError(f'{where}: say {{"tokens": [ids]}}, as /tokenize does')
    return tuple(tokens)


def _is_token(value: object) -> bool:
    return type(value) is int and 0 <= value < MAX_TOKEN_ID


async def preload(
    prompts: Prompts,
    prefixes: StoredPrefixes,
    pool_tokens: int,
    tell: Callable[[str], None],
) -> int:
    """Load prompts in their order, and ``tell`` how far that is; return the tokens that came.

    The first that would make it more than the pool's share ends it.
    """
    num_tokens, left = 0, pool_tokens // POOL_SHARE
    for number, prompt in enumerate(prompts, start=1):
        left -= len(prompt)
        if left < 0:
            log.warning("preload_cut", num_loaded=number - 1, num_prompts=len(prompts))
            break
        num_tokens += await _load(RequestId(f"preload-{number}"), prompt, prefixes)
        tell(f"preloaded {number} of {len(prompts)} prompts, {num_tokens} tokens")
    log.info("preloaded", num_prompts=len(prompts), num_tokens=num_tokens)
    return num_tokens


async def _load(name: RequestId, prompt: Sequence[int], prefixes: StoredPrefixes) -> int:
    came: asyncio.Future[PrefixLoaded] = asyncio.get_running_loop().create_future()

    def loaded(result: PrefixLoaded) -> None:
        if not came.done():
            came.set_result(result)

    if not prefixes.try_load(name, prompt, loaded):
        return 0
    try:
        return (await came).num_tokens
    finally:
        prefixes.forget(name)
