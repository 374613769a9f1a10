"""Loads given prompts from the store while a worker begins to serve.

They go the way of requests' prefixes, one at a time, so that a request waits for one of them at
most. What comes is cached like any prefix, and gives way to what is used more.
"""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from common.config.preload_file import Prompts, read_prompts
from common.config.settings import Settings
from common.ids import RequestId
from common.worker.phases import PrefixLoaded
from common.worker.stored_prefixes import StoredPrefixes

log = structlog.get_logger()

POOL_SHARE = 2
"""Of the pool at most 1 / 2 is loaded ahead of requests."""


def prompts_to_preload(settings: Settings) -> Prompts:
    """Return what the settings name, perhaps nothing; ConfigError where that is of no use."""
    if not settings.store_preload:
        return ()
    return read_prompts(Path(settings.store_preload))


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
