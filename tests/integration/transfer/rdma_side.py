"""One worker of an ``rdma`` link on NIXL, in a process of its own.

``owner``: exports an empty pool and prints its handle. Lines of input: ``grant`` prints a token for
every block, ``moved`` waits until bytes have come, ``revoke`` takes the grant back and empties the
pool, ``checked`` prints whether the pool is still empty after a while of looking at other work.

``writer``: reads a handle and a token, prints ``writing``, then writes everything and prints
``written``, or the error, after which it goes on as a worker that serves other peers.
"""

import json
import logging
import sys
from time import monotonic

import numpy as np
import structlog
from pydantic import TypeAdapter

from common.errors import TransferError
from common.ids import TransferId
from common.kv.pool import KVPool
from common.messages.fields import RdmaPoolHandle
from common.transfer import rdma_reader
from common.transfer.rdma_export import open_rdma
from common.transfer.rdma_memory import RdmaMemory
from common.transfer.rdma_nixl import NixlLibrary
from tests.support.data_stream import wait_until
from tests.support.fake_rdma import RdmaWorker
from tests.support.pool_side import EMPTY

NUM_BLOCKS = 96
BLOCK = 1024 * 1024
STALL_SECONDS = 20.0
SETTLE_SECONDS = 0.5
LATE_SECONDS = 0.5
TRANSFER = TransferId("tr-a")
HANDLE: TypeAdapter[RdmaPoolHandle] = TypeAdapter(RdmaPoolHandle)


def new_worker() -> RdmaWorker:
    pool = KVPool(NUM_BLOCKS, BLOCK)
    memory = RdmaMemory.of_pool(pool)
    return RdmaWorker(
        pool, *open_rdma(pool, NixlLibrary(memory), memory, STALL_SECONDS, host="127.0.0.1")
    )


def own() -> None:
    rdma_reader.SETTLE_SECONDS = SETTLE_SECONDS
    worker = new_worker()
    worker.empty()
    agent = worker.export._side.agent
    handle = HANDLE.dump_python(worker.export.handle(), exclude={"secret"})
    print(json.dumps(handle | {"secret": worker.export.handle().secret.hex()}), flush=True)
    for line in sys.stdin:
        match line.strip():
            case "grant":
                print(worker.export.grant(TRANSFER, range(NUM_BLOCKS)).hex(), flush=True)
            case "moved":
                wait_until(lambda: worker.pool.buffer[0] != EMPTY)
                print("moved", flush=True)
            case "revoke":
                worker.export.revoke(TRANSFER)
                worker.empty()
                print("revoked", flush=True)
            case "checked":
                until = monotonic() + LATE_SECONDS
                wait_until(lambda: agent.progress() or monotonic() > until)  # noqa: B023
                print(json.dumps(worker.is_empty()), flush=True)


def write() -> None:
    told, token = json.loads(sys.stdin.readline())
    handle = HANDLE.validate_python(told | {"secret": bytes.fromhex(told["secret"])})
    worker = new_worker()
    np.frombuffer(worker.pool.buffer, dtype=np.uint8)[:] = 7
    link = worker.backend.open_peer(handle)
    print("writing", flush=True)
    try:
        link.write(range(NUM_BLOCKS), range(NUM_BLOCKS), bytes.fromhex(token))
    except TransferError as error:
        print(str(error), flush=True)
        while True:  # others read its pool: what was begun goes on
            worker.backend._agent.progress()
    else:
        print("written", flush=True)


if __name__ == "__main__":
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    own() if sys.argv[1] == "owner" else write()
