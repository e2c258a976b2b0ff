"""CURVE for ZMQ over tcp: one secret file that all endpoints of a group share makes one key pair, which both sides use.

Whoever has the file may speak and listen; nobody else can do either. The pair is derived, so any secret will do:
`openssl rand -hex 32 > group.key; chmod 600 group.key`.
"""

from __future__ import annotations

import hashlib
import os
import stat
from dataclasses import dataclass, field

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from cores.config import ConfigError

MIN_SECRET_BYTES = 32
_PERSON = b"gateway curve"  # of this use of the secret: another one would derive another key


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

    def secure_client(self, socket: zmq.Socket[bytes]) -> None:
        """To be called before it connects."""
        socket.curve_publickey, socket.curve_secretkey, socket.curve_serverkey = self.public, self.secret, self.public

    def secure_server(self, socket: zmq.Socket[bytes]) -> None:
        """To be called before it binds, with an `authenticator` running."""
        socket.curve_publickey, socket.curve_secretkey, socket.curve_server = self.public, self.secret, True

    def authenticator(self, context: zmq.Context[zmq.Socket[bytes]]) -> ThreadAuthenticator:
        """Started; admits to the sockets of `context` whoever has the key. To be stopped before the context ends."""
        authenticator = ThreadAuthenticator(context)
        authenticator.start()
        authenticator.configure_curve_callback("*", credentials_provider=_Holders(self.public))
        return authenticator


class _Holders:
    """ZAP asks for each connection, with the public key that its other side has proven to hold the secret of."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._public
