"""A process that owns a poisoned pool: prints its handle, then verifies what it is told to.

Each line of input is a JSON list ``[block ids, checksums]``; the answer is the index of the first
wrong block, or null.
"""

import json
import sys

import numpy as np

from common.kv.pool import KVPool
from common.transfer.verify import verify_blocks

POISON = 0x5A


def main(num_blocks: int, block_bytes: int) -> None:
    pool = KVPool(num_blocks, block_bytes)
    np.frombuffer(pool.buffer, dtype=np.uint8)[:] = POISON
    handle = pool.handle()
    print(json.dumps([handle.pid, handle.fd, handle.num_bytes, handle.nonce.hex()]), flush=True)
    for line in sys.stdin:
        block_ids, checksums = json.loads(line)
        wrong = verify_blocks(pool, block_ids, np.array(checksums, dtype=np.uint64))
        print(json.dumps(wrong), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
