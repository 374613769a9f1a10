"""``flowpath chat``: a conversation in the terminal, over the gateway's OpenAI-compatible API."""

import http.client
import json
import sys
from collections.abc import Iterator
from typing import Protocol, TextIO

from common.errors import ConfigError
from services.cli.server_url import parse_server_url

DEADLINE_SECONDS = 300.0
MAX_TOKENS = 512
"""Longest answer where none is asked for: a small model may never end by itself."""
EXIT_WORDS = ("/exit", "/quit")


class ChatServer(Protocol):
    """Answers a conversation piece by piece."""

    def answer(self, messages: list[dict[str, str]]) -> Iterator[str]:
        """Yield the texts of one answer; ConfigError tells why there is none."""
        ...


class HttpChatServer:
    """The gateway at ``url``, such as http://127.0.0.1:8000; the model is asked for once.

    Without ``max_tokens`` an answer has 512 tokens at most, and what the context leaves.
    """

    def __init__(
        self,
        url: str,
        max_tokens: int | None,
        temperature: float | None,
        api_key: str | None = None,
    ) -> None:
        parts = parse_server_url(url, "http")
        self._host = parts.host
        self._port = parts.port
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._options: dict[str, object] = {}
        self._max_tokens = max_tokens
        if temperature is not None:
            self._options["temperature"] = temperature
        self.model = self._ask_model()

    def answer(self, messages: list[dict[str, str]]) -> Iterator[str]:
        """Stream one answer; closing the iterator closes the connection, which cancels."""
        body = {"model": self.model, "messages": messages, "stream": True, **self._options}
        limited = {**body, "max_tokens": self._max_tokens or MAX_TOKENS}
        try:
            yield from self._answer(limited)
        except _LongerThanContextError as error:
            if self._max_tokens is not None:
                raise ConfigError(str(error)) from None
            yield from self._answer(body)

    def _answer(self, body: dict[str, object]) -> Iterator[str]:
        connection = self._connect()
        try:
            connection.request(
                "POST",
                "/v1/chat/completions",
                json.dumps(body),
                {"Content-Type": "application/json", **self._headers},
            )
            response = connection.getresponse()
            if response.status != 200:
                data = response.read()
                is_too_long = _error_param(data) == "max_tokens" and "max_tokens" in body
                error = _LongerThanContextError if is_too_long else ConfigError
                raise error(_error_text(response.status, data))
            yield from _texts(response)
        except (OSError, http.client.HTTPException) as error:
            raise ConfigError(f"the gateway did not answer: {error}") from error
        finally:
            connection.close()

    def _ask_model(self) -> str:
        connection = self._connect()
        try:
            connection.request("GET", "/v1/models", headers=self._headers)
            response = connection.getresponse()
            data = response.read()
            if response.status != 200:
                raise ConfigError(_error_text(response.status, data))
            return str(json.loads(data)["data"][0]["id"])
        except (OSError, http.client.HTTPException) as error:
            raise ConfigError(
                f"no gateway answers at http://{self._host}:{self._port} ({error}); start one with "
                "`flowpath serve`, or name its port with --port"
            ) from error
        except (ValueError, LookupError, TypeError) as error:
            raise ConfigError(f"http://{self._host}:{self._port} is no FlowPath gateway") from error
        finally:
            connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self._host, self._port, timeout=DEADLINE_SECONDS)


def chat(server: ChatServer, source: TextIO, sink: TextIO, system: str | None = None) -> None:
    """Hold a conversation until ``/exit`` or the input's end; Ctrl-C stops one answer.

    An answer that fails is told, and its question is taken back.
    """
    messages = [{"role": "system", "content": system}] if system else []
    while (question := _ask(source, sink)) is not None:
        if not question:
            continue
        messages.append({"role": "user", "content": question})
        texts: list[str] = []
        answer = server.answer(messages)
        try:
            for text in answer:
                texts.append(text)
                sink.write(text)
                sink.flush()
        except KeyboardInterrupt:
            sink.write(" [stopped]")
        except ConfigError as error:
            sink.write(f"[error] {error}")
        finally:
            _close(answer)
        sink.write("\n")
        if texts:
            messages.append({"role": "assistant", "content": "".join(texts)})
        else:
            messages.pop()


def _close(answer: Iterator[str]) -> None:
    close = getattr(answer, "close", None)
    if close is not None:
        close()


def _ask(source: TextIO, sink: TextIO) -> str | None:
    sink.write("> ")
    sink.flush()
    try:
        line = source.readline()
    except KeyboardInterrupt:
        line = ""
    if not line or line.strip() in EXIT_WORDS:
        sink.write("\n" if not line else "")
        return None
    return line.strip()


def _texts(response: http.client.HTTPResponse) -> Iterator[str]:
    """Yield the texts of a stream of server-sent events."""
    for raw in response:
        line = raw.decode(errors="replace").strip()
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise ConfigError(str(event["error"].get("message", event["error"])))
        for choice in event.get("choices", ()):
            text = choice.get("delta", {}).get("content")
            if text:
                yield text


class _LongerThanContextError(ConfigError):
    """The context leaves less than ``max_tokens``."""


def _error_param(data: bytes) -> object:
    try:
        return json.loads(data)["error"]["param"]
    except (ValueError, LookupError, TypeError):
        return None


def _error_text(status: int, data: bytes) -> str:
    try:
        told = json.loads(data)["error"]["message"]
    except (ValueError, LookupError, TypeError):
        told = data.decode(errors="replace")[:500]
    return f"{told} (HTTP {status})"


def main(
    url: str,
    max_tokens: int | None,
    temperature: float | None,
    system: str | None,
    api_key: str | None,
) -> None:
    """Chat on the terminal."""
    server = HttpChatServer(url, max_tokens, temperature, api_key)
    sys.stdout.write(f"{server.model} at {url}; /exit ends, Ctrl-C stops an answer\n")
    chat(server, sys.stdin, sys.stdout, system)
