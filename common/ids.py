"""Types of the names that travel between processes, and how fresh ones are made."""

import secrets
from typing import NewType

RequestId = NewType("RequestId", str)
"""One client request (all its choices), minted by the gateway."""

WorkerId = NewType("WorkerId", str)
"""One worker's place in the cluster, stable across restarts (``prefill-0``)."""

GatewayId = NewType("GatewayId", str)
"""One gateway process."""

TransferId = NewType("TransferId", str)
"""One handoff of one request from a prefill side to a decode side."""

BlockId = NewType("BlockId", int)
"""Index of a block in its owner's pool."""

Epoch = NewType("Epoch", int)
"""A process's incarnation: new at every start and at every re-registration after a fence."""


def new_request_id() -> RequestId:
    """Return a fresh request id, unguessable and safe in logs and file names."""
    return RequestId(f"req-{secrets.token_hex(8)}")


def new_transfer_id() -> TransferId:
    """Return a fresh transfer id."""
    return TransferId(f"tr-{secrets.token_hex(8)}")


def new_epoch() -> Epoch:
    """Return a fresh epoch: a random 53-bit number, so that two incarnations never share one."""
    return Epoch(secrets.randbits(53))
