"""The RDMA adapters of this host, as its kernel lists them."""

import re
from contextlib import suppress
from pathlib import Path

ADAPTERS = Path("/sys/class/infiniband")
_RATE = re.compile(r"([0-9.]+) Gb/sec")


def fastest_port_rate(adapters: Path = ADAPTERS) -> float:
    """Return what the fastest active port could give, in GB/s; 0 where there is none."""
    return max((_rate_of(port) for port in adapters.glob("*/ports/*")), default=0.0)


def _rate_of(port: Path) -> float:
    """Return a port's rate in GB/s, 0 where it is down or says nothing."""
    with suppress(OSError):
        found = _RATE.match((port / "rate").read_text())
        if found and "ACTIVE" in (port / "state").read_text():
            return float(found[1]) / 8
    return 0.0
