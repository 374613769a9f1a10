"""What a worker tells of itself. Its role may change while it runs; the rest is fixed."""

from dataclasses import replace

from common.messages.control import SwitchRole, WorkerHello
from common.messages.fields import PeerInfo, Role
from common.transport.sockets import Identity


class OwnRole:
    """The hello of this incarnation with the role that it has now.

    The role's generation stands in ``identity`` and so in every envelope.
    """

    def __init__(self, identity: Identity, hello: WorkerHello) -> None:
        self._identity = identity
        self.hello = hello

    @property
    def info(self) -> PeerInfo:
        """How others reach this worker."""
        return self.hello.peer

    @property
    def role(self) -> Role:
        """What the worker serves now."""
        return self.hello.peer.role

    @property
    def generation(self) -> int:
        """How often the controller has given it a role."""
        return self._identity.role_generation

    def take(self, role: Role, generation: int) -> None:
        """Have this role from now on."""
        self._identity.role_generation = generation
        if role is not self.role:
            self.hello = replace(self.hello, peer=replace(self.hello.peer, role=role))

    def switch(self, order: SwitchRole) -> bool:
        """Carry an order out; return False for a stale one, which changes nothing."""
        if order.role_generation <= self.generation:
            return False
        self.take(order.role, order.role_generation)
        return True
