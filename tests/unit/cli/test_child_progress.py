"""What a child says on its output."""

from pathlib import Path

import pytest

from services.cli.supervisor.child import Child
from services.cli.supervisor.plan import ProcessSpec, Stage

PROGRAM = """
import sys
sys.stderr.write("progress: loading\\n")
sys.stderr.write("notice: registered with the controller\\n")
sys.stderr.write("a fault\\n")
sys.exit(3)
"""


async def test_progress_is_told_and_neither_it_nor_a_notice_is_a_last_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "talkative.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    told: list[str] = []
    spec = ProcessSpec("decode-0", "talkative", Stage.WORKER, "decode")
    child = Child(spec, tmp_path / "settings.json", told.append)
    assert await child.run() == 3
    assert told == ["loading"]
    assert list(child.output) == ["a fault"]
