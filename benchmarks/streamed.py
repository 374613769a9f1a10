"""One streamed answer of a cluster, timed."""

import json
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import httpx


@dataclass(frozen=True, slots=True)
class Streamed:
    """Seconds until the first token came, all of the text, and the usage where it was asked for."""

    first_seconds: float
    text: str
    usage: dict[str, Any]  # Any: JSON


async def ask_streamed(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Streamed:
    """Ask for a stream and read all of it. httpx.HTTPStatusError where it is refused."""
    started, first, text = perf_counter(), 0.0, ""
    usage: dict[str, Any] = {}
    async with client.stream("POST", path, json={**body, "stream": True}) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                piece = choice.get("text") or choice.get("delta", {}).get("content") or ""
                if piece and not first:
                    first = perf_counter() - started
                text += piece
    return Streamed(first, text, usage)


async def model_of(client: httpx.AsyncClient) -> str:
    """Return the name of the model that is served."""
    name: str = (await client.get("/v1/models")).json()["data"][0]["id"]
    return name
