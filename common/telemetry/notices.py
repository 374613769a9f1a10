"""What a program tells the terminal that it was started in: whether it belongs to its cluster.

The log has each of these events in full, as often as it happens.
"""

import sys

from structlog.typing import EventDict, WrappedLogger

NOTICE = "notice: "
"""What such a line on standard error begins with."""

MAX_KEPT = 256

_TEXTS = {
    "joinable": "join       --controller '{controller}' on other hosts",
    "registered": "registered with the controller",
    "waiting_for_controller": "waiting for the controller at {endpoint}",
    "handshake_refused": "{endpoint} refuses to connect: {reason} (our_key {our_key}, its_key "
    "{its_key})",
    "key_rejected": "key {key} is turned away: {reason}",
    "hello_refused": "{reason} (trying for {retry_seconds:g} s)",
    "pairing_failed": "cannot pair with {peer}: {reason}",
    "fenced": "{reason}; registering anew",
    "controller_silent": "nothing heard from the controller for {silent_seconds:g} s",
    "controller_back": "heard from the controller again, after {silent_seconds:g} s",
}
_BEGINS_ANEW = ("registered", "controller_back")
"""After these, what was told may be told again."""


class Notices:
    """A processor of structlog that writes each notice once; events go on unchanged."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def __call__(self, _logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        """Tell an event where it is one of ours and new; return it."""
        text = _TEXTS.get(str(event.get("event")))
        facts = {key: value for key, value in event.items() if value is not None}
        try:
            line = None if text is None else text.format_map(facts)
        except KeyError:  # another conversation's event of the same name
            line = None
        if event.get("event") in _BEGINS_ANEW:
            self._told.clear()
        if line is not None and line not in self._told and len(self._told) < MAX_KEPT:
            self._told.add(line)
            sys.stderr.write(f"{NOTICE}{line}\n")
            sys.stderr.flush()
        return event
