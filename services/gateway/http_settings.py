"""Limits of the HTTP side."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """Bounds that the HTTP side holds, refused by name when passed.

    ``max_open_requests`` counts completions in flight in this process. A text longer than
    ``inline_tokenize_chars`` characters is tokenized in a thread, so that other streams go on.
    """

    max_body_bytes: int = 32 * 1024 * 1024
    max_open_requests: int = 4096
    inline_tokenize_chars: int = 4096
    body_timeout_seconds: float = 60.0
    queue_full_retry_seconds: float = 1.0
