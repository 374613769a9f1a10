"""The tokens that a replay drew, kept in a file and compared with those of another run."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.errors import ConfigError
from services.cli.bench_agents_report import AgentRun
from services.cli.traces.json_lines import (
    BadLineError,
    BadLines,
    as_count,
    as_list,
    as_object,
    json_lines,
)

MAX_ROUNDS = 2**20
MAX_ROUND_TOKENS = 2**24

Outputs = Mapping[int, Sequence[Sequence[int]]]
"""An agent's index to the tokens of each complete round."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token of an agent that differs; rounds and tokens count from 0."""

    agent: int
    round: int
    token: int

    def told(self) -> str:
        """Return it in words."""
        return f"agent {self.agent} differs from round {self.round + 1}, token {self.token + 1}"


def outputs_of(runs: Iterable[AgentRun]) -> Outputs:
    """Return what the complete rounds of each agent drew."""
    return {run.index: [record.token_ids for record in run.complete] for run in runs}


def outputs_text(outputs: Outputs) -> str:
    """Return a file of outputs: one agent a line."""
    lines = (json.dumps({"agent": agent, "outputs": of}) for agent, of in sorted(outputs.items()))
    return "".join(f"{line}\n" for line in lines)


def read_outputs(path: Path) -> Outputs:
    """Read a file of outputs. ConfigError, by line and field, when it is none."""
    bad, found = BadLines(), {}
    for number, value in json_lines(path, bad):
        try:
            fields = as_object(value, "the line")
            found[as_count(fields.get("agent"), "agent", 0)] = [
                _token_ids(tokens, f"outputs[{place}]")
                for place, tokens in enumerate(
                    as_list(fields.get("outputs"), "outputs", MAX_ROUNDS)
                )
            ]
        except BadLineError as error:
            bad.add(path, number, str(error))
    if bad.count:
        raise ConfigError(f"no file of outputs: {bad.told()}")
    return found


def _token_ids(value: object, field: str) -> list[int]:
    return [as_count(token, field, 0) for token in as_list(value, field, MAX_ROUND_TOKENS)]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Outputs beside those of a reference run: rounds that both have, and what differs.

    An agent's rounds behind its first difference have other prompts, and are not compared.
    """

    num_rounds: int
    differences: tuple[Difference, ...]

    @property
    def is_equal(self) -> bool:
        """Whether there was something to compare, and nothing differs."""
        return self.num_rounds > 0 and not self.differences


def compare(outputs: Outputs, reference: Outputs) -> Comparison:
    """Compare the rounds that both runs completed."""
    num_rounds = 0
    differences: list[Difference] = []
    for agent in sorted(outputs.keys() & reference.keys()):
        pairs = zip(outputs[agent], reference[agent], strict=False)
        for place, (one, other) in enumerate(pairs):
            num_rounds += 1
            if list(one) != list(other):
                differences.append(Difference(agent, place, _first_unequal(one, other)))
                break
    return Comparison(num_rounds, tuple(differences))


def _first_unequal(one: Sequence[int], other: Sequence[int]) -> int:
    shared = min(len(one), len(other))
    return next((place for place in range(shared) if one[place] != other[place]), shared)
