"""DualPath's scheduling, without a cluster: ``python -m benchmarks.dualpath_scheduling``.

* **scheduler**: core time of the central scheduler with 1152 engines and 48 000 agents, each of
  which always has one request open. Groups fetch in turn; making up their reports is not timed.
  The share is of one core, at the rates that the paper's runs had.
* **policy**: core time of one choice by the policy ``dualpath`` among a controller's workers.
* **attention**: data-parallel ranks wait for the slowest one's attention. Each packs its own
  prompts, up to a number of tokens or up to a quota of attention time; both are 300 ms on average.
  Times vary by 5 % around the cost model, which the quota has to learn from them.
* **links**: how evenly nodes' links to the store are used; see ``dualpath_simulation``.

``--plot`` draws the links' part into ``docs/images/dualpath_links.svg``.
"""

import argparse
import math
import sys
from collections import deque
from itertools import count, cycle, pairwise
from pathlib import Path
from random import Random
from statistics import fmean
from time import thread_time_ns

from benchmarks.dualpath_simulation import (
    BLOCK_SIZE,
    Load,
    Plant,
    Round,
    assign,
    choosers,
    draw_agents,
    measured_thresholds,
    release,
    simulate,
    trajectory,
)
from benchmarks.report import Cell, print_table, write_results
from common.ids import Epoch, WorkerId
from common.messages.fields import Role
from common.scheduler.attention_cost import AttentionCost, AttentionCostFit, Chunk
from common.scheduler.quota import QUOTA_SECONDS, pack, remainder
from services.controller.policy.cluster_view import ClusterView
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
from services.controller.policy.dualpath.policy import DualPath
from services.controller.policy.dualpath.ratio import NodeLinks, bottlenecks, feasible_ratios
from services.controller.policy.dualpath.scheduler import DualPathScheduler
from services.controller.policy.dualpath.thresholds import Thresholds
from services.controller.policy.views import Pairing, RequestView, WorkerView

ENGINES_PER_NODE = 8
NUM_PREFILL_NODES, NUM_DECODE_NODES = 48, 96
NUM_AGENTS = 48_000
MEAN_TURNS = 157
OFFLINE_RATE = NUM_AGENTS * MEAN_TURNS / 3201
"""Requests per second of the paper's 48P96D run: so many agents were done in 3201 s."""
ONLINE_RATE = 8.8 * MEAN_TURNS
"""Requests per second of its 44P88D run, at 8.8 agents per second."""
POOL_BLOCKS = 64_000
TICK_ROUNDS = (10, 26)
"""Fetches that a decode lasts: with a second between them, 18 s a round on average."""
NUM_WARM = 20
NUM_RANKS = 8
TRUE_COST = AttentionCost(chunk_seconds=3e-4, pair_seconds=1e-9, token_seconds=2e-6)
NOISE = 0.05
AGENTS = (60, 100, 130, 160, 200, 250)
SEEDS = (1, 2, 3)
PAPER_NODE = NodeLinks(8, 50e9, 50e9, 500e9)
"""The paper's: engines, then bytes per second of a compute link, storage links and memory."""
PLOT = Path(__file__).parents[1] / "docs" / "images" / "dualpath_links.svg"
COLORS = {
    "dualpath": "#1f77b4",
    "round_robin": "#d62728",
    "random": "#7f7f7f",
    "prefill_only": "#2ca02c",
}


