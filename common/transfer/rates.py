"""Measuring what a mapping is worth: its rate beside that of plain memory."""

import time

import numpy as np

from common.transfer.backend import LinkRate

MEASURED_BYTES = 16 * 1024 * 1024
NUM_REPEATS = 7


def measure_mapping(mapped: memoryview) -> LinkRate:
    """Compare reading the start of a peer's mapping with reading plain memory, by turns.

    The best turn of each counts, so that a busy machine does not make a good link look bad.
    A read finds missing pages, a far memory node and uncached memory as a write would, and unlike
    a write it is safe whoever owns the blocks at this moment.
    """
    source = np.frombuffer(mapped, dtype=np.uint8)[:MEASURED_BYTES]
    plain = np.zeros(source.size, dtype=np.uint8)
    plain.fill(1)
    target = np.empty_like(plain)
    target.fill(1)
    link_seconds: list[float] = []
    plain_seconds: list[float] = []
    for _ in range(NUM_REPEATS):
        link_seconds.append(_copy_seconds(target, source))
        plain_seconds.append(_copy_seconds(target, plain))
    return LinkRate(
        num_bytes=source.size,
        gigabytes_per_second=source.size / min(link_seconds) / 1e9,
        limit_gigabytes_per_second=source.size / min(plain_seconds) / 1e9,
    )


def _copy_seconds(target: np.ndarray, source: np.ndarray) -> float:
    start = time.perf_counter()
    np.copyto(target, source)
    return time.perf_counter() - start
