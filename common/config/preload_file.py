"""The file of prompts that workers load from the store when they start."""

import json
from pathlib import Path

from common.errors import ConfigError

MAX_FILE_BYTES = 64 * 2**20
MAX_TOKEN_ID = 2**31 - 1

Prompts = tuple[tuple[int, ...], ...]


def read_prompts(path: Path) -> Prompts:
    """Return the prompts of a file; ConfigError names the line that is none.

    A line is an object with ``tokens``, as ``/tokenize`` answers; empty lines do not count.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"store_preload {path}: it has more than {MAX_FILE_BYTES} bytes")
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"store_preload {path}: {error}") from error
    return tuple(
        _parse(line, f"store_preload {path}, line {number}")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    )


def _parse(line: str, where: str) -> tuple[int, ...]:
    try:
        told = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: {error}") from error
    tokens = told.get("tokens") if isinstance(told, dict) else None
    if not isinstance(tokens, list) or not all(_is_token(token) for token in tokens):
        raise ConfigError(f'{where}: say {{"tokens": [ids]}}, as /tokenize does')
    return tuple(tokens)


def _is_token(value: object) -> bool:
    return type(value) is int and 0 <= value < MAX_TOKEN_ID
