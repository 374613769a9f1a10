"""One streamed completion over a bare connection, with the time of everything that comes.

The client does little, so that many streams of one process are measured and not the process. It
knows what OpenAI-compatible servers send: HTTP/1.1, chunked or until the connection closes, and
server-sent events.
"""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from time import perf_counter

from common.errors import ConfigError
from services.cli.server_url import parse_server_url

MAX_LINE_BYTES = 16 * 1024 * 1024
MAX_ERROR_CHARS = 200


@dataclass(frozen=True, slots=True)
class ToldPhase:
    """One phase of a request's ``x_phases``: what a worker did for it."""

    name: str
    worker: str
    seconds: float
    num_tokens: int
    num_bytes: int


@dataclass(slots=True)
class RequestRecord:
    """What happened to one request. Times are in seconds of one monotonic clock.

    ``failure`` is None when it is complete, else the kind of its failure. ``token_at`` is when
    each event with text came, or each token where the body asked for ``return_token_ids``;
    ``token_ids`` are there only then, and ``phases`` where it asked for ``x_phases``.
    """

    index: int
    sent_at: float = 0.0
    token_at: list[float] = field(default_factory=list)
    ended_at: float = 0.0
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    num_cached_tokens: int = 0
    request_id: str = ""
    failure: str | None = None
    detail: str = ""
    token_ids: list[int] = field(default_factory=list)
    phases: tuple[ToldPhase, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A served model; ``max_model_len`` in tokens is 0 where the server does not tell it."""

    name: str
    max_model_len: int


class Target:
    """A server's address; ``api_key`` is sent with every request. ConfigError for a bad address."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        parts = parse_server_url(url, "http", "https")
        self._host = parts.host
        self._is_tls = parts.scheme == "https"
        self._port = parts.port
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._api_key = api_key

    async def model(self) -> str:
        """Return the name of the first served model. ConfigError when there is none."""
        return (await self.model_card()).name

    async def model_card(self) -> ModelCard:
        """Return the first served model. ConfigError when there is none."""
        try:
            reader, writer = await self._send("GET", "/v1/models", None)
            try:
                status, _, body = await _read_head(reader)
                raw = b"".join([part async for part in body])
            finally:
                writer.close()
        except (OSError, EOFError, ValueError) as error:
            raise ConfigError(f"the server does not answer: {error}") from error
        if status != 200:
            raise ConfigError(f"/v1/models: {status} {_error_text(raw)}")
        try:
            card = json.loads(raw)["data"][0]
            return ModelCard(str(card["id"]), int(card.get("max_model_len") or 0))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ConfigError("/v1/models names no model; choose one with --model") from error

    async def complete(
        self, index: int, path: str, body: dict[str, object], timeout_seconds: float
    ) -> RequestRecord:
        """Ask for one completion; whatever goes wrong is in the record."""
        record = RequestRecord(index, sent_at=perf_counter())
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._stream(record, path, body)
        except TimeoutError:
            record.failure, record.detail = "timeout", f"after {timeout_seconds:g} s"
        except (EOFError, ConnectionResetError) as error:
            record.failure, record.detail = "cut", str(error)
        except OSError as error:
            record.failure, record.detail = "connection", str(error)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            record.failure, record.detail = "malformed", str(error)
        record.ended_at = perf_counter()
        return record

    async def _stream(self, record: RequestRecord, path: str, body: dict[str, object]) -> None:
        reader, writer = await self._send("POST", path, json.dumps(body).encode())
        try:
            status, headers, parts = await _read_head(reader)
            record.request_id = headers.get("x-request-id", "")
            if status != 200:
                raw = b"".join([part async for part in parts])
                record.failure, record.detail = f"http_{status}", _error_text(raw)
                return
            await _read_events(record, parts)
        finally:
            writer.close()
        if record.failure is None and body.get("ignore_eos"):
            wanted = body["max_tokens"]
            if record.num_tokens != wanted:
                record.failure = "short"
                record.detail = f"{record.num_tokens} of {wanted} tokens"

    async def _send(
        self, method: str, path: str, body: bytes | None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(
            self._host,
            self._port,
            limit=MAX_LINE_BYTES,
            ssl=ssl.create_default_context() if self._is_tls else None,
        )
        lines = [
            f"{method} {self._prefix}{path} HTTP/1.1",
            f"Host: {self._host}:{self._port}",
            "Connection: close",
        ]
        if self._api_key is not None:
            lines.append(f"Authorization: Bearer {self._api_key}")
        if body is not None:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        writer.write("\r\n".join([*lines, "", ""]).encode("latin-1") + (body or b""))
        return reader, writer


async def _read_head(
    reader: asyncio.StreamReader,
) -> tuple[int, dict[str, str], AsyncIterator[bytes]]:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    status = int(lines[0].split(" ", 2)[1])
    headers: dict[str, str] = {}
    for line in filter(None, lines[1:]):
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    if headers.get("transfer-encoding", "").lower() == "chunked":
        return status, headers, _chunks(reader)
    length = headers.get("content-length")
    return status, headers, _rest(reader, int(length) if length else None)


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        yield (await reader.readexactly(size + 2))[:-2]


async def _rest(reader: asyncio.StreamReader, length: int | None) -> AsyncIterator[bytes]:
    if length is not None:
        yield await reader.readexactly(length)
        return
    while part := await reader.read(65536):
        yield part


async def _read_events(record: RequestRecord, parts: AsyncIterator[bytes]) -> None:
    """Take server-sent events until ``[DONE]``; a stream without it was cut."""
    pending = b""
    async for part in parts:
        now = perf_counter()
        *events, pending = (pending + part).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            for line in event.split(b"\n"):
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                _take_event(record, json.loads(data), now)
                if record.failure is not None:
                    return
    raise EOFError("the stream ended without [DONE]")


def _take_event(record: RequestRecord, event: dict[str, object], now: float) -> None:
    error = event.get("error")
    if error is not None:
        record.failure, record.detail = "stream_error", str(error)[:MAX_ERROR_CHARS]
        return
    usage = event.get("usage")
    if isinstance(usage, dict):
        record.num_tokens = int(usage["completion_tokens"])
        record.num_prompt_tokens = int(usage["prompt_tokens"])
        record.num_cached_tokens = int(
            (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        )
        record.phases = tuple(_phase(told) for told in usage.get("x_phases") or ())
    choices = event.get("choices")
    if not isinstance(choices, list):
        return
    token_ids = [token for choice in choices for token in choice.get("token_ids") or ()]
    if token_ids:
        record.token_ids += token_ids
        record.token_at += [now] * len(token_ids)
    elif not record.token_ids and any(_has_text(choice) for choice in choices):
        record.token_at.append(now)


def _phase(told: dict[str, object]) -> ToldPhase:
    seconds, num_tokens, num_bytes = told["seconds"], told["num_tokens"], told["num_bytes"]
    if not isinstance(seconds, int | float):
        raise TypeError("a phase's seconds are no number")
    if not isinstance(num_tokens, int) or not isinstance(num_bytes, int):
        raise TypeError("a phase's tokens or bytes are no count")
    return ToldPhase(str(told["name"]), str(told["worker"]), float(seconds), num_tokens, num_bytes)


def _has_text(choice: dict[str, object]) -> bool:
    delta = choice.get("delta")
    if isinstance(delta, dict):
        return bool(delta.get("content") or delta.get("reasoning_content"))
    return bool(choice.get("text"))


def _error_text(raw: bytes) -> str:
    try:
        return str(json.loads(raw)["error"]["message"])[:MAX_ERROR_CHARS]
    except (ValueError, LookupError, TypeError):
        return raw.decode(errors="replace")[:MAX_ERROR_CHARS]
