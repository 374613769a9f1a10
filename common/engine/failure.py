"""How a step tells that some of its rows have no tokens while the others have theirs."""

from collections.abc import Sequence

from common.errors import FlowPathError, RequestError
from common.sampling import SampledToken

RowOutcome = tuple[SampledToken, ...] | RequestError


class RowsFailed(FlowPathError):  # noqa: N818 - a fact, like the tree of common.errors names them
    """A step was computed, but at least one row has no tokens.

    ``outcomes`` has one entry a row, in the order of the step: the row's tokens, or the error that
    ends its request. K and V of every row are in the pool, so that the rows with tokens go on.
    """

    def __init__(self, outcomes: Sequence[RowOutcome]) -> None:
        failed = [i for i, outcome in enumerate(outcomes) if isinstance(outcome, RequestError)]
        super().__init__(f"{len(failed)} of {len(outcomes)} rows failed: {failed}")
        self.outcomes = tuple(outcomes)


class EngineBroken(FlowPathError, RuntimeError):  # noqa: N818 - a fact, like ``RowsFailed``
    """The engine has lost a part of itself: this step and all later ones fail, for this reason.

    What a step in flight wrote into the pools is unknown, so nothing that they hold may be used on.
    """
