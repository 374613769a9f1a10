import pytest
import structlog

from tests.support.steady import load_steady_profile, one_torch_thread

__all__ = ["one_torch_thread"]

load_steady_profile()


@pytest.fixture(autouse=True)
def _plain_logs() -> None:
    """Forget where a program that an earlier test ran has sent its lines, and from which level."""
    structlog.reset_defaults()
