"""One step's rows in the order in which a GPU computes them, as arrays on the host.

Tokens lie in three groups, each a contiguous slice of the step: decodes (rows of one token), fresh
prompts (rows that start at position 0) and later chunks. Within a group, rows keep their order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from common.engine.interface import StepRow

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]

OptionalArrays = list[NDArray[np.generic] | None]

ArrayT = TypeVar("ArrayT")

NUM_STEP_ARRAYS = 7
NUM_PAGED_ARRAYS = 5

SKIPPED_SLOT = -1
"""A token whose K and V are not stored."""


@dataclass(frozen=True, slots=True)
class PagedRows(Generic[ArrayT]):
    """Rows that attend to blocks of the pool; all arrays are int32.

    Row i has the tokens ``qo_indptr[i] .. qo_indptr[i + 1] - 1`` of its group and the blocks
    ``indices[indptr[i] : indptr[i + 1]]``, of which the last holds ``last_page_len[i]`` tokens. Its
    tokens are the last of its ``kv_lens[i]`` positions.
    """

    qo_indptr: ArrayT
    indptr: ArrayT
    indices: ArrayT
    last_page_len: ArrayT
    kv_lens: ArrayT

    def arrays(self) -> tuple[ArrayT, ...]:
        """Return the arrays in the order of the constructor."""
        return (self.qo_indptr, self.indptr, self.indices, self.last_page_len, self.kv_lens)


HostRows = PagedRows[Ints]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The host side of a step.

    ``slots`` are ``block * block_size + offset``. ``sampled_tokens`` are the places of the tokens
    whose logits are wanted and ``sampled_rows`` the step's rows that they end. ``tail`` has these
    tokens as rows of their own; it is None when the whole step is decodes that are all sampled.
    ``pending_tokens`` are the places of tokens still in flight and ``pending_rows`` the rows of the
    earlier step that they are drawn for.
    """

    token_ids: Longs
    positions: Ints
    slots: Ints
    decodes: HostRows | None
    fresh: HostRows | None
    chunks: HostRows | None
    tail: HostRows | None
    sampled_tokens: Longs
    sampled_rows: Longs
    pending_tokens: Longs
    pending_rows: Longs

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole step."""
        return len(self.positions)

    @property
    def is_pure_decode(self) -> bool:
        """Whether every row is one token whose logits are wanted."""
        return self.tail is None

    def arrays(self) -> OptionalArrays:
        """Return what ``of_arrays`` makes the same batch of; None for groups that there are not."""
        found: OptionalArrays = [
            *(self.token_ids, self.positions, self.slots, self.sampled_tokens, self.sampled_rows),
            *(self.pending_tokens, self.pending_rows),
        ]
        for rows in (self.decodes, self.fresh, self.chunks, self.tail):
            found += [None] * NUM_PAGED_ARRAYS if rows is None else rows.arrays()
        return found

    @classmethod
    def of_arrays(cls, arrays: OptionalArrays) -> "StepBatch":
        """Undo ``arrays``; they are not copied."""
        first = NUM_STEP_ARRAYS
        decodes, fresh, chunks, tail = (
            _paged_rows(arrays[at : at + NUM_PAGED_ARRAYS])
            for at in range(first, first + 4 * NUM_PAGED_ARRAYS, NUM_PAGED_ARRAYS)
        )
        return cls(
            token_ids=_longs(arrays[0]),
            positions=_ints(arrays[1]),
            slots=_ints(arrays[2]),
            decodes=decodes,
            fresh=fresh,
            chunks=chunks,
            tail=tail,
            sampled_tokens=_longs(arrays[3]),
            sampled_rows=_longs(arrays[4]),
            pending_tokens=_longs(arrays[5]),
            pending_rows=_longs(arrays[6]),
        )


class StepPacker:
    """Turns rows into batches, for blocks of ``block_size`` tokens.

    Block tables that are tuples are remembered from one step to the next, because a sequence keeps
    its tuple until it grows.
    """

    def __init__(self, block_size: int, vocab_size: int) -> None:
        self._block_size = block_size
        self._vocab_size = vocab_size
        # By id; the tuple itself is kept beside, so that its id cannot be given out again.
        self._tables: dict[int, tuple[Sequence[int], Ints]] = {}

    def pack(self, rows: Sequence[StepRow]) -> StepBatch:
        """Return the batch of at least one row.

        ValueError names the row that is empty, has a token id outside of the vocabulary, or a block
        table that does not reach its last token.
        """
        counts = np.fromiter((len(row.token_ids) for row in rows), np.int64, len(rows))
        starts = np.fromiter((row.start for row in rows), np.int64, len(rows))
        kinds = np.where(counts == 1, 0, np.where(starts == 0, 1, 2))
        order = np.argsort(kinds, kind="stable")
        tables = self._block_tables(rows, counts, starts)
        counts, starts = counts[order], starts[order]
        ends = np.cumsum(counts)
        firsts = ends - counts
        positions = _ranges(starts, counts)
        token_ids = self._token_ids(rows, order)
        kv_lens = starts + counts
        pages = -(-kv_lens // self._block_size)
        page_firsts = np.cumsum(pages) - pages
        indices = np.concatenate([tables[row][:n] for row, n in zip(order, pages, strict=True)])
        blocks = indices[np.repeat(page_firsts, counts) + positions // self._block_size]
        slots = blocks.astype(np.int64) * self._block_size + positions % self._block_size

        is_sampled = np.fromiter((bool(rows[row].samples) for row in order), np.bool_, len(rows))
        bounds = np.searchsorted(kinds[order], [0, 1, 2, 3])
        whole = _Whole(counts, kv_lens, page_firsts, pages, indices, self._block_size)
        is_pure = bool(is_sampled.all()) and int(bounds[1]) == len(rows)
        sampled = np.flatnonzero(is_sampled)
        pending = [
            (int(ends[at]) - 1, row.pending.row)
            for at, index in enumerate(order)
            if (row := rows[index]).pending is not None
        ]
        return StepBatch(
            token_ids=token_ids,
            positions=positions.astype(np.int32),
            slots=slots.astype(np.int32),
            decodes=whole.slice(bounds[0], bounds[1]),
            fresh=whole.slice(bounds[1], bounds[2]),
            chunks=whole.slice(bounds[2], bounds[3]),
            tail=None if is_pure else whole.ends_of(sampled),
            sampled_tokens=(firsts + counts - 1)[sampled],
            sampled_rows=order[sampled],
            pending_tokens=np.array([token for token, _ in pending], np.int64),
            pending_rows=np.array([row for _, row in pending], np.int64),
        )

    def _block_tables(self, rows: Sequence[StepRow], counts: Longs, starts: Longs) -> list[Ints]:
        known, used = self._tables, {}
        tables = []
        for row in rows:
            table = row.block_table
            entry = known.get(id(table))
            if entry is None:
                entry = (table, np.asarray(table, dtype=np.int32))
            if isinstance(table, tuple):
                used[id(table)] = entry
            tables.append(entry[1])
        lengths = np.fromiter((len(table) for table in tables), np.int64, len(rows))
        is_bad = (counts == 0) | (starts < 0) | (starts + counts > lengths * self._block_size)
        if is_bad.any():
            index = int(np.flatnonzero(is_bad)[0])
            if not counts[index]:
                raise ValueError(f"row {index} has no tokens")
            raise ValueError(
                f"row {index}: {lengths[index]} blocks do not hold positions "
                f"{starts[index]} to {starts[index] + counts[index] - 1}"
            )
        self._tables = used
        return tables

    def _token_ids(self, rows: Sequence[StepRow], order: Longs) -> Longs:
        parts: list[int] = []
        for index in order:
            row = rows[index]
            if row.pending is None:
                parts.extend(row.token_ids)
            else:
                parts.extend(row.token_ids[:-1])
                parts.append(0)
        token_ids = np.array(parts, np.int64)
        if token_ids.min() < 0 or token_ids.max() >= self._vocab_size:
            bad = next(
                index
                for index, row in enumerate(rows)
                if any(not 0 <= token_id < self._vocab_size for token_id in row.token_ids)
            )
            raise ValueError(
                f"row {bad} has a token id outside of the vocabulary of {self._vocab_size}"
            )
        return token_ids


@dataclass(frozen=True, slots=True)
class _Whole:
    """All rows of a step, to take groups of."""

    counts: Longs
    kv_lens: Longs
    page_firsts: Longs
    pages: Longs
    indices: Ints
    block_size: int

    def slice(self, first: int, last: int) -> HostRows | None:
        if first == last:
            return None
        counts, pages = self.counts[first:last], self.pages[first:last]
        begin = self.page_firsts[first]
        indices = self.indices[begin : begin + pages.sum()]
        return self._rows(counts, self.kv_lens[first:last], pages, indices)

    def ends_of(self, rows: Longs) -> HostRows:
        """Return the last token of each of ``rows`` as a row of its own."""
        pages = self.pages[rows]
        at = _ranges(self.page_firsts[rows], pages)
        ones = np.ones(len(rows), np.int64)
        return self._rows(ones, self.kv_lens[rows], pages, self.indices[at])

    def _rows(self, counts: Longs, kv_lens: Longs, pages: Longs, indices: Ints) -> HostRows:
        return PagedRows(
            qo_indptr=_bounds(counts),
            indptr=_bounds(pages),
            indices=indices,
            last_page_len=((kv_lens - 1) % self.block_size + 1).astype(np.int32),
            kv_lens=kv_lens.astype(np.int32),
        )


def _paged_rows(arrays: OptionalArrays) -> HostRows | None:
    return None if arrays[0] is None else PagedRows(*map(_ints, arrays))


def _longs(array: NDArray[np.generic] | None) -> Longs:
    if array is None:
        raise ValueError("an array of the step is missing")
    return array.astype(np.int64, copy=False)


def _ints(array: NDArray[np.generic] | None) -> Ints:
    if array is None:
        raise ValueError("an array of the step is missing")
    return array.astype(np.int32, copy=False)


def _bounds(counts: Longs) -> Ints:
    bounds = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=bounds[1:])
    return bounds


def _ranges(starts: Longs, counts: Longs) -> Longs:
    """Return ``starts[i] .. starts[i] + counts[i] - 1`` for every i, end to end."""
    total = int(counts.sum())
    shifts = np.repeat(starts - (np.cumsum(counts) - counts), counts)
    ranges: Longs = np.arange(total, dtype=np.int64) + shifts
    return ranges
