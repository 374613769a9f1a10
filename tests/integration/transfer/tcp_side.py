"""One host of a ``tcp`` link, for a test that gives each its own network namespace.

``owner HOST``: exports a pool on HOST with every block granted, prints handle and token, and for a
line of input revokes the grant and prints how many streams are left.

``writer``: reads such a handle and token, then writes everything over and over; prints ``written``
after each time, at last the seconds that the failed one took and its error.
"""

import json
import logging
import sys
from time import monotonic

import structlog

from common.errors import TransferError
from common.ids import TransferId
from common.kv.pool import KVPool
from common.messages.fields import TcpPoolHandle
from common.transfer.tcp import TcpBackend
from common.transfer.tcp_export import TcpExport

NUM_BLOCKS = 32
BLOCK = 1024 * 1024
STALL_SECONDS = 0.5
TRANSFER = TransferId("tr-a")


def own(host: str) -> None:
    export = TcpExport(KVPool(NUM_BLOCKS, BLOCK), STALL_SECONDS, host=host)
    token = export.grant(TRANSFER, range(NUM_BLOCKS))
    handle = export.handle()
    print(json.dumps([handle.host, handle.port, handle.secret.hex(), token.hex()]), flush=True)
    for _ in sys.stdin:
        export.revoke(TRANSFER)
        print(export.num_streams, flush=True)


def write() -> None:
    host, port, secret, token = json.loads(sys.stdin.readline())
    handle = TcpPoolHandle(
        kind="tcp",
        host=host,
        port=port,
        secret=bytes.fromhex(secret),
        num_blocks=NUM_BLOCKS,
        block_bytes=BLOCK,
        num_bytes=NUM_BLOCKS * BLOCK,
    )
    backend = TcpBackend(KVPool(NUM_BLOCKS, BLOCK), STALL_SECONDS, num_streams=2)
    link = backend.open_peer(handle)
    blocks = range(NUM_BLOCKS)
    while True:
        start = monotonic()
        try:
            link.write(blocks, blocks, bytes.fromhex(token))
        except TransferError as error:
            print(json.dumps([monotonic() - start, str(error)]), flush=True)
            return
        print("written", flush=True)


if __name__ == "__main__":
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    if sys.argv[1] == "owner":
        own(sys.argv[2])
    else:
        write()
