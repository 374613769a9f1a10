"""The file of API keys: one a line, for its owner's eyes alone."""

import stat
from pathlib import Path

from common.errors import ConfigError

MAX_FILE_BYTES = 1024 * 1024
MIN_KEY_CHARS = 8


def load_api_keys(path: Path) -> frozenset[str]:
    """Return the keys; empty lines and lines that begin with ``#`` are none.

    ConfigError, which names the file and the line but never a key, when it cannot be read, others
    may read it, it holds no key, or one is too short or could not stand in a header.
    """
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(path.stat().st_mode)
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"api_key_file {path} cannot be read: {error.strerror}") from error
    if mode & 0o077:
        raise ConfigError(
            f"api_key_file {path} has mode {mode:04o}: others may read or change it; "
            f"run `chmod 600 {path}`"
        )
    if len(raw) > MAX_FILE_BYTES:
        raise ConfigError(f"api_key_file {path} is larger than {MAX_FILE_BYTES} bytes")
    keys = set()
    for number, line in enumerate(raw.splitlines(), start=1):
        key = line.strip()
        if not key or key.startswith(b"#"):
            continue
        if len(key) < MIN_KEY_CHARS or not all(0x21 <= byte <= 0x7E for byte in key):
            raise ConfigError(
                f"api_key_file {path}, line {number}: a key is at least {MIN_KEY_CHARS} printable "
                "ASCII characters without a space"
            )
        keys.add(key.decode("ascii"))
    if not keys:
        raise ConfigError(f"api_key_file {path} holds no key")
    return frozenset(keys)
