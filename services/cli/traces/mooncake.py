"""Traces in Mooncake's format: one request a line, its prompt known by hashes of its blocks.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, …]}

``timestamp`` is in milliseconds, lengths in tokens, and each hash stands for 512 tokens and all
before them (the last for what is left). Requests with equal first hashes share a prefix.

A trace names no sessions. A later request goes on where an earlier one ended when it begins with
all its whole blocks and is longer than its prompt and output together; of several the one with most
blocks in common, then the latest. Such a chain becomes one agent: what the later prompt has beyond
the earlier prompt and output is what the agent appends. All other requests are agents of one round.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from pathlib import Path

from services.cli.traces.json_lines import (
    MAX_TOKENS,
    BadLineError,
    BadLines,
    as_count,
    as_list,
    as_number,
    as_object,
    json_lines,
)
from services.cli.traces.trajectory import Part, Round, Trajectory

BLOCK_TOKENS = 512
MAX_HASHES = MAX_TOKENS // BLOCK_TOKENS
MAX_OPEN_ENDS = 64
"""Requests of one prefix that a later one is tried behind, the latest."""


@dataclass(frozen=True, slots=True)
class _Request:
    timestamp: float
    line: int
    input_length: int
    output_length: int
    hashes: tuple[int, ...]


def read_mooncake(path: Path, bad: BadLines, max_requests: int) -> list[Trajectory]:
    """Return the agents of the trace's first ``max_requests`` good lines, by their first requests.

    Bad lines are noted in ``bad``. ConfigError when the file cannot be read.
    """
    requests: list[_Request] = []
    for number, value in json_lines(path, bad):
        try:
            requests.append(_request(value, number))
        except BadLineError as error:
            bad.add(path, number, str(error))
        if len(requests) == max_requests:
            break
    return _agents(path.stem, sorted(requests, key=lambda asked: (asked.timestamp, asked.line)))


def _request(value: object, line: int) -> _Request:
    fields = as_object(value, "the line")
    input_length = as_count(fields.get("input_length"), "input_length", 1)
    hashes = as_list(fields.get("hash_ids"), "hash_ids", MAX_HASHES)
    wanted = ceil(input_length / BLOCK_TOKENS)
    if len(hashes) != wanted:
        raise BadLineError(
            f"hash_ids has {len(hashes)} items, and input_length {input_length} needs {wanted}"
        )
    return _Request(
        timestamp=as_number(fields.get("timestamp"), "timestamp"),
        line=line,
        input_length=input_length,
        output_length=as_count(fields.get("output_length"), "output_length", 1),
        hashes=tuple(
            as_count(item, f"hash_ids[{place}]", 0, 2**63 - 1) for place, item in enumerate(hashes)
        ),
    )


def _agents(name: str, requests: Sequence[_Request]) -> list[Trajectory]:
    chains: list[list[_Request]] = []
    open_ends: dict[int, deque[int]] = {}  # the key of whole blocks -> chains that end with them
    for request in requests:
        keys = _prefix_keys(request)
        chain = _continued(request, keys, chains, open_ends)
        if chain is None:
            chain = len(chains)
            chains.append([])
        chains[chain].append(request)
        if keys:
            open_ends.setdefault(keys[-1], deque(maxlen=MAX_OPEN_ENDS)).append(chain)
    return [_trajectory(name, chain) for chain in chains]


def _prefix_keys(request: _Request) -> list[int]:
    """Return a key of each prefix of whole blocks, shortest first."""
    keys, key = [], 0
    for block in request.hashes[: request.input_length // BLOCK_TOKENS]:
        key = hash((key, block))
        keys.append(key)
    return keys


def _continued(
    request: _Request,
    keys: Sequence[int],
    chains: Sequence[Sequence[_Request]],
    open_ends: dict[int, deque[int]],
) -> int | None:
    """Return the chain that the request goes on with, no longer among the open ends."""
    for key in reversed(keys):
        ends = open_ends.get(key, deque())
        for chain in reversed(ends):
            last = chains[chain][-1]
            if request.input_length > last.input_length + last.output_length:
                ends.remove(chain)
                return chain
    return None


def _trajectory(name: str, chain: Sequence[_Request]) -> Trajectory:
    first = chain[0]
    parts = [
        Part(
            f"{name} block {block}",
            min(BLOCK_TOKENS, first.input_length - place * BLOCK_TOKENS),
        )
        for place, block in enumerate(first.hashes)
    ]
    rounds = [Round(tuple(parts), first.output_length)]
    for before, request in pairwise(chain):
        added = request.input_length - before.input_length - before.output_length
        part = Part(f"{name} line {request.line}", added)
        rounds.append(Round((part,), request.output_length))
    return Trajectory(f"{name}:{first.line}", tuple(rounds))
