"""The few functions of NCCL's library that transport ``nccl`` calls, with its errors as ours.

CuPy wraps NCCL too, but only with calls that wait for the peer without a deadline, and without the
bound on how much of the device a communicator takes.
"""

import ctypes
from collections.abc import Callable, Sequence

from common.errors import ConfigError, TransferError
from common.transfer.nccl_driver import UNIQUE_ID_BYTES, Piece

LIBRARY = "libnccl.so.2"
"""Found again by this name where torch has loaded it already."""
MIN_VERSION = 21801
NUM_RANKS = 2

SUCCESS = 0
IN_PROGRESS = 7
_UINT8 = 1
_UNDEFINED = -(2**31)
_MAGIC = 0xCAFEBEEF


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * UNIQUE_ID_BYTES)]


class NcclConfig(ctypes.Structure):
    """``ncclConfig_t`` as of version 2.18.1, which every later one takes by size and version."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
        ("split_share", ctypes.c_int),
    ]


def nonblocking_config(max_ctas: int) -> NcclConfig:
    """Return a communicator's configuration: no call waits, and ``max_ctas`` bounds its kernels."""
    return NcclConfig(
        size=ctypes.sizeof(NcclConfig),
        magic=_MAGIC,
        version=MIN_VERSION,
        blocking=0,
        cga_cluster_size=_UNDEFINED,
        min_ctas=_UNDEFINED,
        max_ctas=max_ctas,
        net_name=None,
        split_share=_UNDEFINED,
    )


class NcclLibrary:
    """The loaded library. A communicator is the number that NCCL gave it."""

    def __init__(self, name: str = LIBRARY) -> None:
        """Load it; ConfigError where it is missing or too old."""
        try:
            self._library = ctypes.CDLL(name)
            self._declare()
            version = ctypes.c_int()
            self._call("asking for the version", self._library.ncclGetVersion, version)
        except (OSError, AttributeError) as error:
            raise ConfigError(f"transport nccl needs NCCL ({name}): {error}") from error
        self.version = version.value
        if self.version < MIN_VERSION:
            raise ConfigError(f"transport nccl needs NCCL 2.18.1 or later, not {self.version}")

    def new_unique_id(self) -> bytes:
        """Return a new unique id; this process listens for the ranks that join it."""
        unique_id = _UniqueId()
        self._call("making a unique id", self._library.ncclGetUniqueId, unique_id)
        return bytes(unique_id)

    def begin_join(self, unique_id: bytes, rank: int, config: NcclConfig) -> int:
        """Begin to join on the thread's current device; return the communicator."""
        communicator = ctypes.c_void_p()
        code = self._library.ncclCommInitRankConfig(
            ctypes.byref(communicator),
            NUM_RANKS,
            _UniqueId.from_buffer_copy(unique_id),
            rank,
            ctypes.byref(config),
        )
        self._check("joining", code)
        if communicator.value is None:
            raise TransferError("NCCL: joining gave no communicator")
        return communicator.value

    def is_ready(self, communicator: int) -> bool:
        """Whether nothing that was begun is still in progress; TransferError when it failed."""
        state = ctypes.c_int()
        self._check(
            "asking for errors",
            self._library.ncclCommGetAsyncError(communicator, ctypes.byref(state)),
        )
        self._check("moving bytes", state.value)
        return state.value == SUCCESS

    def begin_group(
        self,
        communicator: int,
        pieces: Sequence[Piece],
        peer: int,
        *,
        stream: int,
        is_send: bool,
    ) -> None:
        """Enqueue sends, or receives, of pieces (address, bytes) on the stream as one group."""
        name = "sending" if is_send else "receiving"
        begin = self._library.ncclSend if is_send else self._library.ncclRecv
        self._check(name, self._library.ncclGroupStart())
        code = SUCCESS
        for address, num_bytes in pieces:
            code = begin(address, num_bytes, _UINT8, peer, communicator, stream)
            if code not in (SUCCESS, IN_PROGRESS):
                break
        ended = self._library.ncclGroupEnd()
        self._check(name, code)
        self._check(name, ended)

    def abort(self, communicator: int) -> None:
        """End it, and every call and kernel that it has under way; it must not be used again."""
        self._library.ncclCommAbort(communicator)

    def _declare(self) -> None:
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        library = self._library
        library.ncclGetErrorString.restype = ctypes.c_char_p
        library.ncclGetLastError.restype = ctypes.c_char_p
        library.ncclGetLastError.argtypes = [pointer]
        library.ncclCommInitRankConfig.argtypes = [pointer, number, _UniqueId, number, pointer]
        library.ncclCommGetAsyncError.argtypes = [pointer, pointer]
        library.ncclCommAbort.argtypes = [pointer]
        for move in (library.ncclSend, library.ncclRecv):
            move.argtypes = [pointer, size, number, number, pointer, pointer]

    def _call(
        self, doing: str, function: Callable[..., int], result: ctypes.c_int | _UniqueId
    ) -> None:
        self._check(doing, function(ctypes.byref(result)))

    def _check(self, doing: str, code: int) -> None:
        if code in (SUCCESS, IN_PROGRESS):
            return
        text: bytes = self._library.ncclGetErrorString(code)
        last: bytes = self._library.ncclGetLastError(None) or b""
        raise TransferError(
            f"NCCL: {doing}: {text.decode(errors='replace')}"
            + (f" ({last.decode(errors='replace').strip()})" if last.strip() else "")
        )
