"""Requests go where their prefill side can hand over, and everybody is told where it cannot."""

from common.errors import ErrorCode
from common.messages.control import PlaceRequest, RequestFailed, RequestRefused
from common.messages.fields import PairStatus
from services.controller.status import status_report
from tests.unit.controller.cluster import Cluster, heartbeat, notes, only, pair_cluster, paired

NO = "it does not let our key in"


def tell(cluster: Cluster, *pairs: PairStatus, prefill: str = "p0") -> list[str]:
    return notes(cluster.beat(prefill, heartbeat(pairs=pairs)))


def test_a_request_goes_to_the_pair_that_works() -> None:
    cluster = pair_cluster(num_decode=2)
    tell(cluster, paired("d0", "", NO), paired("d1"))
    place = only(cluster.submit("r"), PlaceRequest)[0][1]
    assert isinstance(place, PlaceRequest)
    assert place.decode is not None
    assert place.decode.worker_id == "d1"


def test_a_cluster_without_a_pair_that_works_is_not_ready_and_says_why() -> None:
    cluster = pair_cluster()
    assert cluster.core.readiness(cluster.now) == (True, "")
    tell(cluster, paired("d0", "", NO))
    told = f"p0 cannot hand over to d0: {NO}"
    assert cluster.core.readiness(cluster.now) == (False, told)
    refused = only(cluster.submit("r"), RequestRefused)[0][1]
    assert isinstance(refused, RequestRefused)
    assert (refused.code, refused.message) == (ErrorCode.NO_WORKER, told)
    report = status_report(cluster.core, cluster.now)
    assert [worker.pairs for worker in report.workers] == [(), (paired("d0", "", NO),)]
    tell(cluster, paired("d0"))
    assert cluster.core.readiness(cluster.now) == (True, "")


def test_a_pair_of_an_earlier_incarnation_counts_no_more() -> None:
    cluster = pair_cluster()
    tell(cluster, paired("d0", "", NO, epoch=7))
    assert cluster.core.readiness(cluster.now) == (True, "")


def test_a_pair_is_logged_when_it_breaks_and_when_it_works_again() -> None:
    cluster = pair_cluster()
    told = [tell(cluster, paired("d0", "", reason)) for reason in ("", NO, "silent", "")]
    assert told == [[], ["pair_broken"], [], ["pair_mended"]]


def test_a_refused_decode_is_placed_where_its_prefill_side_can_hand_over() -> None:
    cluster = pair_cluster(num_decode=3)
    cluster.submit("r")
    tell(cluster, paired("d0", "", NO), paired("d1", "", NO), paired("d2"))
    cluster.refused("p0", "d0", "r", ErrorCode.TRANSFER_FAILED)
    record = cluster.core.book.requests["r"]  # type: ignore[index]  # an id
    assert record.decode == ("d2", 1)


def test_a_decode_that_no_pair_can_take_fails_at_once_with_the_reason() -> None:
    cluster = pair_cluster()
    cluster.submit("r")
    tell(cluster, paired("d0", "", NO))
    effects = cluster.refused("p0", "d0", "r", ErrorCode.TRANSFER_FAILED)
    failed = only(effects, RequestFailed)[0][1]
    assert isinstance(failed, RequestFailed)
    assert failed.message == f"no decode worker can be paired with its prefill worker: {NO}"
