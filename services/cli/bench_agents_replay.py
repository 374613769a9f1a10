"""Replays agents against an OpenAI-compatible server: each its rounds back-to-back."""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

from services.cli.bench_agents_report import AgentRun, StopRule, StopWatch, Verdict
from services.cli.bench_serve_client import RequestRecord, Target
from services.cli.bench_serve_report import ttft_ms
from services.cli.traces.trajectory import Trajectory

PATH = "/v1/completions"

OnRound = Callable[[RequestRecord], None]
"""Takes each record as its request ends."""


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """How rounds are asked for. ``has_phases`` asks a FlowPath server where their time went."""

    model: str
    vocab_size: int
    timeout_seconds: float
    seed: int = 0
    has_phases: bool = False


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Agents that come at random, ``rate`` a second; after ``seconds`` none comes any more."""

    rate: float
    seconds: float
    seed: int
    rule: StopRule | None = None


class Replayer:
    """Sends the rounds of agents; what a server drew is part of the next round's prompt."""

    def __init__(self, target: Target, options: ReplayOptions, on_round: OnRound) -> None:
        self._target = target
        self._options = options
        self._on_round = on_round
        self._is_stopping = False

    async def replay_together(self, agents: Sequence[Trajectory]) -> list[AgentRun]:
        """Start all agents at once and return when all have ended."""
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(self._replay(index, agent)) for index, agent in enumerate(agents)
            ]
        return [task.result() for task in running]

    async def replay_arriving(
        self, agents: Sequence[Trajectory], arrivals: Arrivals
    ) -> tuple[list[AgentRun], Verdict | None]:
        """Start the agents one by one, and say whether the rule ended the run.

        Then no agent starts any more, and each ends behind its current round.
        """
        source = random.Random(f"{arrivals.seed} arrivals")  # noqa: S311 - a workload, no secret
        started, start = perf_counter(), 0.0
        ended = asyncio.get_running_loop().create_future()
        watch = StopWatch(arrivals.rule, started) if arrivals.rule else None

        def judge(record: RequestRecord) -> None:
            ttft = ttft_ms(record)
            if watch is None or ttft is None or ended.done():
                return
            if (verdict := watch.take(record.ended_at, ttft / 1e3)) is not None:
                self._is_stopping = True
                ended.set_result(verdict)

        running: list[asyncio.Task[AgentRun]] = []
        async with asyncio.TaskGroup() as tasks:
            for index, agent in enumerate(agents):
                start += source.expovariate(arrivals.rate)
                if start > arrivals.seconds:
                    break
                await asyncio.wait([ended], timeout=max(0.0, started + start - perf_counter()))
                if ended.done():
                    break
                running.append(tasks.create_task(self._replay(index, agent, judge)))
        verdict = ended.result() if ended.done() else None
        return [task.result() for task in running], verdict

    async def _replay(
        self, index: int, agent: Trajectory, judge: OnRound | None = None
    ) -> AgentRun:
        run = AgentRun(index, agent.name, len(agent.rounds), perf_counter())
        context: list[int] = []
        for place, turn in enumerate(agent.rounds):
            if self._is_stopping:
                run.is_stopped = True
                break
            for part in turn.parts:
                context += part.token_ids(self._options.vocab_size)
            body = self._body(context, turn.num_generated_tokens)
            record = await self._target.complete(place, PATH, body, self._options.timeout_seconds)
            if record.failure is None and len(record.token_ids) != turn.num_generated_tokens:
                record.failure = "no_token_ids"
                record.detail = (
                    f"the server told {len(record.token_ids)} of {turn.num_generated_tokens} "
                    "tokens, which the next prompt needs"
                )
            run.records.append(record)
            self._on_round(record)
            if judge is not None:
                judge(record)
            if record.failure is not None:
                break
            context += record.token_ids
        run.ended_at = perf_counter()
        return run

    def _body(self, prompt: list[int], num_generated_tokens: int) -> dict[str, object]:
        body: dict[str, object] = {
            "model": self._options.model,
            "prompt": prompt,
            "max_tokens": num_generated_tokens,
            "ignore_eos": True,
            "temperature": 0.0,
            "seed": self._options.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        if self._options.has_phases:
            body["x_phases"] = True
        return body
