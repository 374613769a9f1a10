"""What keeps unit tests and properties from depending on how busy the machine is."""

import sys

import pytest
from hypothesis import settings


def load_steady_profile() -> None:
    """Let no property fail by its clock, and each find the same every time."""
    settings.register_profile("steady", deadline=None, derandomize=True)
    settings.load_profile("steady")


@pytest.fixture(autouse=True)
def one_torch_thread() -> None:
    """Compute small tensors alone: on a busy machine threads wait for each other far longer."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)
