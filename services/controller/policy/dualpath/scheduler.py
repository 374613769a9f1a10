"""The central scheduler for groups of engines that fetch their work (papers 2.7).

Theory of operation. A request stands in two queues at once: the prefill queue, and the decode
side's. The leader of each group fetches from time to time and tells how its engines stand. A fetch
of a prefill group runs Algorithm 1 over the prefill queue. A fetch of a decode group first spreads
the global decode queue over all decode groups (phase 1), then serves the group's own queue (phase
2). When a request has both engines, the path of its stored KV is chosen, and its read counts in
that node's queue until the node's next fetch tells what is left.

Between two fetches of a group its last report holds, plus what was queued for it since.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from services.controller.policy.dualpath.cells import split
from services.controller.policy.dualpath.decode_side import (
    DecodeEngine,
    GroupLoad,
    assign_decodes,
    spread,
)
from services.controller.policy.dualpath.engines import (
    Assigned,
    EngineGroup,
    EngineId,
    EngineReport,
    Fetch,
    GroupId,
    Inputs,
    NodeId,
    QueuedRequest,
    Side,
    check_groups,
)
from services.controller.policy.dualpath.path import SIDE_REASONS, reading_side
from services.controller.policy.dualpath.prefill_side import PrefillEngine, assign_prompts
from services.controller.policy.dualpath.redirection import Place, Redirection, redirections
from services.controller.policy.dualpath.thresholds import PRESETS, Thresholds


@dataclass(frozen=True, slots=True)
class Placed:
    """A request has both engines. ``reads`` is who reads its stored KV; None where none is."""

    request: QueuedRequest
    prefill: EngineId
    decode: EngineId
    reads: Side | None
    reason: str
    inputs: Inputs = ()


@dataclass(frozen=True, slots=True)
class Decisions:
    """What one fetch brought: engines assigned, and requests that have both now."""

    assigned: tuple[Assigned, ...] = ()
    placed: tuple[Placed, ...] = ()


@dataclass(slots=True)
class _Cell:
    """Decode engines that are scheduled together, and the requests that wait for one of them."""

    cell: GroupId
    engines: tuple[EngineId, ...]
    queue: deque[QueuedRequest] = field(default_factory=deque)
    num_queued_tokens: int = 0
    num_reported_tokens: int = 0
    max_blocks: int = 0
    """Its largest pool; 0 until its group's first fetch, and so long it gets nothing."""

    def load(self) -> GroupLoad:
        tokens = self.num_reported_tokens + self.num_queued_tokens
        return GroupLoad(self.cell, len(self.engines), tokens, self.max_blocks)

    def push(self, request: QueuedRequest) -> None:
        self.queue.append(request)
        self.num_queued_tokens += request.num_tokens


