import sys

import pytest
import structlog
from hypothesis import settings

# A busy machine must not fail a property by its clock, and a property finds the same every time.
settings.register_profile("steady", deadline=None, derandomize=True)
settings.load_profile("steady")


@pytest.fixture(autouse=True)
def _one_torch_thread() -> None:
    """Compute small tensors alone: on a busy machine threads wait for each other far longer."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _plain_logs() -> None:
    """Forget where a program that an earlier test ran has sent its lines, and from which level."""
    structlog.reset_defaults()
