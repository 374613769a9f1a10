"""Answers of the completion routes as values, the same whether they were streamed or not."""

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

Json = dict[str, Any]  # Any: a JSON document
TopLogprobs = dict[str, float]


@dataclass(frozen=True, slots=True)
class ChoiceAnswer:
    """One choice. The lists have one item per token, where they were asked for."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top_logprobs: tuple[TopLogprobs, ...]
    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class Usage:
    """The tokens that an answer counts."""

    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer; ``usage`` is None for a stream that was not asked for it."""

    request_id: str
    choices: tuple[ChoiceAnswer, ...]
    usage: Usage | None


@dataclass(slots=True)
class _Growing:
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, entry: Json) -> None:
        """Append one entry of ``choices``, of a whole answer or of a chunk, of either route."""
        if self.finish_reason is not None:
            raise ValueError(f"choice {entry['index']} went on after its finish reason")
        message = entry.get("message") or entry.get("delta") or {}
        self.texts.append(entry.get("text") or message.get("content") or "")
        self.token_ids += entry.get("token_ids", ())
        self.finish_reason = entry["finish_reason"]
        logprobs = entry["logprobs"]
        if logprobs is None:
            return
        if "content" in logprobs:
            for token in logprobs["content"]:
                self.logprobs.append(token["logprob"])
                self.top_logprobs.append(
                    {top["token"]: top["logprob"] for top in token["top_logprobs"]}
                )
        else:
            self.logprobs += logprobs["token_logprobs"]
            self.top_logprobs += logprobs["top_logprobs"]

    def finished(self) -> ChoiceAnswer:
        return ChoiceAnswer(
            "".join(self.texts),
            tuple(self.token_ids),
            tuple(self.logprobs),
            tuple(self.top_logprobs),
            self.finish_reason,
        )


def read_whole(answer: Json, request_id: str) -> Answer:
    """Read an answer that was not streamed."""
    return _read([answer], request_id)


def gather_stream(events: Sequence[Json], request_id: str) -> Answer:
    """Join a stream's events. Raises ValueError with the error that the stream ended with."""
    failed = [event["error"] for event in events if "error" in event]
    if failed:
        raise ValueError(f"the stream failed: {failed}")
    return _read(events, request_id)


async def events_of(response: httpx.Response) -> AsyncIterator[Json]:
    """Yield the events of a stream. Raises ValueError when it ends without ``[DONE]`` or error."""
    has_error = False
    async for line in response.aiter_lines():
        if not line:
            continue
        data = line.removeprefix("data: ")
        if data == line:
            raise ValueError(f"not an event: {line!r}")
        if data == "[DONE]":
            return
        event = json.loads(data)
        has_error |= "error" in event
        yield event
    if not has_error:
        raise ValueError("the stream ended without [DONE]")


def _read(parts: Sequence[Json], request_id: str) -> Answer:
    growing: dict[int, _Growing] = {}
    usage = None
    for part in parts:
        for entry in part["choices"]:
            growing.setdefault(entry["index"], _Growing()).add(entry)
        if part.get("usage"):
            counted = part["usage"]
            usage = Usage(
                counted["prompt_tokens"],
                counted["completion_tokens"],
                counted["prompt_tokens_details"]["cached_tokens"],
            )
    if sorted(growing) != list(range(len(growing))):
        raise ValueError(f"choices are missing: {sorted(growing)}")
    return Answer(request_id, tuple(growing[i].finished() for i in range(len(growing))), usage)
