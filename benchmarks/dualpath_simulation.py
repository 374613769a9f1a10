"""Coding agents on a simulated cluster whose nodes read KV from a store: discrete events.

A round of an agent is a request: its context is in the store, something was appended, and so many
tokens are drawn. The context is read whole over one node's link to the store, first come first
served; then its prefill engine computes what was appended, one request after the other; then it
decodes at a fixed pace, and the agent's next round follows at once. Nothing else is modelled: no
link between engines is ever full, and decodes do not slow each other down. What differs between
policies is only who computes, who decodes, and which side reads.

Trajectories follow the published averages of the set of 64K (papers 2.10): turns, total and context
are met; appended tokens per round come out lower, since the averages given there cannot all be of
one population.
"""

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from random import Random
from statistics import fmean, pstdev
from typing import Protocol

from services.controller.policy.dualpath.engines import (
    EngineGroup,
    EngineId,
    EngineReport,
    Fetch,
    GroupId,
    NodeId,
    QueuedRequest,
    Side,
)
from services.controller.policy.dualpath.scheduler import DualPathScheduler
from services.controller.policy.dualpath.thresholds import Thresholds

BLOCK_SIZE = 64
MEAN_TURNS, MEAN_TOTAL, MAX_TOTAL = 157, 55_958, 65_536
FIRST_SHARE = 0.17
"""Of a trajectory's tokens, those of its first prompt; so the context is 0.59 of the total."""
APPEND_SHARE = 429 / (429 + 176)


@dataclass(frozen=True, slots=True)
class Round:
    """One request of an agent, in tokens."""

    num_cached: int
    num_appended: int
    num_drawn: int


def trajectory(dice: Random) -> list[Round]:
    """Return the rounds of one agent, from its first prompt on."""
    turns = min(400, max(20, round(dice.lognormvariate(4.945, 0.47))))
    total = min(MAX_TOTAL, max(MAX_TOTAL / 4, dice.gauss(57_500, 9_000)))
    weights = [dice.lognormvariate(0, 0.8) for _ in range(turns)]
    unit = total * (1 - FIRST_SHARE) / sum(weights)
    rounds: list[Round] = []
    context = 0
    for number, weight in enumerate(weights):
        appended = max(1, round(weight * unit * APPEND_SHARE))
        appended += round(total * FIRST_SHARE) if number == 0 else 0
        drawn = max(1, round(weight * unit * (1 - APPEND_SHARE)))
        stored = context // BLOCK_SIZE * BLOCK_SIZE
        rounds.append(Round(stored, context - stored + appended, drawn))
        context += appended + drawn
    return rounds


