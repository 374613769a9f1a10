import urllib.request

import psutil
import pytest
from prometheus_client import CollectorRegistry, Counter

from common.config.settings import Settings
from common.errors import ConfigError
from common.telemetry.exposition import metrics_served
from services.cli.supervisor.plan import plan_processes
from tests.support.held_port import held_port


def listening_ports() -> set[tuple[str, int]]:
    connections = psutil.Process().net_connections("tcp")
    return {(c.laddr.ip, c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN}


def test_without_a_port_nothing_listens():
    before = listening_ports()
    with metrics_served(CollectorRegistry(), None):
        assert listening_ports() == before


def test_metrics_are_served_on_loopback_alone_and_for_the_block_alone():
    registry = CollectorRegistry()
    Counter("flowpath_seen", "Seen.", registry=registry).inc(3)
    with held_port() as port, metrics_served(registry, port):
        assert ("127.0.0.1", port) in listening_ports()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
            assert b"flowpath_seen_total 3.0" in page.read()
        with (
            pytest.raises(ConfigError, match=f"metrics port {port}"),
            metrics_served(registry, port),
        ):
            pass
    assert ("127.0.0.1", port) not in listening_ports()


@pytest.mark.parametrize(
    "settings",
    [
        Settings(prefill=2, decode=3, gateways=2, metrics_port_base=9200),
        Settings(combined=True, metrics_port_base=9200),
    ],
    ids=["split", "combined"],
)
def test_every_process_has_a_metrics_port_of_its_own(settings):
    names = [spec.name for spec in plan_processes(settings)]
    ports = [settings.metrics_port(name) for name in names]
    assert sorted(ports) == list(range(9200, 9200 + len(names)))
    assert settings.metrics_port("controller") == 9200
    assert settings.metrics_port("decode-77") is None


def test_by_default_no_process_has_a_metrics_port():
    settings = Settings()
    assert {settings.metrics_port(spec.name) for spec in plan_processes(settings)} == {None}
