"""What a stream could carry: a bare stream between two sockets of this process."""

import socket
import threading
import time

from common.transfer.tcp_socket import DataSocket

PIECE_BYTES = 1024 * 1024
NUM_REPEATS = 3
STALL_SECONDS = 5.0


def measure_limit(num_bytes: int) -> float:
    """Return the best of a few turns of a bare loopback stream, in GB/s.

    No network that this host is attached to is faster than its own processor moves bytes through
    the kernel; how much slower it may be, only its operator knows.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = DataSocket(socket.create_connection(listener.getsockname()), STALL_SECONDS)
        receiver = DataSocket(listener.accept()[0], STALL_SECONDS)
    source, target = memoryview(bytearray(num_bytes)), memoryview(bytearray(PIECE_BYTES))
    try:
        return max(_turn(sender, receiver, source, target) for _ in range(NUM_REPEATS))
    finally:
        sender.close()
        receiver.close()


def _turn(
    sender: DataSocket, receiver: DataSocket, source: memoryview, target: memoryview
) -> float:
    thread = threading.Thread(target=sender.send, args=([source],), name="tcp-measure")
    start = time.perf_counter()
    thread.start()
    left = len(source)
    while left:
        piece = target[: min(left, len(target))]
        receiver.receive([piece])
        left -= len(piece)
    thread.join()
    return len(source) / (time.perf_counter() - start) / 1e9
