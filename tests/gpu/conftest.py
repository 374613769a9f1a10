"""What the tests on GPUs share: the real model and its tokenizer."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from common.config.load import load_settings
from common.models.default_model import ensure_default_model


@pytest.fixture(scope="session")
def model_folder() -> Path:
    return ensure_default_model(load_settings().settings.cache_dir / "models", print)


@pytest.fixture(scope="session")
def encode(model_folder: Path) -> Callable[[str], list[int]]:
    """Tokenize without special tokens."""
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)
