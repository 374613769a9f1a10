from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.fake_backend import write_tiny_model

# A busy machine must not fail a property by its clock.
settings.register_profile("gateway", deadline=None, derandomize=True)
settings.load_profile("gateway")


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny-model"))
