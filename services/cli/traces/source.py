"""Where the agents of a run come from, and how they are fitted to a model's context."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from common.errors import ConfigError
from services.cli.traces.generator import SHAPES, ShapeName, generate
from services.cli.traces.json_lines import BadLines
from services.cli.traces.message_lists import CHARS_PER_TOKEN, read_message_lists
from services.cli.traces.mooncake import read_mooncake
from services.cli.traces.trajectory import Trajectory, cut, extended, scaled

MAX_REQUESTS_AN_AGENT = 256
"""Lines of a request trace that are read for each agent that is wanted."""


class TraceFormat(StrEnum):
    """Formats of traces that are read."""

    MOONCAKE = "mooncake"
    MESSAGES = "messages"


@dataclass(frozen=True, slots=True)
class AgentSource:
    """Which agents a run has.

    With ``trace`` those of the file, lengths times ``scale``; else made ones of ``shape`` for
    ``turns`` (0: the shape's). ``context`` in tokens bounds every agent; 0 is the model's.
    ``max_rounds`` 0 cuts none.
    """

    num_agents: int
    seed: int = 0
    context: int = 0
    max_rounds: int = 0
    shape: ShapeName = ShapeName.K32
    turns: float = 0.0
    trace: Path | None = None
    trace_format: TraceFormat = TraceFormat.MOONCAKE
    scale: float = 1.0
    chars_per_token: float = CHARS_PER_TOKEN


@dataclass(frozen=True, slots=True)
class Agents:
    """The agents of a run; ``num_too_long`` of the trace had no round within the context."""

    trajectories: tuple[Trajectory, ...]
    bad_lines: BadLines
    num_too_long: int


def agents_of(source: AgentSource, max_model_len: int) -> Agents:
    """Return ``source.num_agents`` agents; ``max_model_len`` 0 is unknown.

    A trace of fewer is filled up with copies. ConfigError where there are none, and for a shape
    that does not fit into the context.
    """
    context = source.context or max_model_len
    if max_model_len and context > max_model_len:
        raise ConfigError(f"a context of {context} tokens: the model has {max_model_len}")
    if source.trace is None:
        whole = SHAPES[source.shape]
        shape = whole.scaled_to(min(context or whole.max_len, whole.max_len), source.turns or None)
        made = generate(shape, source.num_agents, source.seed)
        return Agents(_fitted(made, shape.max_len, source.max_rounds), BadLines(), 0)
    bad = BadLines()
    if source.trace_format is TraceFormat.MOONCAKE:
        found = read_mooncake(source.trace, bad, MAX_REQUESTS_AN_AGENT * source.num_agents)
    else:
        found = read_message_lists(source.trace, bad, source.num_agents, source.chars_per_token)
    found = [scaled(agent, source.scale) for agent in found]
    fitted = _fitted(found, context, source.max_rounds)
    if not fitted:
        why = bad.told() or f"no first round of {len(found)} agents fits into {context} tokens"
        raise ConfigError(f"{source.trace} has no agent that can be replayed\n{why}")
    copied = extended(fitted, source.num_agents)
    return Agents(_fitted(copied, context, source.max_rounds), bad, len(found) - len(fitted))


def _fitted(agents: list[Trajectory], context: int, max_rounds: int) -> tuple[Trajectory, ...]:
    bound = context or sum(agent.num_tokens for agent in agents)
    cuts = (cut(agent, bound, max_rounds or None) for agent in agents)
    return tuple(agent for agent in cuts if agent is not None)
