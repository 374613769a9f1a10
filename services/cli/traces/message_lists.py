"""Traces of agents as lists of chat messages, one agent a line.

    {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}, …]}

The line may also be the list itself, or have it as ``trajectory``. ``content`` is a text, null or a
list of parts, of which those with a ``text`` count; an assistant's ``tool_calls`` count with name
and arguments. Each run of messages before an assistant's is what the agent appends, the assistant's
what is generated.

No tokenizer is at hand here and contents do not matter to a replay, so a text is as many random
tokens as its characters make at ``chars_per_token``; equal texts are equal tokens.
"""

import hashlib
from math import ceil
from pathlib import Path

from services.cli.traces.json_lines import (
    BadLineError,
    BadLines,
    as_list,
    as_object,
    json_lines,
)
from services.cli.traces.trajectory import Part, Round, Trajectory

MAX_MESSAGES = 100_000
MAX_PARTS = 10_000
CHARS_PER_TOKEN = 4.0
_LISTS = ("messages", "trajectory")


def read_message_lists(
    path: Path, bad: BadLines, max_agents: int, chars_per_token: float = CHARS_PER_TOKEN
) -> list[Trajectory]:
    """Return the agents of the first ``max_agents`` good lines.

    Bad lines are noted in ``bad``. ConfigError when the file cannot be read.
    """
    agents: list[Trajectory] = []
    for number, value in json_lines(path, bad):
        try:
            rounds = _rounds(value, chars_per_token)
        except BadLineError as error:
            bad.add(path, number, str(error))
            continue
        agents.append(Trajectory(f"{path.stem}:{number}", rounds))
        if len(agents) == max_agents:
            break
    return agents


def _rounds(value: object, chars_per_token: float) -> tuple[Round, ...]:
    if isinstance(value, dict):
        named = next((name for name in _LISTS if name in value), None)
        if named is None:
            raise BadLineError(f"the line has no {' or '.join(_LISTS)}")
        messages = as_list(value[named], named, MAX_MESSAGES)
    else:
        named, messages = "the line", as_list(value, "the line", MAX_MESSAGES)
    rounds: list[Round] = []
    appended: list[Part] = []
    for place, item in enumerate(messages):
        field = f"{named}[{place}]"
        message = as_object(item, field)
        role = message.get("role")
        if not isinstance(role, str):
            raise BadLineError(f"{field}.role is no text")
        text = _text(message, field)
        num_tokens = max(1, ceil(len(text) / chars_per_token))
        if role != "assistant":
            digest = hashlib.sha256(f"{role}\n{text}".encode("utf-8", "surrogatepass"))
            appended.append(Part(digest.hexdigest(), num_tokens))
        elif appended:
            rounds.append(Round(tuple(appended), num_tokens))
            appended = []
        elif rounds:  # two in a row: it went on
            longer = rounds[-1].num_generated_tokens + num_tokens
            rounds[-1] = Round(rounds[-1].parts, longer)
        else:
            raise BadLineError(f"{field} is an assistant's, with nothing before it")
    if not rounds:
        raise BadLineError(f"{named} has no assistant's message")
    return tuple(rounds)


def _text(message: dict[str, object], field: str) -> str:
    content = message.get("content")
    if content is None:
        texts = []
    elif isinstance(content, str):
        texts = [content]
    else:
        texts = [
            _text_of(as_object(part, f"{field}.content[{place}]"), f"{field}.content[{place}]")
            for place, part in enumerate(as_list(content, f"{field}.content", MAX_PARTS))
        ]
    calls = message.get("tool_calls")
    if calls is not None:
        for place, call in enumerate(as_list(calls, f"{field}.tool_calls", MAX_PARTS)):
            where = f"{field}.tool_calls[{place}]"
            function = as_object(as_object(call, where).get("function"), f"{where}.function")
            texts += [str(function.get("name", "")), str(function.get("arguments", ""))]
    return "".join(texts)


def _text_of(part: dict[str, object], field: str) -> str:
    text = part.get("text", "")
    if not isinstance(text, str):
        raise BadLineError(f"{field}.text is no text")
    return text
