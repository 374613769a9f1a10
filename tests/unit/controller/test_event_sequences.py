"""Random orders of everything that can happen; the core's sums hold after each event."""

from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import ErrorCode
from common.messages.control import Goodbye, RequestFailed, RequestRefused
from common.messages.fields import Role
from services.controller.effects import Effect
from services.controller.limits import ControllerLimits
from tests.unit.controller.cluster import Cluster, heartbeat, kv, only, pair_cluster

REQUESTS = st.sampled_from(["r0", "r1", "r2", "r3"])
PREFILL = st.sampled_from(["p0", "p1"])
DECODE = st.sampled_from(["d0", "d1"])
WORKER = PREFILL | DECODE
EPOCH = st.integers(1, 3)
USED = st.integers(0, 100)

STEP = st.one_of(
    st.tuples(st.just("submit"), REQUESTS, st.sampled_from([1, 64, 3000, 6400])),
    st.tuples(st.just("cancel"), REQUESTS, st.sampled_from([None, 0])),
    st.tuples(st.just("started"), DECODE, REQUESTS),
    st.tuples(st.just("finished"), WORKER, REQUESTS),
    st.tuples(st.just("failed"), WORKER, REQUESTS),
    st.tuples(st.just("given back"), WORKER, REQUESTS),
    st.tuples(
        st.just("refused"),
        PREFILL,
        st.tuples(
            DECODE, REQUESTS, st.sampled_from([ErrorCode.NO_ROOM, ErrorCode.TRANSFER_FAILED])
        ),
    ),
    st.tuples(st.just("beat"), WORKER, USED),
    st.tuples(st.just("found"), WORKER, st.tuples(REQUESTS, st.sampled_from([0, 40, 200]))),
    st.tuples(st.just("not_copied"), WORKER, REQUESTS),
    st.tuples(st.just("drain"), WORKER, st.booleans()),
    st.tuples(st.just("join"), WORKER, EPOCH),
    st.tuples(st.just("gateway"), EPOCH, st.none()),
    st.tuples(st.just("kill"), st.sampled_from([50, 100, 101, 200, 201]), st.none()),
    st.tuples(st.just("goodbye"), WORKER | st.just("g"), st.none()),
    st.tuples(st.just("unreachable"), WORKER | st.just("g"), st.booleans()),
    st.tuples(st.just("tick"), st.sampled_from([0.0, 0.05, 1.0, 9.0, 70.0]), st.none()),
)

PIDS = {"p0": 100, "p1": 101, "d0": 200, "d1": 201}


def epoch_of(cluster: Cluster, name: str) -> int:
    member = cluster.core.members.worker_named(name) or cluster.core.members.gateway_named(name)
    return member.key[1] if member is not None else 1


def take(cluster: Cluster, step: tuple[str, object, object]) -> list[Effect]:  # noqa: C901, PLR0911, PLR0912 - one case per step
    match step:
        case ("submit", str(request), int(tokens)):
            return cluster.submit(request, tokens)
        case ("cancel", str(request), choice):
            return cluster.cancel(request, 0 if choice == 0 else None)
        case ("started", str(worker), str(request)):
            return cluster.started(worker, request, epoch_of(cluster, worker))
        case ("finished", str(worker), str(request)):
            return cluster.finished(worker, request)
        case ("failed", str(worker), str(request)):
            return cluster.failed(worker, request)
        case ("given back", str(worker), str(request)):
            return cluster.given_back(worker, request)
        case ("refused", str(worker), (str(decode), str(request), ErrorCode() as code)):
            return cluster.refused(worker, decode, request, code)
        case ("found", str(worker), (str(request), int(blocks))):
            return cluster.found(worker, request, blocks, epoch_of(cluster, worker))
        case ("not_copied", str(worker), str(request)):
            return cluster.not_copied(worker, request, epoch_of(cluster, worker))
        case ("beat", str(worker), int(used)):
            return cluster.beat(worker, heartbeat(kv(referenced=used)), epoch_of(cluster, worker))
        case ("drain", str(worker), bool(draining)):
            beat = heartbeat(is_draining=draining)
            return cluster.beat(worker, beat, epoch_of(cluster, worker))
        case ("join", str(worker), int(epoch)):
            role = Role.PREFILL if worker.startswith("p") else Role.DECODE
            return cluster.join(
                worker,
                role,
                epoch,
                pid=PIDS[worker],
                max_num_batched_tokens=1024,
                has_store=worker.endswith("0"),
            )
        case ("gateway", int(epoch), _):
            return cluster.join_gateway("g", epoch)
        case ("kill", int(pid), _):
            return cluster.tick(pid)
        case ("goodbye", str(name), _):
            return cluster.say(name, Goodbye(reason="x"), epoch=epoch_of(cluster, name))
        case ("unreachable", str(name), bool(is_unreachable)):
            (cluster.unreachable.add if is_unreachable else cluster.unreachable.discard)(name)
            return []
        case ("tick", float(seconds), _):
            return cluster.tick(after=seconds)
        case _:
            raise AssertionError(step)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(steps=st.lists(STEP, min_size=1, max_size=40), has_store=st.booleans())
def test_every_order_of_events_keeps_the_sums_and_ends_each_request_once(
    steps: list[tuple[str, object, object]], has_store: bool
) -> None:
    cluster = pair_cluster(2, 2, max_num_batched_tokens=1024, has_store=has_store)
    open_ids: set[str] = set()
    for step in steps:
        before = set(cluster.core.book.requests)
        effects = take(cluster, step)
        open_ids |= set(cluster.core.book.requests) - before
        told = [m for _, m in only(effects, RequestFailed)]
        told += [m for _, m in only(effects, RequestRefused)]
        named = [getattr(message, "request_id", "") for message in told]
        assert len(named) == len(set(named)), f"told twice in one step: {named}"


@settings(max_examples=60, deadline=None, derandomize=True)
@given(steps=st.lists(STEP, max_size=30))
def test_nothing_is_kept_once_every_process_is_gone(
    steps: list[tuple[str, object, object]],
) -> None:
    cluster = Cluster(ControllerLimits())
    cluster.join_gateway()
    for step in steps:
        take(cluster, step)
    cluster.tick(*PIDS.values(), 50)
    cluster.tick(after=100.0)
    assert cluster.core.book.requests == {}
    assert cluster.core.book.num_queued == 0
    assert not cluster.core.members.workers
    assert not cluster.core.members.gateways
