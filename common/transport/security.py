"""CURVE on ``tcp://`` sockets: keys from a folder, and an allow-list of peers.

A key folder holds this host's key pair (``node.key``, ``node.key_secret``) and, in ``allowed/``,
the public keys of all hosts that may connect; ``flowpath keygen`` makes one. An endpoint on TCP
names the key of whoever binds it, ``tcp://10.0.0.1:7400?key=<64 hex digits>``, so a connecting side
knows whom it must meet. Keys travel only over channels that are secured already.
"""

import re
import stat
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import structlog
import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from common.errors import ConfigError

SECRET_NAME = "node.key_secret"  # noqa: S105  # a file's name
PUBLIC_NAME = "node.key"
ALLOWED_NAME = "allowed"
ZAP_DOMAIN = "flowpath"
TELL_AGAIN_SECONDS = 5.0
"""How often a stranger that keeps trying is told of."""
MAX_STRANGERS_TOLD = 32
READ_AGAIN_SECONDS = 1.0
"""How often the allow-list is read again for strangers, at most."""
_TCP = re.compile(r"^(tcp://[^?]+)\?key=([0-9a-f]{64})$")

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Keys:
    """One host's key pair and the public keys that it lets in, as raw 32 bytes."""

    public: bytes
    secret: bytes
    allowed: frozenset[bytes]
    folder: Path

    @classmethod
    def load(cls, folder: Path) -> "Keys":
        """Read a key folder. ConfigError names the file that is missing, open to others or bad."""
        path = folder / SECRET_NAME
        try:
            mode = stat.S_IMODE(path.stat().st_mode)
        except (FileNotFoundError, NotADirectoryError):
            raise ConfigError(
                f"{path}: no such key; make one with `flowpath keygen {folder}` and exchange "
                f"{PUBLIC_NAME} files with the other hosts"
            ) from None
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
        if mode & 0o077:
            raise ConfigError(f"{path}: others can read this secret; chmod 600 it")
        public, secret = _read(path)
        if secret is None:
            raise ConfigError(f"{path}: holds no secret key")
        return cls(public, secret, read_allowed(folder), folder)


def read_allowed(folder: Path) -> frozenset[bytes]:
    """Read the public keys that a key folder lets in. ConfigError names a file that is none."""
    return frozenset(_read(one)[0] for one in sorted((folder / ALLOWED_NAME).glob("*.key")))


def make_keys(folder: Path) -> Path:
    """Make a key folder that lets itself in, and return the public key's file.

    Copied to other hosts as it is, it is the key of the whole cluster. ConfigError when a key is
    there already: it is never overwritten.
    """
    if (folder / SECRET_NAME).exists():
        raise ConfigError(f"{folder / SECRET_NAME}: a key is here already; it is kept")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    zmq.auth.create_certificates(folder, PUBLIC_NAME.removesuffix(".key"))
    (folder / SECRET_NAME).chmod(0o600)
    (folder / ALLOWED_NAME).mkdir(exist_ok=True)
    public = folder / PUBLIC_NAME
    (folder / ALLOWED_NAME / PUBLIC_NAME).write_bytes(public.read_bytes())
    return public


def read_public_key(path: Path) -> bytes:
    """Read a public key's 32 bytes. ConfigError when the file is not one."""
    return _read(path)[0]


def _read(path: Path) -> tuple[bytes, bytes | None]:
    try:
        public, secret = zmq.auth.load_certificate(path)
        return z85.decode(public), None if secret is None else z85.decode(secret)
    except (OSError, ValueError, AssertionError) as error:
        raise ConfigError(f"{path}: not a key file: {error}") from error


def shown_key(public: bytes) -> str:
    """Return a public key as log lines and its own file show it."""
    return str(z85.encode(public).decode())


def with_key(endpoint: str, public: bytes) -> str:
    """Return a TCP endpoint that names its binder's key."""
    return f"{endpoint}?key={public.hex()}"


def split_key(endpoint: str) -> tuple[str, bytes | None]:
    """Return an endpoint's address and, on TCP, its binder's key.

    ConfigError for a TCP endpoint without a key: nothing is spoken unsecured between hosts.
    """
    if not endpoint.startswith("tcp://"):
        return endpoint, None
    match = _TCP.match(endpoint)
    if match is None:
        raise ConfigError(f"{endpoint}: names no key (tcp://address:port?key=64 hex digits)")
    return match[1], bytes.fromhex(match[2])


class Guard:
    """Lets peers in by key. One for a context, made before its first binding socket."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", keys: Keys) -> None:
        self._folder = keys.folder
        self._allowed = keys.allowed
        self._read_at = monotonic()
        self._told_at: dict[bytes, float] = {}
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(domain=ZAP_DOMAIN, credentials_provider=self)

    def callback(self, _domain: str, key: bytes) -> bool:
        """Answer libzmq: may the holder of this key connect?

        A stranger may have been let in since the start, so for one the folder is read again. To
        shut a peer out, the process must start anew.
        """
        is_allowed = z85.decode(key) in self._allowed or self._is_new(z85.decode(key))
        if not is_allowed:
            self._tell(key)
        return is_allowed

    def _is_new(self, public: bytes) -> bool:
        now = monotonic()
        if now - self._read_at < READ_AGAIN_SECONDS:
            return False
        self._read_at = now
        try:
            self._allowed |= read_allowed(self._folder)
        except ConfigError as error:
            log.error("allow_list_unreadable", reason=str(error))
        return public in self._allowed

    def _tell(self, key: bytes) -> None:
        """Log a stranger, but not each of its tries, nor more strangers than a log can bear."""
        now = monotonic()
        self._told_at = {k: at for k, at in self._told_at.items() if now - at < TELL_AGAIN_SECONDS}
        if key not in self._told_at and len(self._told_at) < MAX_STRANGERS_TOLD:
            self._told_at[key] = now
            log.warning("key_rejected", key=key.decode(), reason="it is not in the allow-list")

    def close(self) -> None:
        """Stop; nobody new is let in."""
        self._authenticator.stop()


def secure_binder(socket: "zmq.Socket[bytes]", keys: Keys) -> None:
    """Make a binding socket speak CURVE."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
    socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN.encode())


def secure_connector(socket: "zmq.Socket[bytes]", keys: Keys, server: bytes) -> None:
    """Make a connecting socket speak CURVE with the holder of ``server``."""
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
    socket.setsockopt(zmq.CURVE_SERVERKEY, server)
