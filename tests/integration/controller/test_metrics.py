"""The controller's metrics, scraped from its loopback port while peers come, ask and leave."""

import asyncio
import os
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from common.config.settings import Settings
from common.errors import ErrorCode
from common.ids import WorkerId
from common.messages.admin import OrderDrain, OrderRole, ScalerHello, StartWorker
from common.messages.control import (
    DecodeStarted,
    GatewayAccepted,
    Goodbye,
    HeartbeatAnswered,
    MigrateDecode,
    MigrationFailed,
    PlaceRequest,
    RequestFailed,
    RequestPlaced,
    RequestRefused,
    RoleSwitched,
    SwitchRole,
    WorkerAccepted,
)
from common.messages.fields import Role
from common.transport.sockets import new_context
from services.cli.admin import admin_link, give_order
from services.cli.supervisor.prepare import claim_port
from tests.integration.controller.test_server import as_gateway, as_worker, controller
from tests.unit.controller.cluster import gateway_hello, heartbeat, kv, rates, submit, worker_hello

DEADLINE_SECONDS = 10.0
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    folder: Path = tmp_path_factory.mktemp("c")
    folder.chmod(0o700)
    port = claim_port("127.0.0.1", 0)
    return Settings(
        roles="manual",
        port=1,
        run_dir=folder,
        log_dir=folder / "log",
        metrics_port_base=port,
        death_seconds=60,
    )


