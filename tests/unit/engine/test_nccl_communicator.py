"""How ranks on GPUs part, with a group that is told apart from NCCL's by nothing else."""

import threading
from pathlib import Path

import pytest
import torch

from common.engine.parallel import nccl
from common.engine.parallel.nccl import NcclCommunicator
from common.engine.shard import Shard


class Group:
    """Hangs in its abort as long as captured operations hold it."""

    def __init__(self) -> None:
        self.captured = threading.Event()
        self.aborted = threading.Event()

    def abort(self) -> None:
        self.captured.wait(20)
        self.aborted.set()


@pytest.fixture
def communicator(tmp_path: Path) -> NcclCommunicator:
    made = NcclCommunicator(Shard(0, 2), tmp_path / "rendezvous", torch.device("cpu"))
    made._group = Group()
    return made


def test_captured_operations_go_before_the_connection(communicator: NcclCommunicator) -> None:
    group = communicator._group
    communicator.before_parting(group.captured.set)
    communicator.close()
    assert group.aborted.is_set()
    communicator.close()
    with pytest.raises(RuntimeError, match="not connected"):
        communicator.share(torch.ones(1))


def test_a_loss_is_told_of_though_nccl_waits_for_captured_operations(
    communicator: NcclCommunicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "ABORT_SECONDS", 0.05)
    group = communicator._group
    communicator.abort()
    assert not group.aborted.is_set()
    group.captured.set()
    assert group.aborted.wait(20)
