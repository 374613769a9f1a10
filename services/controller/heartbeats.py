"""What workers tell of themselves every fraction of a second, and whether anything moves."""

from common.messages.codec import Envelope
from common.messages.control import Heartbeat, HeartbeatAnswered
from services.controller.effects import Effect, Note, Send
from services.controller.members import Members, WorkerRecord
from services.controller.prefixes import Prefixes
from services.controller.roles import Roles


class Heartbeats:
    """Keeps the records in ``members`` at what the last heartbeats told."""

    def __init__(self, members: Members, roles: Roles, prefixes: Prefixes, now: float) -> None:
        self._members = members
        self._roles = roles
        self._prefixes = prefixes
        self._progress_at = now

    def note_idle(self, now: float) -> None:
        """Note that there is nothing to do, so that nothing need move."""
        self._progress_at = now

    def stalled_seconds(self, now: float) -> float:
        """For how long there has been work and no worker moved."""
        return now - self._progress_at

    def take(
        self, worker: WorkerRecord, heartbeat: Heartbeat, envelope: Envelope, cause: str, now: float
    ) -> list[Effect]:
        """Take one in and answer it."""
        before = worker.state
        if worker.load is None or worker.load.num_steps != heartbeat.load.num_steps:
            self._progress_at = now
        worker.kv = heartbeat.kv
        worker.load = heartbeat.load
        worker.mode = heartbeat.mode
        worker.rates = heartbeat.rates
        worker.totals = heartbeat.totals
        worker.has_come(heartbeat.num_orders)
        worker.replaced_blocks = 0
        worker.is_draining = heartbeat.is_draining
        worker.is_quarantined = heartbeat.is_quarantined
        worker.is_suspect = False
        pairs = _pairs_changed(worker, heartbeat, cause)
        if heartbeat.pairs != worker.pairs:
            worker.take_pairs(heartbeat.pairs)
        return [
            Send(worker.key, HeartbeatAnswered(sequence=envelope.sequence), cause),
            *pairs,
            *worker.state_note(before, cause),
            *self._roles.tell_again(worker, cause, now),
            *self._prefixes.check(worker, heartbeat.index_sequence, cause, now),
        ]


def _pairs_changed(worker: WorkerRecord, heartbeat: Heartbeat, cause: str) -> list[Effect]:
    """Note each pair that stops or begins to work."""
    return [
        Note(
            "pair_broken" if pair.reason else "pair_mended",
            cause,
            facts=(("prefill", worker.key[0]), ("decode", pair.worker_id), ("reason", pair.reason)),
            level="warning" if pair.reason else "info",
        )
        for pair in heartbeat.pairs
        if bool(pair.reason) != bool(worker.trouble_with((pair.worker_id, pair.epoch)))
    ]
