"""Lines of progress for whoever started a program."""

import pytest
from structlog.testing import capture_logs

from common.telemetry import progress
from common.telemetry.progress import Progress


def test_lines_are_told_at_most_once_a_second_and_all_are_logged(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([10.0, 10.2, 10.99, 11.0])
    monkeypatch.setattr(progress, "monotonic", lambda: next(times))
    tell = Progress()
    with capture_logs() as logs:
        for number in range(4):
            tell(f"step {number}")
    assert capsys.readouterr().err == "progress: step 0\nprogress: step 3\n"
    assert [entry["detail"] for entry in logs] == ["step 0", "step 1", "step 2", "step 3"]
