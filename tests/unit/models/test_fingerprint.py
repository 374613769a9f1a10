"""Fingerprints tell models apart; damaged files are named."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from common.errors import ModelError
from common.models.checkpoint import INDEX_NAME, SINGLE_NAME, checkpoint_files, read_header
from common.models.fingerprint import model_fingerprint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text('{"a": 1}')
    save_file({"weight": np.zeros((300, 100), np.float32)}, tmp_path / SINGLE_NAME)
    return tmp_path


def _other_weights(folder: Path) -> None:
    save_file({"weight": np.ones((300, 100), np.float32)}, folder / SINGLE_NAME)


def _other_shape(folder: Path) -> None:
    save_file({"weight": np.zeros((100, 300), np.float32)}, folder / SINGLE_NAME)


def _other_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"a": 2}')


def _other_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"b": 1}')


def _no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


@pytest.mark.parametrize(
    "change", [_other_weights, _other_shape, _other_tokenizer, _other_config, _no_tokenizer]
)
def test_a_changed_folder_has_another_fingerprint(
    folder: Path, change: Callable[[Path], None]
) -> None:
    before = model_fingerprint(folder)
    assert before == model_fingerprint(folder)
    assert len(bytes.fromhex(before)) == 8
    change(folder)
    assert model_fingerprint(folder) != before


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "header is cut"),
        (b"\x05\0\0\0\0\0\0\0{}", "header is cut"),
        (b"\xff" * 16, "header is cut"),
        (b"\x02\0\0\0\0\0\0\0{]", "not a safetensors file"),
        (b"\x02\0\0\0\0\0\0\0[]", "header is no object"),
        (b"\x08\0\0\0\0\0\0\0" + b'{"a":{}}', "no data_offsets"),
        (b"\x02\0\0\0\0\0\0\0{}trailing", "another length"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / SINGLE_NAME
    path.write_bytes(content)
    with pytest.raises(ModelError, match=message) as caught:
        read_header(path)
    assert str(path) in str(caught.value)


def test_a_cut_weight_file_is_refused(folder: Path) -> None:
    path = folder / SINGLE_NAME
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ModelError, match="another length"):
        model_fingerprint(folder)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor"):
        checkpoint_files(tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "gone.safetensors"}, "gone.safetensors: the shard is missing"),
        ({"a": "../up.safetensors"}, "not a plain file name"),
        ({}, "weight_map is empty"),
        ({"a": 1}, "weight_map must map names to strings"),
        (None, "weight_map is missing"),
    ],
)
def test_an_index_that_leads_nowhere_is_refused(
    folder: Path, weight_map: object, message: str
) -> None:
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelError, match=message):
        checkpoint_files(folder)
