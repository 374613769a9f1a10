"""torch's streams and events, whose own annotations are incomplete."""

from types import TracebackType

import torch


def new_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a stream of the device."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # torch leaves it untyped


def new_event() -> torch.cuda.Event:
    """Return an event without a time."""
    return torch.cuda.Event()  # type: ignore[no-untyped-call] # torch leaves it untyped


def timed_event() -> torch.cuda.Event:
    """Return an event whose time can be told from another one's."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call] # torch's


class InferenceOn:
    """While entered, torch records no gradients and enqueues on one stream (None: computes)."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._inference = torch.inference_mode()
        self._stream = torch.cuda.stream(stream)

    def __enter__(self) -> None:
        self._inference.__enter__()
        self._stream.__enter__()  # type: ignore[no-untyped-call] # torch leaves it untyped

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stream.__exit__(kind, error, trace)
        self._inference.__exit__(kind, error, trace)