def _scrape(port: int) -> Samples:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as page:
            text = page.read().decode()
    except OSError:  # it does not listen yet
        return {}
    return {
        (sample.name.removeprefix("flowpath_cluster_"), frozenset(sample.labels.items())): (
            sample.value
        )
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def scraped(settings: Settings, name: str, value: float, **labels: str) -> Samples:
    """Scrape until a sample has its value, and return all of them."""
    key = (name, frozenset(labels.items()))
    samples: Samples = {}
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            while samples.get(key) != value:
                samples = await asyncio.to_thread(_scrape, settings.metrics_port_base)
    except TimeoutError:
        pytest.fail(f"{key} is {samples.get(key)}, not {value}, in {samples}")
    return samples


async def test_a_cluster_moves_every_gauge_and_counter_of_the_controller(
    settings: Settings,
) -> None:
    async with (
        controller(settings),
        as_worker(settings, "p0") as prefill,
        as_worker(settings, "d0") as decode,
        as_gateway(settings) as gateway,
    ):
        await scraped(settings, "ready", 0)
        gateway.say(gateway_hello(pid=os.getpid()))
        await gateway.hear(GatewayAccepted)
        gateway.say(submit("early"), (bytes(256),))
        await gateway.hear(RequestRefused)
        await scraped(settings, "requests_refused_total", 1, reason=str(ErrorCode.NO_WORKER))

        for peer, name, role in ((prefill, "p0", Role.PREFILL), (decode, "d0", Role.DECODE)):
            peer.say(worker_hello(name, role, host="there"))
            await peer.hear(WorkerAccepted)
            peer.say(heartbeat())
            await peer.hear(HeartbeatAnswered)
        samples = await scraped(settings, "ready", 1)
        assert samples["num_gateways", frozenset()] == 1
        of_decode = frozenset({"role": "decode", "state": "ready"}.items())
        assert samples["num_workers", of_decode] == 1
        beat = heartbeat()
        for owner in ("free", "referenced", "cached", "in_transfer"):
            key = frozenset({"worker": "d0", "owner": owner}.items())
            assert samples["kv_blocks", key] == getattr(beat.kv, owner)
        for state in ("waiting", "prefilling", "sending", "receiving", "decoding"):
            key = frozenset({"worker": "p0", "state": state}.items())
            assert samples["worker_requests", key] == getattr(beat.load, f"num_{state}")

        gateway.say(submit("r1"), (bytes(256),))
        await gateway.hear(RequestPlaced)
        placed, _ = await prefill.hear(PlaceRequest)
        samples = await scraped(settings, "num_requests", 1)
        assert samples["placements_total", frozenset()] == 1
        assert samples["num_requests_queued", frozenset()] == 1
        assert samples["num_requests_running", frozenset()] == 0
        failed = RequestFailed(
            request_id=placed.request_id, code=ErrorCode.INTERNAL, message="broke"
        )
        prefill.say(failed)
        await gateway.hear(RequestFailed)
        await scraped(settings, "requests_failed_total", 1, reason=str(ErrorCode.INTERNAL))

        gateway.say(submit("r2"), (bytes(256),))
        placed, _ = await prefill.hear(PlaceRequest)
        decode.say(DecodeStarted(request_id=placed.request_id))
        samples = await scraped(settings, "num_requests_running", 1)
        assert samples["num_requests_queued", frozenset()] == 0

        decode.say(heartbeat(kv(total=100, referenced=20, in_transfer=5, cached=30)))
        await scraped(settings, "kv_usage_ratio", 0.25, worker="d0")
        decode.say(heartbeat(kv(), is_draining=True))
        samples = await scraped(settings, "num_workers", 1, role="decode", state="draining")
        assert ("num_workers", of_decode) not in samples
        assert samples["kv_usage_ratio", frozenset({"worker": "d0"}.items())] == 0

        decode.say(Goodbye(reason="test"))
        async with asyncio.timeout(DEADLINE_SECONDS):
            while any(labels & {("worker", "d0"), ("role", "decode")} for _, labels in samples):
                samples = await scraped(settings, "ready", 0)


async def test_the_age_of_a_heartbeat_grows_while_a_worker_is_silent(settings: Settings) -> None:
    async with controller(settings), as_worker(settings, "p0") as worker:
        worker.say(worker_hello("p0", Role.PREFILL, pid=os.getpid(), host="there"))
        await worker.hear(WorkerAccepted)
        key = ("heartbeat_age_seconds", frozenset({"worker": "p0"}.items()))
        ages: list[float] = []
        async with asyncio.timeout(DEADLINE_SECONDS):
            while len(ages) < 3:
                samples = await asyncio.to_thread(_scrape, settings.metrics_port_base)
                if key in samples and samples[key] not in ages:
                    ages.append(samples[key])
        assert 0 <= ages[0] < ages[1] < ages[2] < DEADLINE_SECONDS
        worker.say(heartbeat())
        await worker.hear(HeartbeatAnswered)


async def test_switches_moves_and_asked_for_workers_are_counted(settings: Settings) -> None:
    settings = settings.model_copy(update={"roles": "auto", "death_seconds": 600})
    async with (
        controller(settings),
        as_worker(settings, "d0") as first,
        as_worker(settings, "d1") as second,
        as_worker(settings, "d2") as third,
        as_gateway(settings) as gateway,
    ):
        for peer, name in ((first, "d0"), (second, "d1"), (third, "d2")):
            peer.say(worker_hello(name, Role.DECODE, host="there"))
            await peer.hear(WorkerAccepted)
        await give_order(settings, OrderRole(worker_id=WorkerId("d0"), role=Role.PREFILL))
        order, _ = await first.hear(SwitchRole)
        first.say(RoleSwitched(role=order.role, role_generation=order.role_generation))
        await scraped(settings, "role_switches_total", 1)

        gateway.say(gateway_hello(pid=os.getpid()))
        await gateway.hear(GatewayAccepted)
        for peer in (first, second, third):
            peer.say(heartbeat())
            await peer.hear(HeartbeatAnswered)
        gateway.say(submit("r", 640), (bytes(2560),))
        placed, _ = await gateway.hear(RequestPlaced)
        source = {"d1": second, "d2": third}[placed.decode_worker]
        source.say(DecodeStarted(request_id=placed.request_id))
        await give_order(settings, OrderDrain(worker_id=placed.decode_worker, is_draining=True))
        await source.hear(MigrateDecode)
        await scraped(settings, "migrations_total", 1, event="started")
        source.say(MigrationFailed(request_id=placed.request_id, message="no room"))
        await scraped(settings, "migrations_total", 1, event="failed")


async def test_a_worker_asked_for_under_extreme_load_is_counted(settings: Settings) -> None:
    settings = settings.model_copy(update={"roles": "auto"})
    busy = heartbeat(
        kv(referenced=60),
        uncomputed_tokens=9000,
        num_decoding=60,
        measured=rates(prefill=1000.0, step_seconds=0.2, decode=50.0),
    )
    context = new_context()
    async with controller(settings), as_worker(settings, "c0") as worker:
        worker.say(worker_hello("c0", Role.COMBINED, host="there"))
        await worker.hear(WorkerAccepted)
        worker.say(busy)
        link = admin_link(context, settings, "scaler-1")
        running = (WorkerId("c0"),)
        link.try_send(
            ScalerHello(backend="process", host="here", max_workers=2, running=running), "scaler"
        )
        async with asyncio.timeout(DEADLINE_SECONDS):
            received = await anext(link.received())
        assert received.message == StartWorker(
            worker_id=WorkerId("extra-combined-0"), role=Role.COMBINED
        )
        scale = await scraped(settings, "scale_events_total", 1, event="asked_for")
        assert scale["scenario", frozenset({"scenario": "extreme"}.items())] == 1
        link.close()
    context.destroy(linger=0)
