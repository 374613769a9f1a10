"""The other live workers as the controller tells of them, with the roles that they have now."""

from common.ids import Epoch, WorkerId
from common.messages.fields import PeerInfo, Role


class KnownPeers:
    """At most one entry per incarnation; the newest word counts."""

    def __init__(self) -> None:
        self._infos: dict[tuple[WorkerId, Epoch], PeerInfo] = {}

    def add(self, info: PeerInfo) -> None:
        """A worker joined, or changed its role."""
        self._infos[info.worker_id, info.epoch] = info

    def discard(self, worker_id: WorkerId, epoch: Epoch) -> None:
        """A worker died or left."""
        self._infos.pop((worker_id, epoch), None)

    def replace(self, infos: tuple[PeerInfo, ...]) -> None:
        """These are all."""
        self._infos = {(info.worker_id, info.epoch): info for info in infos}

    def of_role(self, role: Role) -> list[PeerInfo]:
        """Return those that have a role."""
        return [info for info in self._infos.values() if info.role is role]
