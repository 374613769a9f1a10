"""Engines, their groups, and the requests that wait for them, as DualPath's scheduler sees them.

An engine is one worker; a node is what shares one link to the store; a group is the engines that
one leader speaks for. All engines of a group do the same side, and all of a node are in one group
(papers 2.7). Everything that is compared is in tokens, and free memory is in KV blocks.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType

EngineId = NewType("EngineId", int)
NodeId = NewType("NodeId", int)
GroupId = NewType("GroupId", int)


class Side(StrEnum):
    """What the engines of a group are there for."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class EngineGroup:
    """Engines that fetch work together: their nodes, and whose is which."""

    group: GroupId
    side: Side
    nodes: Mapping[EngineId, NodeId]


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """A request that waits: its length, the blocks that its decode needs, and what is stored.

    ``num_tokens`` are the prompt's; ``num_stored_tokens`` of them, its first, are in the store.
    """

    request_id: str
    num_tokens: int
    num_blocks: int
    num_stored_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EngineReport:
    """What a fetch tells of one engine.

    ``num_requests`` (seq) and ``num_tokens`` (tok) are of requests assigned to it and unfinished,
    ``free_blocks`` what its pool has left, ``total_blocks`` what it would have when idle.
    """

    engine: EngineId
    num_requests: int = 0
    num_tokens: int = 0
    free_blocks: int = 0
    total_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Fetch:
    """A leader asks for work: how its group's engines stand, and its nodes' queues of reads."""

    group: GroupId
    engines: tuple[EngineReport, ...]
    read_queues: Mapping[NodeId, int] = field(default_factory=dict)


Inputs = tuple[tuple[str, int | float | str], ...]


@dataclass(frozen=True, slots=True)
class Assigned:
    """An engine got a request. ``category`` and ``reason`` say why it was this one."""

    request: QueuedRequest
    side: Side
    engine: EngineId
    category: str
    reason: str
    inputs: Inputs = ()


def check_groups(groups: Iterable[EngineGroup]) -> None:
    """Check that ids are unique and that nobody's node is split. Raises ValueError."""
    seen: set[GroupId] = set()
    engines: set[EngineId] = set()
    owners: dict[NodeId, GroupId] = {}
    for group in groups:
        if not group.nodes:
            raise ValueError(f"group {group.group} has no engines")
        if group.group in seen:
            raise ValueError(f"two groups are called {group.group}")
        seen.add(group.group)
        if twice := engines & set(group.nodes):
            raise ValueError(f"engine {min(twice)} is in two groups")
        engines |= set(group.nodes)
        for node in group.nodes.values():
            if owners.setdefault(node, group.group) != group.group:
                raise ValueError(
                    f"node {node} is in groups {owners[node]} and {group.group}; a node's engines "
                    "share its link to the store and so belong to one group"
                )
