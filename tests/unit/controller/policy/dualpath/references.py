"""The paper's algorithms as they read, slow and plain: nothing is shared with the program's."""

from collections import deque
from dataclasses import dataclass

from services.controller.policy.dualpath.engines import QueuedRequest


@dataclass
class Prefill:
    name: int
    tokens: int
    read_queue: int


def algorithm_1(
    engines: list[Prefill], queue: deque[QueuedRequest], alpha: float, beta: float
) -> list[tuple[str, int, int]]:
    """(request, engine, category), categories looked at anew for every request."""
    found = []
    while queue:
        light = [e for e in engines if e.tokens <= beta]
        short = [e for e in light if e.read_queue <= alpha]
        candidates = short or light
        if not candidates:
            break
        best = min(candidates, key=lambda e: (e.tokens, e.read_queue, e.name))
        request = queue.popleft()
        found.append((request.request_id, best.name, 2 if short else 3))
        best.tokens += request.num_tokens
    return found


def phase_1(
    requests: list[QueuedRequest], groups: dict[int, tuple[int, int, int]]
) -> list[tuple[str, int]]:
    """(request, group); groups are (number of engines, tokens, largest pool)."""
    tokens = {name: held for name, (_, held, _) in groups.items()}
    found = []
    for request in requests:
        able = [n for n, (_, _, largest) in groups.items() if largest >= request.num_blocks]
        if able:
            chosen = min(able, key=lambda n: (tokens[n] / groups[n][0], n))
            tokens[chosen] += request.num_tokens
            found.append((request.request_id, chosen))
    return found


@dataclass
class Decode:
    name: int
    requests: int
    tokens: int
    free: int


def phase_2(engines: list[Decode], queue: list[QueuedRequest]) -> list[tuple[str, int, bool]]:
    """(request, engine, whether it is within Z)."""
    room = sum(e.free for e in engines)
    best_prefix = max(
        n for n in range(len(queue) + 1) if sum(r.num_blocks for r in queue[:n]) <= room
    )
    total = sum(r.num_tokens for r in queue[:best_prefix]) + sum(e.tokens for e in engines)
    found = []
    for request in queue:
        fits = [e for e in engines if e.free >= request.num_blocks]
        if not fits:
            break
        # tokens + length <= 1.05 x total / engines, in whole numbers
        low = [
            e for e in fits if 100 * len(engines) * (e.tokens + request.num_tokens) <= 105 * total
        ]
        if low:
            best = min(low, key=lambda e: (e.requests, e.tokens, e.name))
        else:
            best = min(fits, key=lambda e: (e.tokens, e.requests, e.name))
        found.append((request.request_id, best.name, bool(low)))
        best.tokens += request.num_tokens
        best.requests += 1
        best.free -= request.num_blocks
    return found
