"""Which prompts a worker loads at its start, and which files are refused."""

from pathlib import Path

import pytest

from common.config import preload_file
from common.config.preload_file import read_prompts
from common.config.settings import Settings
from common.errors import ConfigError
from common.worker.preload import prompts_to_preload


def test_a_line_is_what_tokenize_answers(tmp_path: Path) -> None:
    path = tmp_path / "templates.jsonl"
    path.write_text('{"count": 3, "tokens": [1, 2, 3]}\n\n{"tokens": [7]}\n{"tokens": []}\n')
    assert read_prompts(path) == ((1, 2, 3), (7,), ())
    settings = Settings(store="file:/tmp/s", store_preload=str(path))
    assert prompts_to_preload(settings) == read_prompts(path)


@pytest.mark.parametrize(
    "line",
    ["[1, 2", "[1, 2]", "{}", '{"tokens": "1"}', '{"tokens": [1, -1]}', '{"tokens": [true]}'],
)
def test_a_line_that_is_no_prompt_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "templates.jsonl"
    path.write_text('{"tokens": [1]}\n' + line)
    with pytest.raises(ConfigError, match=r"templates\.jsonl, line 2: "):
        read_prompts(path)


def test_a_file_that_cannot_be_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_prompts(tmp_path / "none")
    path = tmp_path / "templates.jsonl"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="codec"):
        read_prompts(path)
    monkeypatch.setattr(preload_file, "MAX_FILE_BYTES", 1)
    with pytest.raises(ConfigError, match="more than 1 bytes"):
        read_prompts(path)


def test_without_a_store_there_is_nothing_to_load_from(tmp_path: Path) -> None:
    assert prompts_to_preload(Settings()) == ()
    with pytest.raises(ConfigError, match="there is no store"):
        Settings(store_preload=str(tmp_path)).refuse_without_store()