def groups(nodes_per_prefill_group: int, nodes_per_decode_group: int) -> list[EngineGroup]:
    """Return the paper's largest cluster, cut into groups of so many nodes."""
    found: list[EngineGroup] = []
    node = 0
    for side, num_nodes, size in (
        (Side.PREFILL, NUM_PREFILL_NODES, nodes_per_prefill_group),
        (Side.DECODE, NUM_DECODE_NODES, nodes_per_decode_group),
    ):
        for first in range(node, node + num_nodes, size):
            engines = {
                EngineId(n): NodeId(n // ENGINES_PER_NODE)
                for n in range(first * ENGINES_PER_NODE, (first + size) * ENGINES_PER_NODE)
            }
            found.append(EngineGroup(GroupId(len(found)), side, engines))
        node += num_nodes
    return found


class Cluster:
    """Engines that finish what they are assigned: prompts by the next fetch, decodes later."""

    def __init__(self, held: list[EngineGroup], max_cell_engines: int) -> None:
        self._groups = held
        self._scheduler = DualPathScheduler(held, Thresholds(600_000, 1_600_000), max_cell_engines)
        self._loads = {engine: Load() for group in held for engine in group.nodes}
        self._dice = Random(1)
        self._rounds = cycle([one for _ in range(100) for one in trajectory(self._dice)])
        self._numbers = count()
        self._prompts: dict[EngineId, list[QueuedRequest]] = {e: [] for e in self._loads}
        self._decodes: dict[int, list[tuple[EngineId, QueuedRequest]]] = {}
        self.core_ns = 0
        self.num_placed = 0

    def submit(self, num_requests: int) -> None:
        """Let so many agents ask for their next round."""
        made = [self._request() for _ in range(num_requests)]
        begin = thread_time_ns()
        for request in made:
            self._scheduler.submit(request)
        self.core_ns += thread_time_ns() - begin

    def tick(self, now: int) -> None:
        """Let every group fetch once, then end decodes and let their agents go on."""
        for group in self._groups:
            fetch = self._report(group)
            begin = thread_time_ns()
            decisions = self._scheduler.fetch(fetch)
            self.core_ns += thread_time_ns() - begin
            self.num_placed += len(decisions.placed)
            for one in decisions.assigned:
                assign(self._loads[one.engine], one.request)
                if one.side is Side.PREFILL:
                    self._prompts[one.engine].append(one.request)
            for placed in decisions.placed:
                end = now + self._dice.randint(*TICK_ROUNDS)
                self._decodes.setdefault(end, []).append((placed.decode, placed.request))
        ended = self._decodes.pop(now, [])
        for engine, request in ended:
            release(self._loads[engine], request)
        self.submit(len(ended))

    def _report(self, group: EngineGroup) -> Fetch:
        if group.side is Side.PREFILL:
            for engine in group.nodes:
                for request in self._prompts[engine]:
                    release(self._loads[engine], request)
                self._prompts[engine] = []
        reports = []
        for engine in group.nodes:
            load = self._loads[engine]
            free = POOL_BLOCKS - load.used_blocks
            report = EngineReport(engine, load.num_requests, load.num_tokens, free, POOL_BLOCKS)
            reports.append(report)
        queues = {node: self._dice.randrange(400_000) for node in set(group.nodes.values())}
        return Fetch(group.group, tuple(reports), queues)

    def _request(self) -> QueuedRequest:
        one = next(self._rounds)
        num_tokens = one.num_cached + one.num_appended
        blocks = -(-(num_tokens + one.num_drawn) // BLOCK_SIZE)
        return QueuedRequest(str(next(self._numbers)), num_tokens, blocks, one.num_cached)


def schedule(
    name: str,
    held: list[EngineGroup],
    max_cell_engines: int,
    ticks: int,
    num_agents: int = NUM_AGENTS,
) -> dict[str, Cell]:
    """Return the cost of one request, which is two engines and a path, in a steady state."""
    cluster = Cluster(held, max_cell_engines)
    cluster.tick(-1)  # every group is heard of before the first request
    cluster.submit(num_agents)
    for now in range(NUM_WARM):
        cluster.tick(now)
    cluster.core_ns = cluster.num_placed = 0
    for now in range(NUM_WARM, NUM_WARM + ticks):
        cluster.tick(now)
    seconds = cluster.core_ns / 1e9 / cluster.num_placed
    return {
        "part": "scheduler",
        "groups": name,
        "engines": sum(len(group.nodes) for group in held),
        "agents": num_agents,
        "requests": cluster.num_placed,
        "us per request": round(1e6 * seconds, 2),
        "decisions/core-s": round(3 / seconds),
        "core at 2354/s": round(seconds * OFFLINE_RATE, 4),
        "core at 1382/s": round(seconds * ONLINE_RATE, 4),
    }


def choose(num_prefill: int, num_decode: int, num_choices: int) -> dict[str, Cell]:
    """Return what a choice costs where eight workers are on each host."""
    dice, cluster = Random(1), ClusterView()
    decodes = [(WorkerId(f"worker-{n + num_prefill}"), Epoch(1)) for n in range(num_decode)]
    pairings = dict.fromkeys(decodes, Pairing.WORKS)
    for number in range(num_prefill + num_decode):
        view = WorkerView(
            WorkerId(f"worker-{number}"),
            Epoch(1),
            Role.PREFILL if number < num_prefill else Role.DECODE,
            uncomputed_tokens=dice.randrange(20_000),
            total_blocks=POOL_BLOCKS,
            used_blocks=dice.randrange(POOL_BLOCKS // 2),
            pairings=pairings if number < num_prefill else {},
            num_unfinished=dice.randrange(60),
            prefill_rate=8_000.0,
            host=f"host-{number // ENGINES_PER_NODE}",
            read_queue_tokens=dice.randrange(40_000),
            read_rate=25_000.0,
        )
        cluster.update(view)
    policy = DualPath()
    requests = [RequestView(dice.randrange(1, 60_000), 600, BLOCK_SIZE) for _ in range(num_choices)]
    begin = thread_time_ns()
    for request in requests:
        if policy.choose(cluster, request) is None:
            raise RuntimeError("a cluster with room placed nothing")
    seconds = (thread_time_ns() - begin) / 1e9 / num_choices
    return {
        "part": "policy",
        "workers": f"{num_prefill}P{num_decode}D",
        "us per choice": round(1e6 * seconds, 1),
        "choices/core-s": round(1 / seconds),
    }


def _prompts(dice: Random) -> deque[Chunk]:
    rounds: list[Round] = [one for _ in range(12) for one in trajectory(dice)]
    dice.shuffle(rounds)
    return deque(Chunk(one.num_cached, one.num_appended) for one in rounds)


def _by_tokens(queue: deque[Chunk], num_tokens: int) -> list[Chunk]:
    chunks: list[Chunk] = []
    for prompt in queue:
        taken = min(prompt.num_tokens, num_tokens)
        if taken <= 0:
            break
        chunks.append(Chunk(prompt.num_cached, taken))
        num_tokens -= taken
    return chunks


def attend(limit: str, num_steps: int) -> dict[str, Cell]:
    """Return how evenly ranks are busy with steps made up by one kind of limit."""
    dice = Random(1)
    queues = [_prompts(dice) for _ in range(NUM_RANKS)]
    prompts = [prompt for queue in queues for prompt in queue]
    cost_of_token = sum(map(TRUE_COST.seconds, prompts)) / sum(p.num_tokens for p in prompts)
    max_tokens = round(QUOTA_SECONDS / cost_of_token)
    fit = AttentionCostFit()
    slowest, means, tokens = [], [], 0
    for step in range(num_steps):
        seconds = []
        for queue in queues:
            if limit == "tokens":
                chunks = _by_tokens(queue, max_tokens)
            else:
                chunks = pack(queue, fit.cost, QUOTA_SECONDS)
            for chunk in chunks:
                left = remainder(queue.popleft(), chunk.num_tokens)
                if left.num_tokens:
                    queue.appendleft(left)
            taken = sum(map(TRUE_COST.seconds, chunks)) * math.exp(dice.gauss(0, NOISE))
            fit.observe(chunks, taken)
            seconds.append(taken)
            tokens += sum(chunk.num_tokens for chunk in chunks)
            while len(queue) < 200:
                queue.extend(_prompts(dice))
        if step >= num_steps // 10:
            slowest.append(max(seconds))
            means.append(fmean(seconds))
    return {
        "part": "attention",
        "limit": f"{max_tokens} tokens" if limit == "tokens" else f"{QUOTA_SECONDS} s",
        "ranks": NUM_RANKS,
        "steps": num_steps,
        "mean ms": round(1e3 * fmean(means), 1),
        "max/avg": round(fmean(m / a for m, a in zip(slowest, means, strict=True)), 4),
        "p99 max/avg": round(
            sorted(m / a for m, a in zip(slowest, means, strict=True))[len(means) * 99 // 100], 4
        ),
        "idle share": round(1 - sum(means) / sum(slowest), 4),
    }


def read(num_agents: int, num_seconds: int) -> list[dict[str, Cell]]:
    """Return how evenly the links are used by each policy, averaged over seeds."""
    plant = Plant()
    found: dict[str, list[dict[str, float]]] = {}
    for seed in SEEDS:
        agents = draw_agents(num_agents, 24, seed)
        thresholds = measured_thresholds(plant, agents)
        for name, make in choosers(plant, thresholds, seed).items():
            result = simulate(plant, agents, make, num_seconds)
            ttft = sorted(result.ttft_seconds)
            row = {
                "traffic max/avg": result.max_over_mean(),
                "deviation": result.deviation(),
                "queue max/avg": result.queue_max_over_mean,
                "link use": result.utilisation(plant.link_rate),
                "requests/s": len(ttft) / (result.last_second - result.first_second),
                "ttft s": fmean(ttft),
                "ttft p99 s": ttft[len(ttft) * 99 // 100],
            }
            found.setdefault(name, []).append(row)
    return [
        {
            "part": "links",
            "policy": name,
            "agents": num_agents,
            **{key: round(fmean(row[key] for row in rows), 3) for key in rows[0]},
        }
        for name, rows in found.items()
    ]


def plot(rows: list[dict[str, Cell]]) -> str:
    """Draw evenness, traffic and time to first token against the number of agents, as SVG."""
    panels = (
        (50, "traffic of links, max/avg", "traffic max/avg", 1.0, 3.0),
        (300, "requests per second", "requests/s", 0.0, 40.0),
        (550, "p99 of the time to first token, s", "ttft p99 s", 0.0, 18.0),
    )
    body = "".join(_panel(rows, *panel) for panel in panels)
    for number, (name, color) in enumerate(COLORS.items()):
        x = 60 + 170 * number
        body += f'<path d="M{x} 268h24" stroke="{color}" stroke-width="2"/>'
        body += f'<text x="{x + 30}" y="272">{name}</text>'
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 780 285" font-family="sans-serif" '
        f'font-size="11"><rect width="780" height="285" fill="white"/>{body}</svg>\n'
    )


def _panel(
    rows: list[dict[str, Cell]], left: int, title: str, column: str, low: float, high: float
) -> str:
    parts = [f'<text x="{left + 100}" y="20" text-anchor="middle">{title}</text>']
    for share in (0.0, 0.5, 1.0):
        y, value = 220 - 190 * share, low + (high - low) * share
        parts.append(f'<path d="M{left} {y}H{left + 200}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4}" text-anchor="end">{value:g}</text>')
    most = max(AGENTS)
    for agents in AGENTS[::2]:
        x = left + 200 * agents / most
        parts.append(f'<text x="{x:.0f}" y="236" text-anchor="middle">{agents}</text>')
    parts.append(f'<text x="{left + 100}" y="250" text-anchor="middle">agents</text>')
    for name, color in COLORS.items():
        points = [
            (
                left + 200 * float(row["agents"]) / most,
                220 - 190 * (min(high, float(row[column])) - low) / (high - low),
            )
            for row in rows
            if row["policy"] == name
        ]
        for (x, y), (next_x, next_y) in pairwise(points):
            parts.append(
                f'<path d="M{x:.0f} {y:.1f}L{next_x:.0f} {next_y:.1f}" stroke="{color}" '
                'stroke-width="2"/>'
            )
    return "".join(parts)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ticks", type=int, default=12, help="fetches of every group")
    parser.add_argument("--steps", type=int, default=300, help="of all ranks together")
    parser.add_argument("--seconds", type=int, default=60, help="simulated, of each policy")
    parser.add_argument("--plot", action="store_true", help=f"draw {PLOT.name}")
    args = parser.parse_args(argv)
    scheduler = [
        schedule("2P / 4D nodes", groups(2, 4), 64, args.ticks),
        schedule("all, cells of 64", groups(48, 96), 64, args.ticks),
        schedule("all, one cell", groups(48, 96), 768, args.ticks, NUM_AGENTS // 4),
    ]
    print_table(scheduler)
    policy = [choose(p, d, 2000) for p, d in ((1, 1), (4, 8), (48, 96))]
    print_table(policy)
    attention = [attend(limit, args.steps) for limit in ("tokens", "seconds")]
    print_table(attention)
    links = [row for agents in AGENTS for row in read(agents, args.seconds)]
    print_table(links)
    full = [demand.resource for demand in bottlenecks(PAPER_NODE, 2, 4)]
    least, most = feasible_ratios(PAPER_NODE) or (0.0, 0.0)
    print(f"P/D without a bottleneck: {least:.3g} to {most:.3g}; of 2P/4D: {full or 'none'}")
    rows = scheduler + policy + attention + links
    print(f"kept in benchmarks/results/{write_results('dualpath_scheduling', argv, rows).name}")
    if args.plot:
        PLOT.write_text(plot(links), encoding="utf-8")
    by_case = {(row["policy"], row["agents"]): row for row in links}
    is_even = all(
        float(by_case["dualpath", agents][column]) <= float(by_case["round_robin", agents][column])
        for agents in AGENTS
        for column in ("queue max/avg", "traffic max/avg")
    )
    is_fast = float(scheduler[0]["core at 2354/s"]) < 1
    is_level = float(attention[1]["max/avg"]) < float(attention[0]["max/avg"])
    print(f"targets: fast {is_fast}, level {is_level}, even {is_even}")
    return 0 if is_fast and is_level and is_even else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
