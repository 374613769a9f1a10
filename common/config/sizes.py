"""Sizes in bytes as people write them: ``64MiB``, ``1 GB``, ``4096``."""

import re

_UNITS = {
    "": 1,
    "b": 1,
    "k": 10**3,
    "kb": 10**3,
    "m": 10**6,
    "mb": 10**6,
    "g": 10**9,
    "gb": 10**9,
    "t": 10**12,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)")


def parse_size(value: object) -> int:
    """Return bytes of ``64MiB``, ``64MB`` (decimal), ``1.5GiB``, or a plain number of bytes.

    ValueError says what is accepted.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError("is not a size; write bytes, or a number with KB, MB, GB, KiB, MiB, GiB")
    return int(float(match[1]) * _UNITS[match[2].lower()]) if match[2] else int(float(match[1]))


def format_size(num_bytes: int) -> str:
    """Return the shortest exact spelling in binary units: 1073741824 is ``1GiB``."""
    for unit in ("GiB", "MiB", "KiB"):
        scale = _UNITS[unit.lower()]
        if num_bytes >= scale and num_bytes % scale == 0:
            return f"{num_bytes // scale}{unit}"
    return str(num_bytes)
