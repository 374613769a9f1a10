"""Limits of the HTTP side."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """Bounds that the HTTP side holds, refused by name when passed, and who may ask.

    ``max_open_requests`` counts requests in work in this process; each prompt of a list is one.
    ``max_choices_per_request`` bounds prompts times ``n``. A text longer than
    ``inline_tokenize_chars`` characters is tokenized in a thread, so that other streams go on.
    ``api_keys``, where there are any, are asked for on every path but /health, /ping and
    /metrics; they are never logged.
    """

    max_body_bytes: int = 32 * 1024 * 1024
    max_open_requests: int = 4096
    max_choices_per_request: int = 512
    inline_tokenize_chars: int = 4096
    body_timeout_seconds: float = 60.0
    queue_full_retry_seconds: float = 1.0
    api_keys: frozenset[str] = field(default=frozenset(), repr=False)
