"""What the end-to-end tests share: the real model and two clusters."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from common.config.load import load_settings
from common.models.default_model import ensure_default_model
from tests.support.cluster import Cluster, ClusterOptions, running_cluster

MAX_BODY_BYTES = 2**20
SETTINGS = {"max_num_batched_tokens": 256, "max_body_bytes": MAX_BODY_BYTES}
"""A step holds 4 blocks, so that prompts of more tokens are computed in chunks."""


@pytest.fixture(scope="session")
def model_folder() -> Path:
    return ensure_default_model(load_settings().settings.cache_dir / "models", print)


@pytest.fixture(scope="session")
def encode(model_folder: Path) -> Callable[[str], list[int]]:
    """Tokenize without special tokens."""
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def split(model_folder: Path) -> AsyncIterator[Cluster]:
    """One prefill and one decode worker, in fp32, which keep to their roles: all is handed over."""
    options = ClusterOptions(model_folder, settings={**SETTINGS, "roles": "manual"})
    async with running_cluster(options) as cluster:
        yield cluster


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def combined(model_folder: Path) -> AsyncIterator[Cluster]:
    """One worker that does both, in fp32."""
    options = ClusterOptions(model_folder, is_combined=True, threads=2, settings=SETTINGS)
    async with running_cluster(options) as cluster:
        yield cluster