@dataclass(frozen=True, slots=True)
class Plant:
    """The cluster. ``link_rate`` is of a node, ``prefill_rate`` of an engine, tokens per second."""

    num_prefill_nodes: int = 2
    num_decode_nodes: int = 4
    engines_per_node: int = 8
    link_rate: float = 195_000.0  # 50 GB/s at 256 KiB a token
    prefill_rate: float = 8_000.0
    token_seconds: float = 0.036
    pool_blocks: int = 40_000
    fetch_seconds: float = 0.05

    def groups(self) -> tuple[EngineGroup, EngineGroup]:
        """Return one group of all prefill engines and one of all decode engines."""
        first = self.num_prefill_nodes * self.engines_per_node
        last = first + self.num_decode_nodes * self.engines_per_node
        node = {EngineId(n): NodeId(n // self.engines_per_node) for n in range(last)}
        prefills = {engine: node[engine] for engine in list(node)[:first]}
        decodes = {engine: node[engine] for engine in list(node)[first:]}
        return (
            EngineGroup(GroupId(0), Side.PREFILL, prefills),
            EngineGroup(GroupId(1), Side.DECODE, decodes),
        )

    @property
    def num_nodes(self) -> int:
        """All nodes, prefill before decode."""
        return self.num_prefill_nodes + self.num_decode_nodes


@dataclass(slots=True)
class Load:
    """What an engine was assigned and has not finished, and when it has computed all of it."""

    num_requests: int = 0
    num_tokens: int = 0
    used_blocks: int = 0
    free_at: float = 0.0


@dataclass(slots=True)
class State:
    """What a policy may see: the loads of engines, and when each node's link is free."""

    plant: Plant
    loads: dict[EngineId, Load]
    link_free_at: list[float]

    def read_queue(self, node: NodeId, now: float) -> int:
        """Return the tokens that a node has still to read."""
        return round(max(0.0, self.link_free_at[node] - now) * self.plant.link_rate)


@dataclass(frozen=True, slots=True)
class Choice:
    """Who serves a request, and the node that reads."""

    request: QueuedRequest
    prefill: EngineId
    decode: EngineId
    reader: NodeId


class Chooser(Protocol):
    """A policy: takes requests in, and places them now or when the groups fetch."""

    def submit(self, request: QueuedRequest) -> list[Choice]:
        """Take a request; return what is placed at once."""
        ...

    def fetch(self, state: State, now: float) -> list[Choice]:
        """Every group asks for work."""
        ...


class DualPathChooser:
    """The scheduler itself."""

    def __init__(self, plant: Plant, thresholds: Thresholds) -> None:
        self._groups = plant.groups()
        self._nodes = {e: n for group in self._groups for e, n in group.nodes.items()}
        self._scheduler = DualPathScheduler(self._groups, thresholds)

    def submit(self, request: QueuedRequest) -> list[Choice]:
        """Queue it."""
        self._scheduler.submit(request)
        return []

    def fetch(self, state: State, now: float) -> list[Choice]:
        """Let both groups fetch."""
        choices: list[Choice] = []
        for group in self._groups:
            reports = tuple(_report(engine, state) for engine in group.nodes)
            queues = {node: state.read_queue(node, now) for node in set(group.nodes.values())}
            decisions = self._scheduler.fetch(Fetch(group.group, reports, queues))
            for one in decisions.assigned:
                assign(state.loads[one.engine], one.request)
            for placed in decisions.placed:
                side = placed.decode if placed.reads is Side.DECODE else placed.prefill
                reader = self._nodes[side]
                choices.append(Choice(placed.request, placed.prefill, placed.decode, reader))
        return choices


def _report(engine: EngineId, state: State) -> EngineReport:
    load, pool = state.loads[engine], state.plant.pool_blocks
    free = pool - load.used_blocks
    return EngineReport(engine, load.num_requests, load.num_tokens, free, pool)


class IndexChooser:
    """Engines and reading nodes by a number for each request: in turn, or by dice."""

    def __init__(self, plant: Plant, state: State, pick: Callable[[int, str], int]) -> None:
        self._prefills, self._decodes = (list(group.nodes) for group in plant.groups())
        self._plant = plant
        self._state = state
        self._pick = pick

    def submit(self, request: QueuedRequest) -> list[Choice]:
        """Place it; each node is to read equally often, on whichever side it is."""
        per_node = self._plant.engines_per_node
        prefill = self._prefills[self._pick(len(self._prefills), "prefill")]
        decode = self._decodes[self._pick(len(self._decodes), "decode")]
        is_prefill = self._pick(self._plant.num_nodes, "path") < self._plant.num_prefill_nodes
        for engine in (prefill, decode):
            assign(self._state.loads[engine], request)
        reader = NodeId((prefill if is_prefill else decode) // per_node)
        return [Choice(request, prefill, decode, reader)]

    def fetch(self, state: State, now: float) -> list[Choice]:
        """Nothing waits."""
        del state, now
        return []


def assign(load: Load, request: QueuedRequest) -> None:
    """Count a request as an engine's."""
    load.num_requests += 1
    load.num_tokens += request.num_tokens
    load.used_blocks += request.num_blocks


def release(load: Load, request: QueuedRequest) -> None:
    """Count a request as finished there."""
    load.num_requests -= 1
    load.num_tokens -= request.num_tokens
    load.used_blocks -= request.num_blocks


@dataclass(slots=True)
class Result:
    """Tokens read by node in each second, queues of reads, and times to first token."""

    num_nodes: int
    first_second: int
    last_second: int
    read: defaultdict[int, list[float]] = field(init=False)
    ttft_seconds: list[float] = field(default_factory=list)
    longest_queues: float = 0.0
    mean_queues: float = 0.0

    def __post_init__(self) -> None:
        """Nothing was read yet."""
        self.read = defaultdict(lambda: [0.0] * self.num_nodes)

    def _windows(self, window_seconds: int) -> list[list[float]]:
        """Return reads by node in each window."""
        windows = []
        for start in range(
            self.first_second, self.last_second - window_seconds + 1, window_seconds
        ):
            seconds = [self.read[second] for second in range(start, start + window_seconds)]
            windows.append([sum(reads) for reads in zip(*seconds, strict=True)])
        return windows

    def max_over_mean(self, window_seconds: int = 1) -> float:
        """Return the busiest link's reads over the mean of all links, averaged over windows."""
        return fmean(max(one) / fmean(one) for one in self._windows(window_seconds))

    def note_queues(self, queues: list[int]) -> None:
        """Note the queues of reads of all links at one moment."""
        self.longest_queues += max(queues)
        self.mean_queues += fmean(queues)

    @property
    def queue_max_over_mean(self) -> float:
        """Return the longest queue over the mean of all links, each averaged over time."""
        return self.longest_queues / self.mean_queues

    def deviation(self, window_seconds: int = 1) -> float:
        """Return the standard deviation over the links as a share of the mean, averaged."""
        return fmean(pstdev(one) / fmean(one) for one in self._windows(window_seconds))

    def utilisation(self, link_rate: float) -> float:
        """Return the share of all links' speed that was used."""
        return fmean(fmean(one) for one in self._windows(1)) / link_rate


def note_read(result: Result, node: NodeId, start: float, end: float, rate: float) -> None:
    """Spread a read over the seconds that it took."""
    second = int(start)
    while second < end:
        share = min(end, second + 1) - max(start, second)
        result.read[second][node] += share * rate
        second += 1


class _Run:
    """One simulation: what is asked for, and what ends when."""

    def __init__(self, plant: Plant, agents: Iterable[list[Round]], num_seconds: int) -> None:
        engines = [engine for group in plant.groups() for engine in group.nodes]
        loads = {engine: Load() for engine in engines}
        self.state = State(plant, loads, [0.0] * plant.num_nodes)
        self.result = Result(plant.num_nodes, num_seconds // 3, num_seconds)
        self._plant = plant
        self._agents = list(agents)
        self._num_asked = [0] * len(self._agents)
        self._asked: dict[str, tuple[int, Round, float]] = {}
        self._numbers = count()
        # (time, order, agent whose turn it is, and the decode that ended)
        self.turns: list[tuple[float, int, int, tuple[EngineId, QueuedRequest] | None]] = []
        self._prefill_ends: list[tuple[float, int, EngineId, QueuedRequest]] = []
        for agent in range(len(self._agents)):
            start = 5.0 * agent / len(self._agents)
            heapq.heappush(self.turns, (start, next(self._numbers), agent, None))

    def next_request(self) -> tuple[float, QueuedRequest]:
        """End the decode that ends next, and return what its agent asks for then."""
        now, _, agent, ended = heapq.heappop(self.turns)
        if ended is not None:
            release(self.state.loads[ended[0]], ended[1])
        self.end_prefills(now)
        number = self._num_asked[agent]
        self._num_asked[agent] += 1
        one = self._agents[agent][number % len(self._agents[agent])]
        request = _request(f"{agent}-{number}", one)
        self._asked[request.request_id] = (agent, one, now)
        return now, request

    def end_prefills(self, now: float) -> None:
        """Take prompts that are computed off their engines."""
        while self._prefill_ends and self._prefill_ends[0][0] <= now:
            _, _, engine, request = heapq.heappop(self._prefill_ends)
            release(self.state.loads[engine], request)

    def note_queues(self, now: float) -> None:
        """Note the queues of reads, once the run is steady."""
        if now >= self.result.first_second:
            nodes = map(NodeId, range(self._plant.num_nodes))
            self.result.note_queues([self.state.read_queue(node, now) for node in nodes])

    def serve(self, choice: Choice, now: float) -> None:
        """Read, compute and decode a request that was placed."""
        agent, one, asked_at = self._asked.pop(choice.request.request_id)
        plant, state = self._plant, self.state
        read_at = max(now, state.link_free_at[choice.reader])
        is_read = read_at + one.num_cached / plant.link_rate
        state.link_free_at[choice.reader] = is_read
        note_read(self.result, choice.reader, read_at, is_read, plant.link_rate)
        load = state.loads[choice.prefill]
        first_token = max(is_read, load.free_at) + one.num_appended / plant.prefill_rate
        load.free_at = first_token
        ended_prefill = (first_token, next(self._numbers), choice.prefill, choice.request)
        heapq.heappush(self._prefill_ends, ended_prefill)
        if asked_at >= self.result.first_second:
            self.result.ttft_seconds.append(first_token - asked_at)
        end = first_token + one.num_drawn * plant.token_seconds
        decode = (choice.decode, choice.request)
        heapq.heappush(self.turns, (end, next(self._numbers), agent, decode))


def simulate(
    plant: Plant,
    agents: Iterable[list[Round]],
    make_chooser: Callable[[State], Chooser],
    num_seconds: int = 60,
) -> Result:
    """Run agents for so many seconds; each begins anew after its last round.

    They begin within five seconds. Nothing counts that was asked in the first third.
    """
    run = _Run(plant, agents, num_seconds)
    chooser = make_chooser(run.state)
    fetch_at = 0.0
    while fetch_at < num_seconds:
        if run.turns and run.turns[0][0] <= fetch_at:
            now, request = run.next_request()
            choices = chooser.submit(request)
        else:
            now = fetch_at
            run.end_prefills(now)
            run.note_queues(now)
            choices = chooser.fetch(run.state, now)
            fetch_at += plant.fetch_seconds
        for choice in choices:
            run.serve(choice, now)
    return run.result


def _request(name: str, one: Round) -> QueuedRequest:
    num_tokens = one.num_cached + one.num_appended
    blocks = -(-(num_tokens + one.num_drawn) // BLOCK_SIZE)
    return QueuedRequest(name, num_tokens, blocks, one.num_cached)


def draw_agents(num_agents: int, num_rounds: int, seed: int) -> list[list[Round]]:
    """Return so many rounds of each agent, from a random one of its trajectory on."""
    dice = Random(seed)
    agents: list[list[Round]] = []
    for _ in range(num_agents):
        rounds = trajectory(dice)
        start = dice.randrange(max(1, len(rounds) - num_rounds))
        agents.append(rounds[start : start + num_rounds])
    return agents


def measured_thresholds(plant: Plant, agents: list[list[Round]]) -> Thresholds:
    """Return alpha and beta as a profile of this load gives them.

    Beta is in tokens of whole requests, as ``tok`` is: most are cached, and so an engine gets
    through far more of them than it computes.
    """
    rounds = [one for agent in agents for one in agent]
    tokens = sum(one.num_cached + one.num_appended for one in rounds)
    seconds = sum(one.num_appended for one in rounds) / plant.prefill_rate
    return Thresholds.of(plant.link_rate, tokens / seconds)


def choosers(
    plant: Plant, thresholds: Thresholds, seed: int
) -> dict[str, Callable[[State], Chooser]]:
    """Return the policies to compare, by name; ``prefill_only`` takes turns, too."""

    def in_turn(state: State) -> Chooser:
        turns: defaultdict[str, Callable[[], int]] = defaultdict(lambda: count().__next__)
        return IndexChooser(plant, state, lambda size, what: turns[what]() % size)

    def in_turn_on_one_side(state: State) -> Chooser:
        turns: defaultdict[str, Callable[[], int]] = defaultdict(lambda: count().__next__)
        return IndexChooser(
            plant, state, lambda size, what: 0 if what == "path" else turns[what]() % size
        )

    def by_dice(state: State) -> Chooser:
        dice = Random(seed)
        return IndexChooser(plant, state, lambda size, _: dice.randrange(size))

    return {
        "dualpath": lambda _: DualPathChooser(plant, thresholds),
        "round_robin": in_turn,
        "random": by_dice,
        "prefill_only": in_turn_on_one_side,
    }
