"""Writes a generation to its connection: as one JSON object, or as server-sent events.

A stream's status and headers leave with its first delta, so that whatever goes wrong before it
has a status of its own. A failure after that is one ``data: {"error": ...}`` event, and the
stream ends without ``[DONE]``.
"""

from functools import partial

from common.errors import RequestError
from services.gateway.choice import ChoicePiece
from services.gateway.connection import Connection, encode_json
from services.gateway.generation import Generation
from services.gateway.http_errors import request_error_body
from services.gateway.logprobs import Json
from services.gateway.metrics import GatewayMetrics
from services.gateway.plan import CompletionPlan
from services.gateway.shapes import ChoiceRecord, Shape

_SSE_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


class WholeAnswer:
    """One JSON object at the end."""

    def __init__(self, plan: CompletionPlan, shape: Shape, head: Json) -> None:
        self._shape = shape
        self._head = head
        self._records = [ChoiceRecord() for _ in range(plan.num_choices)]

    async def write(self, connection: Connection, generation: Generation) -> None:
        """Collect every choice, then write; raises ``RequestError`` before anything is written."""
        await generation.run(self._take)
        answer = {
            **self._head,
            "object": self._shape.whole_object,
            "choices": [self._shape.whole(*entry) for entry in enumerate(self._records)],
            "usage": generation.usage(),
            **self._shape.first_fields,
        }
        await connection.answer(answer)

    async def _take(self, choice: int, piece: ChoicePiece) -> None:
        self._records[choice].add(piece)


class StreamedAnswer:
    """One event per delta, each written to the socket at once."""

    def __init__(
        self, plan: CompletionPlan, shape: Shape, head: Json, metrics: GatewayMetrics
    ) -> None:
        self._plan = plan
        self._shape = shape
        self._head: Json = {**head, "object": shape.chunk_object}
        # What every chunk but the first begins and ends with, encoded once.
        self._chunk_start = b"data: " + encode_json(self._head)[:-1] + b',"choices":['
        self._chunk_end = b'],"usage":null}\n\n' if plan.has_usage_chunk else b"]}\n\n"
        self._metrics = metrics
        self._opened: set[int] = set()
        self._has_told_token = False
        self._first_fields = dict(shape.first_fields)

    async def write(self, connection: Connection, generation: Generation) -> RequestError | None:
        """Write all events; returns the error that ended a stream already begun.

        Raises ``RequestError`` before anything is written.
        """
        try:
            await generation.run(partial(self._write_piece, connection))
        except RequestError as error:
            if not connection.is_started:
                raise
            await connection.finish(b"data: " + request_error_body(error) + b"\n\n")
            return error
        tail = b""
        if self._plan.has_usage_chunk:
            tail = self._event({"choices": [], "usage": generation.usage()})
        await connection.finish(tail + b"data: [DONE]\n\n")
        return None

    async def _write_piece(self, connection: Connection, choice: int, piece: ChoicePiece) -> None:
        events = self._events(choice, piece)
        has_news = self._has_news(piece)
        if not connection.is_started:
            await connection.start(200, _SSE_HEADERS)
        if events:
            await connection.write(events)
        if has_news and not self._has_told_token:
            self._has_told_token = True
            self._metrics.first_token_seconds.observe(connection.age_seconds())

    def _events(self, choice: int, piece: ChoicePiece) -> bytes:
        """Encode one piece, with the chunk that opens its choice before the first."""
        is_first = choice not in self._opened
        self._opened.add(choice)
        events = b""
        opening = self._shape.opening(choice) if is_first else None
        if opening is not None:
            events = self._chunk(opening)
        if self._has_news(piece):
            events += self._chunk(self._shape.chunk(choice, piece, is_first=is_first))
        return events

    def _has_news(self, piece: ChoicePiece) -> bool:
        """Not while its text is held back and nothing else is asked for."""
        if piece.text or piece.finish_reason is not None:
            return True
        return bool(piece.tokens) and self._plan.shows_tokens

    def _chunk(self, entry: Json) -> bytes:
        if not self._first_fields:
            return self._chunk_start + encode_json(entry) + self._chunk_end
        chunk: Json = {"choices": [entry]}
        if self._plan.has_usage_chunk:
            chunk["usage"] = None
        chunk.update(self._first_fields)
        self._first_fields.clear()
        return self._event(chunk)

    def _event(self, fields: Json) -> bytes:
        return b"data: " + encode_json({**self._head, **fields}) + b"\n\n"
