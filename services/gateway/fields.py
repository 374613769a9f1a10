"""Fields that are OpenAI's and not ours: each is refused by name, or harmless and said why.

A field that would change the answer is refused, for an answer that silently ignores what was
asked is wrong. Its neutral values (what a client library sends for "off") pass.
"""

from collections.abc import Mapping

from common.errors import ErrorCode, RequestError

_NEVER: tuple[object, ...] = (None,)
_OFF: tuple[object, ...] = (None, False)
_EMPTY: tuple[object, ...] = (None, [])

HARMLESS = frozenset(
    {
        "metadata",  # labels for OpenAI's own dashboard
        "parallel_tool_calls",  # says nothing while tools are refused
        "prompt_cache_key",  # a hint: the prefix cache finds its blocks by their tokens
        "prompt_cache_retention",  # a hint, as above
        "safety_identifier",  # like user
    }
)

NEUTRAL_VALUES: Mapping[str, tuple[object, ...]] = {
    "audio": _NEVER,
    "function_call": (None, "none"),
    "functions": _EMPTY,
    "modalities": (None, ["text"]),
    "moderation": _NEVER,
    "prediction": _NEVER,
    "reasoning_effort": (None, "none"),
    "response_format": (None, {"type": "text"}),
    "service_tier": (None, "auto", "default"),
    "store": _OFF,
    "tool_choice": (None, "none", "auto"),
    "tools": _EMPTY,
    "verbosity": (None, "medium"),
    "web_search_options": _NEVER,
    "best_of": (None, 1),
    "echo": _OFF,
    "suffix": (None, ""),
}


def check_extra_fields(extra: Mapping[str, object]) -> None:
    """Raise ``RequestError`` naming the first field that cannot be honoured."""
    for name, value in extra.items():
        if name in HARMLESS:
            continue
        if name not in NEUTRAL_VALUES:
            raise RequestError(
                ErrorCode.BAD_REQUEST, f"unknown field: {_shown(name)}", param=_shown(name)
            )
        if not any(_is_same(value, neutral) for neutral in NEUTRAL_VALUES[name]):
            raise RequestError(ErrorCode.BAD_REQUEST, f"{name} is not supported", param=name)


def _is_same(value: object, neutral: object) -> bool:
    """Compare with types: in Python ``0 == False`` and ``1 == True``."""
    return type(value) is type(neutral) and value == neutral


def _shown(name: str) -> str:
    return name if len(name) <= 64 else f"{name[:64]}…"
