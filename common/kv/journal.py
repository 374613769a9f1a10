"""The allocation log of ``FLOWKV_DEBUG_ALLOC=1``, one JSON line per operation (FlowKV 1.3).

The log tells the whole state: ``replay`` rebuilds who holds what from the lines alone, and names
the owners that never let go.
"""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Self

from pydantic import TypeAdapter, ValidationError

from common.errors import FlowPathError
from common.kv.runs import Run, to_blocks


class AllocOpKind(StrEnum):
    """What happened to the pool."""

    OPEN = "open"
    ACQUIRE = "acquire"
    GROW = "grow"
    FORK = "fork"
    RELEASE = "release"
    EVICT = "evict"
    RELOCATE = "relocate"
    TRUNCATED = "truncated"
    """The log reached its bound here; what follows is not in it."""


@dataclass(frozen=True, slots=True)
class AllocOp:
    """One operation. ``n`` blocks moved between the allocator and an owner, in ``pieces`` runs.

    ``runs`` were taken by acquire, grow and fork, and given back by release, evict and relocate;
    ``shared`` are the runs that acquire and fork hold together with others or with the cache, and
    those that relocate took for the cache in place of as many ``runs``. ``open`` has
    the pool's size in ``n``. The last four fields describe the free memory after the operation.
    """

    op: AllocOpKind
    owner: str
    n: int
    pieces: int
    runs: tuple[Run, ...]
    shared: tuple[Run, ...]
    free: int
    free_segments: int
    largest_free: int
    frag: float

    def to_json(self) -> str:
        """Return the operation as one line without its end."""
        return json.dumps(asdict(self), separators=(",", ":"))


_OP = TypeAdapter(AllocOp)


class JournalError(FlowPathError):
    """A line of the log is damaged, or contradicts the lines before it."""


class JournalWriter:
    """Appends operations to a file of at most ``max_bytes``; plug its ``write`` in as ``journal``.

    At the bound it writes one ``truncated`` line and drops what follows. Each line is handed to
    the system at once, so that the log survives the death of its process.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._file = path.open("w", encoding="utf-8", buffering=1)
        self._bytes_left = max_bytes
        self.num_dropped = 0

    def write(self, op: AllocOp) -> None:
        """Append one operation, or count it as dropped."""
        if self.num_dropped:
            self.num_dropped += 1
            return
        line = op.to_json() + "\n"
        if len(line) > self._bytes_left:
            self.num_dropped = 1
            line = AllocOp(AllocOpKind.TRUNCATED, "", 0, 0, (), (), 0, 0, 0, 0.0).to_json() + "\n"
        self._bytes_left -= len(line)
        self._file.write(line)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()

    def __enter__(self) -> Self:
        """Return the writer."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the file."""
        self.close()


@dataclass(frozen=True, slots=True)
class Leak:
    """An owner that still holds blocks where the log ends."""

    owner: str
    num_blocks: int
    num_unshared_blocks: int
    """Blocks that no other owner holds: what its release would give back or leave cached."""
    line: int
    """Line of the log, from 1, where the owner came to be."""


@dataclass(slots=True)
class ReplayedState:
    """Who holds what after the last line."""

    num_blocks: int = 0
    free: set[int] = field(default_factory=set)
    owners: dict[str, list[int]] = field(default_factory=dict)
    born_at: dict[str, int] = field(default_factory=dict)
    is_truncated: bool = False
    _num_holders: Counter[int] = field(default_factory=Counter)

    @property
    def cached(self) -> set[int]:
        """Blocks that are neither free nor held: what the prefix cache keeps."""
        held = {block for blocks in self.owners.values() for block in blocks}
        return set(range(self.num_blocks)) - self.free - held

    def leaks(self) -> list[Leak]:
        """Name the owners that still hold blocks, oldest first."""
        return [
            Leak(
                owner,
                len(blocks),
                sum(self._num_holders[block] == 1 for block in blocks),
                self.born_at[owner],
            )
            for owner, blocks in self.owners.items()
        ]

    def apply(self, op: AllocOp, line: int) -> None:
        """Carry out one operation; JournalError where it contradicts the state."""
        match op.op:
            case AllocOpKind.OPEN:
                self.num_blocks = op.n
                self.free = set(range(op.n))
                self.owners.clear()
                self.born_at.clear()
                self._num_holders.clear()
            case AllocOpKind.ACQUIRE | AllocOpKind.FORK:
                if op.owner in self.owners:
                    raise JournalError(f"line {line}: {op.owner} holds blocks already")
                self.owners[op.owner] = []
                self.born_at[op.owner] = line
                self._hold(op.owner, to_blocks(op.shared))
                self._take(op, line)
            case AllocOpKind.GROW:
                self._take(op, line)
            case AllocOpKind.RELEASE:
                if op.owner not in self.owners:
                    raise JournalError(f"line {line}: {op.owner} holds nothing to release")
                self._num_holders.subtract(self.owners.pop(op.owner))
                self._give_back(op, line)
            case AllocOpKind.EVICT:
                self._give_back(op, line)
            case AllocOpKind.RELOCATE:
                places = to_blocks(op.shared)
                if not self.free.issuperset(places):
                    raise JournalError(f"line {line}: blocks move to where it is not free")
                self._give_back(op, line)
                self.free.difference_update(places)
            case AllocOpKind.TRUNCATED:
                self.is_truncated = True

    def _hold(self, owner: str, blocks: list[int]) -> None:
        self.owners[owner].extend(blocks)
        self._num_holders.update(blocks)

    def _take(self, op: AllocOp, line: int) -> None:
        blocks = to_blocks(op.runs)
        if not self.free.issuperset(blocks):
            raise JournalError(f"line {line}: {op.owner} takes blocks that are not free")
        if op.owner not in self.owners:
            raise JournalError(f"line {line}: {op.owner} is unknown")
        self.free.difference_update(blocks)
        self._hold(op.owner, blocks)

    def _give_back(self, op: AllocOp, line: int) -> None:
        for block in to_blocks(op.runs):
            if block in self.free or self._num_holders[block]:
                raise JournalError(f"line {line}: block {block} is freed twice or while held")
            self.free.add(block)


def replay(lines: Iterable[str]) -> ReplayedState:
    """Rebuild the state from a log's lines; JournalError names the line that cannot be right."""
    state = ReplayedState()
    for number, line in enumerate(lines, start=1):
        try:
            op = _OP.validate_json(line)
        except ValidationError as error:
            raise JournalError(f"line {number}: not an operation: {error}") from error
        state.apply(op, number)
    return state
