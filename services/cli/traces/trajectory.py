"""The rounds of an agent, and what a set of agents looks like in numbers.

An agent's prompt of a round is everything before it, appended and generated, and what it appends
now: ``A1 G1 A2 G2 … Ai`` (DualPath 2.10). Contents do not matter, only which parts are equal, so a
part is the seed of a random text: equal seeds are equal tokens, for example of a system prompt that
several agents share.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

FIRST_TOKEN_ID = 100
"""Smaller ids are often special tokens."""
MARK_TOKENS = 64
"""Tokens that make a copy of a trajectory another one; a block's, so that no block is shared."""


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens that an agent appends; a longer part of the same seed starts with the same tokens."""

    seed: str
    num_tokens: int

    def token_ids(self, vocab_size: int) -> list[int]:
        """Return the tokens, from ``FIRST_TOKEN_ID`` up to below ``vocab_size``."""
        source = random.Random(self.seed)  # noqa: S311 - a workload, no secret
        return source.choices(range(FIRST_TOKEN_ID, vocab_size), k=self.num_tokens)


@dataclass(frozen=True, slots=True)
class Round:
    """One request of an agent: what is appended to the context, and how much is generated."""

    parts: tuple[Part, ...]
    num_generated_tokens: int

    @property
    def num_appended_tokens(self) -> int:
        """Tokens of all parts."""
        return sum(part.num_tokens for part in self.parts)

    @property
    def num_tokens(self) -> int:
        """What the round adds to the context."""
        return self.num_appended_tokens + self.num_generated_tokens


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The rounds of one agent, in order; at least one. ``name`` says where it comes from."""

    name: str
    rounds: tuple[Round, ...]

    @property
    def num_tokens(self) -> int:
        """The context after the last round."""
        return sum(turn.num_tokens for turn in self.rounds)

    def context_tokens(self) -> list[int]:
        """Return the context before each round, in tokens: 0 for the first."""
        found, context = [], 0
        for turn in self.rounds:
            found.append(context)
            context += turn.num_tokens
        return found


@dataclass(frozen=True, slots=True)
class Statistics:
    """Means over agents, as DualPath's table has them; every figure but ``num_agents`` a mean.

    ``turns`` and ``total`` (tokens at the end) are the agent's own; ``append``, ``gen`` and
    ``context`` (before each round) are means over the agent's rounds first.
    """

    num_agents: int
    turns: float
    append: float
    gen: float
    total: float
    context: float


def statistics_of(agents: Sequence[Trajectory]) -> Statistics:
    """Return what these agents look like; at least one."""
    count = len(agents)
    turns = [len(agent.rounds) for agent in agents]
    appended = [sum(turn.num_appended_tokens for turn in agent.rounds) for agent in agents]
    generated = [sum(turn.num_generated_tokens for turn in agent.rounds) for agent in agents]
    contexts = [sum(agent.context_tokens()) for agent in agents]

    def mean_of_means(sums: list[int]) -> float:
        return sum(of / num for of, num in zip(sums, turns, strict=True)) / count

    return Statistics(
        num_agents=count,
        turns=sum(turns) / count,
        append=mean_of_means(appended),
        gen=mean_of_means(generated),
        total=(sum(appended) + sum(generated)) / count,
        context=mean_of_means(contexts),
    )


def scaled(agent: Trajectory, factor: float) -> Trajectory:
    """Multiply every length, rounded up to whole tokens; equal parts stay equal."""
    return replace(
        agent,
        rounds=tuple(
            Round(
                tuple(replace(part, num_tokens=_times(part.num_tokens, factor)) for part in parts),
                _times(num_generated, factor),
            )
            for parts, num_generated in ((t.parts, t.num_generated_tokens) for t in agent.rounds)
        ),
    )


def _times(num_tokens: int, factor: float) -> int:
    return ceil(num_tokens * factor - 1e-9)


def cut(agent: Trajectory, max_tokens: int, max_rounds: int | None = None) -> Trajectory | None:
    """End an agent before the first round that passes ``max_tokens``; None when none is left."""
    kept: list[Round] = []
    num_tokens = 0
    for turn in agent.rounds[:max_rounds]:
        num_tokens += turn.num_tokens
        if num_tokens > max_tokens:
            break
        kept.append(turn)
    return replace(agent, rounds=tuple(kept)) if kept else None


def extended(agents: Sequence[Trajectory], count: int) -> list[Trajectory]:
    """Return ``count`` agents: the first of them, or copies too where there are fewer.

    A copy begins with a round of its own, some random tokens and one generated, so that it shares
    no prefix with its original (2.10).
    """
    found = list(agents[:count])
    while len(found) < count:
        number, original = divmod(len(found), len(agents))
        source = agents[original]
        name = f"{source.name} copy {number}"
        mark = Round((Part(name, MARK_TOKENS),), 1)
        found.append(Trajectory(name, (mark, *source.rounds)))
    return found
