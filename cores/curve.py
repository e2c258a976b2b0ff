"""CURVE for ZMQ over tcp: one key pair that all who may speak to each other share, and that both sides of a connection use.

Whoever has it may speak and listen; nobody else can do either. The launcher makes one for its endpoint, at each start.
Endpoints of a group derive theirs from a file, so any secret will do: `openssl rand -hex 32 > group.key; chmod 600 group.key`.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from cores.config import ConfigError, Transport

MIN_SECRET_BYTES = 32
_PERSON = b"gateway curve"  # of this use of the secret: another one would derive another key

# A peer whose node is gone says no goodbye. The kernel finds out by itself, and gives back what it keeps for it, within
# KEEPALIVE_IDLE_S + 3 × KEEPALIVE_INTERVAL_S when nothing is under way, and after MAX_UNACKNOWLEDGED_MS when something is.
KEEPALIVE_IDLE_S = 15
KEEPALIVE_INTERVAL_S = 5
MAX_UNACKNOWLEDGED_MS = 30_000
CONNECT_TIMEOUT_MS = 2_000  # then the next try: a node that is just coming up answers none of the first


@dataclass(frozen=True, slots=True)
class GroupKey:
    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def read(cls, path: str) -> GroupKey:
        """Raises `ConfigError`."""
        try:
            with open(path, "rb") as file:
                mode, text = os.fstat(file.fileno()).st_mode, file.read().strip()
        except OSError as error:
            raise ConfigError(f"--data-parallel-key-file: cannot read {path}: {error.strerror}") from error
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ConfigError(f"--data-parallel-key-file: others than its owner may read {path}: chmod 600 it")
        if len(text) < MIN_SECRET_BYTES:
            raise ConfigError(
                f"--data-parallel-key-file: {path} must hold a secret of at least {MIN_SECRET_BYTES} characters,"
                f" got {len(text)} (openssl rand -hex 32 makes one)"
            )
        secret = z85.encode(hashlib.blake2b(text, digest_size=32, person=_PERSON).digest())
        return cls(zmq.curve_public(secret), secret)

    @classmethod
    def make(cls) -> GroupKey:
        return cls(*zmq.curve_keypair())

    @classmethod
    def of(cls, transport: Transport) -> GroupKey | None:
        """None where Unix sockets need none."""
        if transport.curve_secret is None:
            return None
        secret = transport.curve_secret.encode()
        return cls(zmq.curve_public(secret), secret)

    def secure_client(self, socket: zmq.Socket[bytes]) -> None:
        """To be called before it connects."""
        socket.curve_publickey, socket.curve_secretkey, socket.curve_serverkey = self.public, self.secret, self.public
        socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_TIMEOUT_MS)
        _prepare_for_tcp(socket)

    def secure_server(self, socket: zmq.Socket[bytes]) -> None:
        """To be called before it binds, with an `authenticator` running."""
        socket.curve_publickey, socket.curve_secretkey, socket.curve_server = self.public, self.secret, True
        _prepare_for_tcp(socket)

    def authenticator(self, context: zmq.Context[zmq.Socket[bytes]]) -> ThreadAuthenticator:
        """Started; admits to the sockets of `context` whoever has the key. To be stopped before the context ends."""
        authenticator = ThreadAuthenticator(context)
        authenticator.start()
        authenticator.configure_curve_callback("*", credentials_provider=_Holders(self.public))
        return authenticator


def guard(context: zmq.Context[zmq.Socket[bytes]], key: GroupKey | None) -> Callable[[], None]:
    """Admits the holders of `key` to the sockets of `context`; to be called before one is bound. Returns what ends it, which is
    to be called before the context ends."""
    return (lambda: None) if key is None else key.authenticator(context).stop


def _prepare_for_tcp(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_IDLE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_INTERVAL_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
    socket.setsockopt(zmq.TCP_MAXRT, MAX_UNACKNOWLEDGED_MS)


class _Holders:
    """ZAP asks for each connection, with the public key that its other side has proven to hold the secret of."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._public
