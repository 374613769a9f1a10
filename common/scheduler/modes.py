"""Which half of the scheduler leads, and how a step's tokens are shared. Pure.

Theory of operation. The controller's directive counts while it lasts. Else the worker's own
triggers decide (FlowKV's knobs; papers: 1.6.2): many waiting prompts let prefill lead, a long time
between two tokens lets decode lead, and a load under 60 % is balanced. What they say of one moment
is a ``Signal``; a table says where each signal leads from each mode. A mode is left when its cause
is below three quarters of its threshold, or below the threshold while there is little load. It
lasts some steps at least.
"""

from dataclasses import dataclass
from enum import StrEnum

from common.messages.fields import Mode


@dataclass(frozen=True, slots=True)
class Triggers:
    """What makes a worker change its mode by itself.

    ``prefill_threshold`` counts waiting prompts. ``decode_sla_seconds`` is a time between two
    tokens. ``balanced_load`` is a share of the KV pool. ``release_share`` is of both thresholds.
    """

    prefill_threshold: int = 8
    decode_sla_seconds: float = 0.05
    balanced_load: float = 0.6
    release_share: float = 0.75
    min_dwell_steps: int = 8
    prefill_share: float = 0.8
    """How much of a step's tokens prompts may take before decodes while prefill leads."""


class Signal(StrEnum):
    """What the triggers say at one moment."""

    QUEUE = "queue"
    """Too many prompts wait, and that is the worse of both evils."""
    LATENCY = "latency"
    """Tokens take too long, and that is the worse of both evils."""
    LINGERING = "lingering"
    """Neither, but what caused the present mode is not over yet."""
    CALM = "calm"


NEXT_MODE = {
    (Mode.BALANCED, Signal.QUEUE): Mode.PREFILL_LED,
    (Mode.BALANCED, Signal.LATENCY): Mode.DECODE_LED,
    (Mode.BALANCED, Signal.LINGERING): Mode.BALANCED,
    (Mode.BALANCED, Signal.CALM): Mode.BALANCED,
    (Mode.PREFILL_LED, Signal.QUEUE): Mode.PREFILL_LED,
    (Mode.PREFILL_LED, Signal.LATENCY): Mode.DECODE_LED,
    (Mode.PREFILL_LED, Signal.LINGERING): Mode.PREFILL_LED,
    (Mode.PREFILL_LED, Signal.CALM): Mode.BALANCED,
    (Mode.DECODE_LED, Signal.QUEUE): Mode.PREFILL_LED,
    (Mode.DECODE_LED, Signal.LATENCY): Mode.DECODE_LED,
    (Mode.DECODE_LED, Signal.LINGERING): Mode.DECODE_LED,
    (Mode.DECODE_LED, Signal.CALM): Mode.BALANCED,
}


@dataclass(frozen=True, slots=True)
class Pressure:
    """What the triggers look at: waiting prompts, seconds between two tokens, share of the pool.

    ``token_seconds`` is 0 while nothing decodes.
    """

    num_waiting: int
    token_seconds: float
    load: float


class ModeMachine:
    """The mode of one worker's steps."""

    def __init__(self, triggers: Triggers) -> None:
        self._triggers = triggers
        self._own_mode = Mode.BALANCED
        self._num_steps_in_mode = triggers.min_dwell_steps
        self._directive: Mode | None = None
        self._num_directed = 0

    @property
    def mode(self) -> Mode:
        """The mode of the next step."""
        return self._own_mode if self._directive is None else self._directive

    @property
    def asks_for_load(self) -> bool:
        """Whether the load can make a difference now: it only ever ends a mode."""
        return self._own_mode is not Mode.BALANCED

    def direct(self, mode: Mode | None, num_steps: int) -> None:
        """Let ``mode`` lead the next ``num_steps`` steps that have both kinds of work.

        None ends an earlier directive.
        """
        self._directive = mode if num_steps > 0 else None
        self._num_directed = num_steps

    def observe(self, pressure: Pressure) -> None:
        """Look at the worker before a step and change the mode where the triggers say so."""
        if self._num_steps_in_mode < self._triggers.min_dwell_steps:
            return
        mode = NEXT_MODE[self._own_mode, self.signal(pressure)]
        if mode is not self._own_mode:
            self._own_mode = mode
            self._num_steps_in_mode = 0

    def signal(self, pressure: Pressure) -> Signal:
        """Say what a pressure means in the present mode."""
        triggers = self._triggers
        queue = pressure.num_waiting / triggers.prefill_threshold
        latency = pressure.token_seconds / triggers.decode_sla_seconds
        if latency > max(1.0, queue):
            return Signal.LATENCY
        if queue > 1:
            return Signal.QUEUE
        cause = {Mode.PREFILL_LED: queue, Mode.DECODE_LED: latency, Mode.BALANCED: 0.0}
        is_pressing = cause[self._own_mode] >= triggers.release_share
        is_loaded = pressure.load >= triggers.balanced_load
        return Signal.LINGERING if is_pressing and is_loaded else Signal.CALM

    def note_planned(self, *, has_both: bool) -> None:
        """A step was planned; ``has_both`` when there were prompts and decodes to share it."""
        self._num_steps_in_mode += 1
        if self._directive is None or not has_both:
            return
        self._num_directed -= 1
        if self._num_directed < 1:
            self._directive = None

    def num_decode_tokens(self, budget: int, *, has_prompts: bool) -> int:
        """Return how many tokens of a step decodes may take before the prompts get theirs."""
        if self.mode is not Mode.PREFILL_LED or not has_prompts:
            return budget
        return max(1, budget - int(budget * self._triggers.prefill_share))
