from pathlib import Path

import pytest

from common.config.api_key_file import load_api_keys
from common.errors import ConfigError

SECRET = "sk-0123456789"


def key_file(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "keys"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_keys_stand_one_a_line_between_comments(tmp_path):
    path = key_file(tmp_path, f"# ours\n{SECRET}\n\n  sk-abcdefghij \r\n")
    assert load_api_keys(path) == {SECRET, "sk-abcdefghij"}


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o660, 0o602])
def test_a_file_that_others_may_touch_is_refused(tmp_path, mode):
    path = key_file(tmp_path, SECRET, mode)
    with pytest.raises(ConfigError, match=f"{path} has mode {mode:04o}.*chmod 600"):
        load_api_keys(path)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "holds no key"),
        ("# none\n", "holds no key"),
        (f"{SECRET}\nshort\n", "line 2"),
        ("two words here\n", "line 1"),
        ("schlüssel-schlüssel\n", "line 1"),
    ],
)
def test_a_file_without_usable_keys_is_refused_without_telling_them(tmp_path, text, told):
    with pytest.raises(ConfigError, match=told) as refused:
        load_api_keys(key_file(tmp_path, text))
    assert SECRET not in str(refused.value)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load_api_keys(tmp_path / "none")
