"""One step's rows, flattened into one ragged batch."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from common.engine.interface import StepRow

MAX_SINGLE_TOKENS = 4
"""Rows of at most this many tokens are computed token by token, longer ones as a chunk."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Flat tokens of a step: single tokens first, then chunks.

    ``slots`` are ``block * block_size + offset``. ``chunks`` is (n, 3): first and last flat token
    (exclusive) and start position of each chunk. ``tables`` has a row of block numbers for each
    single token, then for each chunk, padded with 0. ``sampled_tokens`` are the flat indices of
    the tokens whose logits are wanted, and ``sampled_rows`` the step's rows that they belong to.
    """

    token_ids: torch.Tensor
    positions: npt.NDArray[np.int32]
    slots: npt.NDArray[np.int64]
    tables: npt.NDArray[np.int32]
    chunks: npt.NDArray[np.int32]
    sampled_tokens: torch.Tensor
    sampled_rows: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole step."""
        return len(self.positions)

    def arrays(self) -> list[npt.NDArray[np.generic]]:
        """Return what ``of_arrays`` makes the same batch of."""
        return [
            *(self.token_ids.numpy(), self.positions, self.slots, self.tables, self.chunks),
            *(self.sampled_tokens.numpy(), np.array(self.sampled_rows, np.int64)),
        ]

    @classmethod
    def of_arrays(cls, arrays: Sequence[npt.NDArray[np.generic]]) -> "Batch":
        """Undo ``arrays``; they are not copied."""
        token_ids, positions, slots, tables, chunks, sampled_tokens, sampled_rows = arrays
        return cls(
            token_ids=torch.from_numpy(token_ids),
            positions=positions.astype(np.int32, copy=False),
            slots=slots.astype(np.int64, copy=False),
            tables=tables.astype(np.int32, copy=False),
            chunks=chunks.astype(np.int32, copy=False),
            sampled_tokens=torch.from_numpy(sampled_tokens),
            sampled_rows=tuple(sampled_rows.tolist()),
        )


def flatten(rows: Sequence[StepRow], block_size: int, vocab_size: int) -> Batch:
    """Lay all rows' tokens end to end, short rows first.

    ValueError names the row that is empty, has a token id outside of the vocabulary, or a block
    table that does not reach its last token.
    """
    order = sorted(range(len(rows)), key=lambda i: len(rows[i].token_ids) > MAX_SINGLE_TOKENS)
    token_ids: list[int] = []
    positions: list[npt.NDArray[np.int32]] = []
    slots: list[npt.NDArray[np.int64]] = []
    tables: list[npt.NDArray[np.int32]] = []
    chunks: list[tuple[int, int, int]] = []
    sampled: list[tuple[int, int]] = []
    for index in order:
        row = rows[index]
        count = len(row.token_ids)
        end = row.start + count
        _check(row, index, end, block_size, vocab_size)
        first = len(token_ids)
        token_ids.extend(row.token_ids)
        at = np.arange(row.start, end, dtype=np.int32)
        table = np.asarray(row.block_table[: -(-end // block_size)], dtype=np.int32)
        positions.append(at)
        slots.append(table[at // block_size].astype(np.int64) * block_size + at % block_size)
        if count <= MAX_SINGLE_TOKENS:
            tables.extend([table] * count)
        else:
            tables.append(table)
            chunks.append((first, first + count, row.start))
        if row.samples:
            sampled.append((first + count - 1, index))
    return Batch(
        token_ids=torch.tensor(token_ids, dtype=torch.int64),
        positions=np.concatenate(positions),
        slots=np.concatenate(slots),
        tables=_pad(tables),
        chunks=np.array(chunks, dtype=np.int32).reshape(-1, 3),
        sampled_tokens=torch.tensor([token for token, _ in sampled], dtype=torch.int64),
        sampled_rows=tuple(index for _, index in sampled),
    )


def _check(row: StepRow, index: int, end: int, block_size: int, vocab_size: int) -> None:
    if not row.token_ids:
        raise ValueError(f"row {index} has no tokens")
    if row.start < 0 or end > len(row.block_table) * block_size:
        raise ValueError(
            f"row {index}: {len(row.block_table)} blocks do not hold positions "
            f"{row.start} to {end - 1}"
        )
    if min(row.token_ids) < 0 or max(row.token_ids) >= vocab_size:
        raise ValueError(f"row {index} has a token id outside of the vocabulary of {vocab_size}")


def _pad(tables: Sequence[npt.NDArray[np.int32]]) -> npt.NDArray[np.int32]:
    padded = np.zeros((len(tables), max(len(table) for table in tables)), dtype=np.int32)
    for row, table in enumerate(tables):
        padded[row, : len(table)] = table
    return padded
