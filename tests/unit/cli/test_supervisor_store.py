"""Which store `flowpath serve` gives its workers."""

from pathlib import Path

import pytest

from common.config import processor
from common.config.settings import Settings
from common.errors import ConfigError
from common.storage.file_store import FileStore
from common.storage.open_store import open_store
from services.cli.supervisor.store import choose_store
from tests.support.stored_blocks import IDENTITY


def test_workers_on_cpus_get_a_private_bounded_folder(tmp_path: Path) -> None:
    cache = tmp_path / "a cache?"
    settings = choose_store(Settings(device="cpu", tensor_parallel=2, cache_dir=cache))
    assert settings.has_store
    assert (cache / "store").stat().st_mode & 0o777 == 0o700
    store = open_store(settings.store, IDENTITY)
    assert isinstance(store, FileStore)
    assert store.stats().capacity_bytes == 10 * 2**30
    store.close()
    assert (cache / "store" / "ledger").exists()


def test_a_folder_that_others_could_read_is_made_private(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir(mode=0o755)
    choose_store(Settings(device="cpu", cache_dir=tmp_path))
    assert (tmp_path / "store").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("store", ["none", "file:/elsewhere", "redis://host:1/0"])
def test_what_somebody_has_said_is_left_alone(tmp_path: Path, store: str) -> None:
    settings = Settings(device="cpu", cache_dir=tmp_path, store=store)
    assert choose_store(settings) == settings
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("device", ["auto", "cuda", "cuda:1"])
def test_workers_on_gpus_get_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.setattr(processor, "may_have_gpu", lambda: True)
    chosen = choose_store(Settings(device=device, cache_dir=tmp_path))
    assert (chosen.store, chosen.has_store) == ("none", False)


def test_without_a_gpu_auto_is_on_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "may_have_gpu", lambda: False)
    assert choose_store(Settings(cache_dir=tmp_path)).has_store


def test_where_no_folder_can_be_made_there_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    settings = Settings(device="cpu", cache_dir=tmp_path / "file")
    assert choose_store(settings).store == "none"


@pytest.mark.parametrize(
    ("name", "value"),
    [("host_tier_bytes", 2**30), ("store_codec", "fp8"), ("store_preload", "prompts.jsonl")],
)
def test_what_needs_a_store_is_refused_where_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: object
) -> None:
    monkeypatch.setattr(processor, "may_have_gpu", lambda: True)
    for store in ("auto", "none"):
        settings = Settings.model_validate({name: value, "store": store, "cache_dir": tmp_path})
        with pytest.raises(ConfigError, match=rf"setting {name}: there is no store"):
            choose_store(settings)
    monkeypatch.setattr(processor, "may_have_gpu", lambda: False)
    settings = Settings.model_validate({name: value, "cache_dir": tmp_path})
    assert choose_store(settings).has_store


def test_a_program_that_is_started_alone_has_no_store_by_itself() -> None:
    assert not Settings().has_store
