"""Several jobs of one request at a time."""

import asyncio
from collections.abc import Coroutine, Sequence


async def run_together(jobs: Sequence[Coroutine[None, None, None]]) -> None:
    """Run ``jobs`` until all are done.

    The first that fails cancels the others, and its error is raised as it is. One job alone runs
    in the caller's own task.
    """
    if len(jobs) == 1:
        await jobs[0]
        return
    failure: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as group:
            for job in jobs:
                group.create_task(job)
    except* Exception as failed:  # noqa: BLE001 - raised again below, out of its group
        failure = failed.exceptions[0]
    if failure is not None:
        raise failure
