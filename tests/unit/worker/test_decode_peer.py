"""How long a decode side may take to pair, and what is told meanwhile."""

from dataclasses import dataclass

from structlog.testing import capture_logs

from common.ids import Epoch, WorkerId
from common.messages.fields import PeerInfo, Role
from common.worker.decode_peer import (
    PAIRING_SECONDS,
    PATIENCE_SECONDS,
    RETRY_SECONDS,
    DecodePeer,
    FailedPairs,
)

INFO = PeerInfo(
    worker_id=WorkerId("d0"),
    epoch=Epoch(1),
    role=Role.DECODE,
    pid=1,
    host="there",
    handoff_endpoint="tcp://there:1",
    dtype="float32",
    layout_fingerprint="0" * 16,
    transports=("tcp",),
)


@dataclass
class Link:
    """A link whose handshakes fail where a reason is given."""

    refusal: str | None = None


def a_peer(refusal: str | None = None) -> DecodePeer:
    return DecodePeer(INFO, Link(refusal), 5.0, begun_at=0.0, heard_at=0.0)  # type: ignore[arg-type]  # what it asks of a link


def reason(failed: FailedPairs, peer: DecodePeer, now: float) -> str:
    (pair,) = failed.report({peer.key: peer}, now)
    assert pair.transport == ""
    return pair.reason


def test_a_peer_that_does_not_answer_is_avoided_soon_and_given_up_late() -> None:
    peer, failed = a_peer(), FailedPairs()
    assert reason(failed, peer, PATIENCE_SECONDS) == ""
    assert reason(failed, peer, PATIENCE_SECONDS + 0.1) == "not paired within 3 s"
    assert peer.why_not_paired(PAIRING_SECONDS) is None
    assert peer.why_not_paired(PAIRING_SECONDS + 0.1) == "no answer within 30 s"


def test_a_refused_handshake_is_a_reason_at_once_but_the_link_is_kept() -> None:
    peer = a_peer("it does not let our key in")
    assert peer.why_not_paired(0.1) == "it does not let our key in"
    assert not peer.is_given_up(0.1)


def test_a_failure_is_logged_once_and_told_until_the_pair_works() -> None:
    peer, failed = a_peer(), FailedPairs()
    with capture_logs() as logs:
        for _ in range(3):
            failed.add(INFO, "no", RETRY_SECONDS)
        assert [entry["event"] for entry in logs] == ["pairing_failed"]
    assert reason(failed, peer, 0.0) == "no", "a new try does not hide the last one's failure"
    assert failed.due(RETRY_SECONDS - 0.1) == []
    assert failed.due(RETRY_SECONDS) == [INFO]
    failed.discard(peer.key)
    assert reason(failed, peer, 0.0) == ""
