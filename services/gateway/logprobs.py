"""Log probabilities in OpenAI's two shapes: chat's and the older one of /v1/completions."""

from collections.abc import Sequence

from common.sampling import SampledToken
from services.gateway.detokenizer import TokenBytes

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say (OpenAI's own convention)."""

Json = dict[str, object]


def token_text(token_bytes: TokenBytes, token_id: int) -> str:
    r"""Return a token's text, or ``bytes:\xe2\x80`` where it is no whole UTF-8 text."""
    raw = token_bytes.of(token_id)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprobs(token_bytes: TokenBytes, tokens: Sequence[SampledToken]) -> Json:
    """Return ``choices[].logprobs`` of the chat route: one entry per token."""
    content = []
    for token in tokens:
        entry = _chat_entry(token_bytes, token.token_id, token.logprob)
        entry["top_logprobs"] = [
            _chat_entry(token_bytes, token_id, logprob) for token_id, logprob in token.top_logprobs
        ]
        content.append(entry)
    return {"content": content, "refusal": None}


def text_logprobs(
    token_bytes: TokenBytes, tokens: Sequence[SampledToken], text_offsets: Sequence[int]
) -> Json:
    """Return ``choices[].logprobs`` of the completions route: four lists, one item per token.

    The drawn token is always among its own ``top_logprobs``, which may so have one item more
    than was asked for.
    """
    top: list[dict[str, float]] = []
    for token in tokens:
        found: dict[str, float] = {}
        for token_id, logprob in (*token.top_logprobs, (token.token_id, token.logprob)):
            found.setdefault(token_text(token_bytes, token_id), _finite(logprob))
        top.append(found)
    return {
        "text_offset": list(text_offsets),
        "token_logprobs": [_finite(token.logprob) for token in tokens],
        "tokens": [token_text(token_bytes, token.token_id) for token in tokens],
        "top_logprobs": top,
    }


def _chat_entry(token_bytes: TokenBytes, token_id: int, logprob: float | None) -> Json:
    return {
        "token": token_text(token_bytes, token_id),
        "logprob": _finite(logprob),
        "bytes": list(token_bytes.of(token_id)),
    }


def _finite(logprob: float | None) -> float:
    return LOWEST_LOGPROB if logprob is None else max(logprob, LOWEST_LOGPROB)
