"""What the end-to-end tests share: the real model and two clusters.

Two clusters that wait for requests cost as much as a test: their tests come last, and they stop
after the last one.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
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
SHARED = {"split", "combined"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move this folder's modules that use the shared clusters to its end, in them such tests."""
    here = Path(__file__).parent
    places = [place for place, item in enumerate(items) if item.path.is_relative_to(here)]
    own = [items[place] for place in places]
    users = {item.path for item in own if _is_user(item)}

    def rank(item: pytest.Item) -> tuple[str, bool]:
        return (str(item.path), _is_user(item)) if item.path in users else ("", False)

    for place, item in zip(places, sorted(own, key=rank), strict=True):
        items[place] = item


def _is_user(item: pytest.Item) -> bool:
    return isinstance(item, pytest.Function) and not SHARED.isdisjoint(item.fixturenames)


@pytest.fixture(scope="session")
def model_folder() -> Path:
    return ensure_default_model(load_settings().settings.cache_dir / "models", print)


@pytest.fixture(scope="session")
def encode(model_folder: Path) -> Callable[[str], list[int]]:
    """Tokenize without special tokens."""
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)


def split_cluster(model_folder: Path) -> AbstractAsyncContextManager[Cluster]:
    """Run one prefill and one decode worker, in fp32, which keep to their roles."""
    options = ClusterOptions(model_folder, settings={**SETTINGS, "roles": "manual"})
    return running_cluster(options)


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def split(model_folder: Path) -> AsyncIterator[Cluster]:
    """One prefill and one decode worker: all is handed over."""
    async with split_cluster(model_folder) as cluster:
        yield cluster


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def combined(model_folder: Path) -> AsyncIterator[Cluster]:
    """One worker that does both, in fp32."""
    options = ClusterOptions(model_folder, is_combined=True, threads=2, settings=SETTINGS)
    async with running_cluster(options) as cluster:
        yield cluster
