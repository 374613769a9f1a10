from pathlib import Path

import pytest

from common.errors import ConfigError
from services.cli.result_file import result_file


def test_a_file_keeps_its_text_until_there_are_results(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text("an earlier run, longer")
    with result_file(file) as keep:
        assert file.read_text() == "an earlier run, longer"
        keep("new")
    assert file.read_text() == "new"


def test_a_run_without_results_leaves_no_file(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    with pytest.raises(ConfigError, match="no server"), result_file(file):
        raise ConfigError("no server")
    assert not file.exists()


def test_without_a_path_nothing_is_kept(tmp_path: Path) -> None:
    with result_file(None) as keep:
        keep("text")
    assert not list(tmp_path.iterdir())