class DualPathScheduler:
    """Assigns submitted requests to the engines of ``groups`` as their leaders fetch.

    ``thresholds`` may be replaced at any time. Raises ValueError for groups that do not fit
    together (``check_groups``). A request that no decode engine's pool could hold waits for ever:
    the caller refuses those.
    """

    def __init__(
        self,
        groups: Iterable[EngineGroup],
        thresholds: Thresholds,
        max_cell_engines: int = PRESETS["medium"].max_cell_engines,
    ) -> None:
        self.thresholds = thresholds
        self._groups = {group.group: group for group in groups}
        check_groups(self._groups.values())
        self._nodes = {e: n for group in self._groups.values() for e, n in group.nodes.items()}
        self._cells: dict[GroupId, _Cell] = {}
        self._cells_of: dict[GroupId, list[_Cell]] = {}
        for group in self._groups.values():
            if group.side is Side.DECODE:
                self._cells_of[group.group] = made = [
                    _Cell(GroupId(len(self._cells) + number), engines)
                    for number, engines in enumerate(split(group, max_cell_engines))
                ]
                self._cells.update((cell.cell, cell) for cell in made)
        self._prefill_queue: deque[QueuedRequest] = deque()
        self._decode_queue: deque[QueuedRequest] = deque()
        self._half: dict[str, Assigned] = {}
        self._read_queues: dict[NodeId, int] = {}
        self._moved: set[str] = set()

    @property
    def num_waiting(self) -> tuple[int, int]:
        """How many requests wait for a prefill engine, and how many for a decode engine."""
        queued = sum(len(cell.queue) for cell in self._cells.values())
        return len(self._prefill_queue), len(self._decode_queue) + queued

    def read_queue(self, node: NodeId) -> int:
        """Return a node's queue of reads, in tokens: as reported, and what was issued since."""
        return self._read_queues.get(node, 0)

    def submit(self, request: QueuedRequest) -> None:
        """Queue a request; its id is not in use."""
        self._prefill_queue.append(request)
        self._decode_queue.append(request)

    def fetch(self, fetch: Fetch) -> Decisions:
        """Give a group what it may have. Raises KeyError for an unknown group or engine."""
        group = self._groups[fetch.group]
        self._read_queues.update(fetch.read_queues)
        if group.side is Side.PREFILL:
            assigned = self._fetch_prompts(group, fetch.engines)
        else:
            assigned = self._fetch_decodes(group, fetch.engines)
        placed = [found for one in assigned if (found := self._pair(one)) is not None]
        return Decisions(tuple(assigned), tuple(placed))

    def remove_group(self, group: GroupId) -> None:
        """Let a dead group go.

        What waits in its own queue, and what had one of its engines but none of the other side,
        goes to other groups, before all that is newer. Requests that had both engines are the
        caller's to submit again.
        """
        gone = self._groups.pop(group)
        for engine in gone.nodes:
            del self._nodes[engine]
        lost = [one.request for one in self._half.values() if one.engine in gone.nodes]
        for request in lost:
            del self._half[request.request_id]
        for cell in self._cells_of.pop(group, ()):
            lost += cell.queue
            del self._cells[cell.cell]
        queue = self._prefill_queue if gone.side is Side.PREFILL else self._decode_queue
        queue.extendleft(reversed(lost))

    def redirect(self) -> list[Redirection]:
        """Move requests from hot decode queues to others; each at most once in its life."""
        places = [
            Place(
                cell.cell,
                len(cell.engines),
                cell.num_reported_tokens + cell.num_queued_tokens,
                cell.max_blocks,
                [one for one in cell.queue if one.request_id not in self._moved],
            )
            for cell in self._cells.values()
        ]
        moves = redirections(places)
        for move in moves:
            source = self._cells[move.source]
            source.queue.remove(move.request)
            source.num_queued_tokens -= move.request.num_tokens
            self._cells[move.target].push(move.request)
            self._moved.add(move.request.request_id)
        return moves

    def _fetch_prompts(
        self, group: EngineGroup, reports: tuple[EngineReport, ...]
    ) -> list[Assigned]:
        queues = self._read_queues
        engines = [
            PrefillEngine(
                report.engine,
                report.num_tokens,
                queues.get(group.nodes[report.engine], 0),
                self.thresholds,
            )
            for report in reports
        ]
        return assign_prompts(engines, self._prefill_queue)

    def _fetch_decodes(
        self, group: EngineGroup, reports: tuple[EngineReport, ...]
    ) -> list[Assigned]:
        by_engine = {report.engine: report for report in reports}
        cells = self._cells_of[group.group]
        for cell in cells:
            held = [by_engine[engine] for engine in cell.engines if engine in by_engine]
            cell.num_reported_tokens = sum(report.num_tokens for report in held)
            cell.max_blocks = max((report.total_blocks for report in held), default=0)
        for request, chosen in spread(
            self._decode_queue, [cell.load() for cell in self._cells.values() if cell.max_blocks]
        ):
            self._cells[chosen].push(request)
        assigned: list[Assigned] = []
        for cell in cells:
            held = [by_engine[engine] for engine in cell.engines if engine in by_engine]
            engines = [
                DecodeEngine(one.engine, one.num_requests, one.num_tokens, one.free_blocks)
                for one in held
            ]
            found = assign_decodes(engines, cell.queue)
            moved = sum(one.request.num_tokens for one in found)
            cell.num_queued_tokens -= moved
            cell.num_reported_tokens += moved
            assigned += found
        return assigned

    def _pair(self, assigned: Assigned) -> Placed | None:
        request = assigned.request
        other = self._half.pop(request.request_id, None)
        if other is None:
            self._half[request.request_id] = assigned
            return None
        self._moved.discard(request.request_id)
        is_prefill = assigned.side is Side.PREFILL
        prefill, decode = (assigned, other) if is_prefill else (other, assigned)
        if not request.num_stored_tokens:
            return Placed(request, prefill.engine, decode.engine, None, "nothing is stored")
        prefill_node, decode_node = self._nodes[prefill.engine], self._nodes[decode.engine]
        queues = self.read_queue(prefill_node), self.read_queue(decode_node)
        side = reading_side(*queues)
        node = prefill_node if side is Side.PREFILL else decode_node
        self._read_queues[node] = self.read_queue(node) + request.num_stored_tokens
        inputs = (("prefill_read_queue", queues[0]), ("decode_read_queue", queues[1]))
        return Placed(request, prefill.engine, decode.engine, side, SIDE_REASONS[side], inputs)
