"""Choosing the running type."""

from pathlib import Path

import pytest

from common.engine.dtype import resolve_dtype
from common.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16 sse\n", "bfloat16"),
        ("flags\t\t: fpu amx_bf16\n", "bfloat16"),
        ("Features\t: fp asimd bf16\n", "bfloat16"),
        ("flags\t\t: fpu avx512f avx2\n", "float32"),
        ("model name\t: avx512_bf16\n", "float32"),
        ("", "float32"),
    ],
)
def test_auto_is_bfloat16_only_where_the_processor_multiplies_it(
    tmp_path: Path, text: str, expected: str
) -> None:
    cpu_info = tmp_path / "cpuinfo"
    cpu_info.write_text(text)
    assert resolve_dtype("auto", cpu_info) == expected


def test_auto_is_float32_where_the_processor_says_nothing(tmp_path: Path) -> None:
    assert resolve_dtype("auto", tmp_path / "absent") == "float32"


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_a_named_type_is_taken(name: str) -> None:
    assert resolve_dtype(name) == name


@pytest.mark.parametrize("name", ["float16", "int8", ""])
def test_an_unknown_type_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is not supported on a CPU: auto, float32, bfloat16 are"):
        resolve_dtype(name)
