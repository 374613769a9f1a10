"""One side of NIXL for ``transfer_peers``, run by the interpreter of NIXL's own environment.

Imports nothing of this project. Talks JSON lines: prints its metadata and address; then each line
of input is a list [peer's metadata, peer's address] or a case to write, answered with the seconds.
"""

import base64
import json
import random
import sys
import time

import numpy as np
from nixl_cu12._api import (  # type: ignore[import-not-found]  # lives in its own environment
    nixl_agent,
    nixl_agent_config,
)

DEVICE = 0


def descriptors(address: int, num_bytes: int, count: int, seed: int) -> list[tuple[int, int, int]]:
    """Cut the memory into ``count`` equal fragments, in the order that ``seed`` gives."""
    size = num_bytes // count
    order = random.Random(seed).sample(range(count), count)
    return [(address + index * size, size, DEVICE) for index in order]


def answer(value: object) -> None:
    print(json.dumps(value), flush=True)


def main(name: str, num_bytes: int) -> None:
    agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
    memory = np.zeros(num_bytes, dtype=np.uint8)
    memory[:] = np.frombuffer(random.Random(0).randbytes(4096), dtype=np.uint8).repeat(
        num_bytes // 4096
    )
    address = int(memory.ctypes.data)
    agent.register_memory([(address, num_bytes, DEVICE, "")], "DRAM")
    answer([base64.b64encode(agent.get_agent_metadata()).decode(), address])
    metadata, peer_address = json.loads(sys.stdin.readline())
    if metadata is None:  # the target only keeps its memory alive
        sys.stdin.read()
        return
    peer = agent.add_remote_agent(base64.b64decode(metadata))
    handles = {}
    for line in sys.stdin:
        count = json.loads(line)
        if count not in handles:
            own = descriptors(address, num_bytes, count, 1)
            theirs = descriptors(peer_address, num_bytes, count, 2)
            handles[count] = agent.initialize_xfer(
                "WRITE",
                agent.get_xfer_descs(own, "DRAM"),
                agent.get_xfer_descs(theirs, "DRAM"),
                peer,
                b"",
            )
        start = time.perf_counter()
        state = agent.transfer(handles[count])
        while state == "PROC":
            state = agent.check_xfer_state(handles[count])
        seconds = time.perf_counter() - start
        answer(seconds if state == "DONE" else state)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
