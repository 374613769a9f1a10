"""The sockets on which processes wait for strangers, read from ``/proc``."""

import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

LISTENING = "0A"
UNCONNECTED = "07"
STATES = {"tcp": LISTENING, "tcp6": LISTENING, "udp": UNCONNECTED, "udp6": UNCONNECTED}


@dataclass(frozen=True, slots=True, order=True)
class Listener:
    """One listening socket; ``protocol`` is the name of its table in ``/proc/net``."""

    pid: int
    protocol: str
    address: str
    port: int


def listeners_of(pids: Iterable[int]) -> list[Listener]:
    """Return every TCP and UDP socket of these processes that anybody can send to."""
    return sorted(listener for pid in pids for listener in _of_one(pid))


def _of_one(pid: int) -> Iterator[Listener]:
    inodes = {
        target.removeprefix("socket:[").removesuffix("]")
        for link in Path(f"/proc/{pid}/fd").iterdir()
        if (target := _target(link)).startswith("socket:[")
    }
    for protocol, wanted in STATES.items():
        table = Path(f"/proc/{pid}/net/{protocol}")
        lines = table.read_text().splitlines()[1:] if table.exists() else []
        for line in lines:
            _, local, _, state, _, _, _, _, _, inode, *_ = line.split()
            if state == wanted and inode in inodes:
                address, port = local.split(":")
                yield Listener(pid, protocol, _readable(address), int(port, 16))


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:  # closed meanwhile
        return ""


def _readable(address: str) -> str:
    """Write an address, which the table has as words in the machine's order, as people do."""
    words = [bytes.fromhex(address[start : start + 8])[::-1] for start in range(0, len(address), 8)]
    family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
    return socket.inet_ntop(family, b"".join(words))
