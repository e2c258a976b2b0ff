"""The group's coordinator as a process: `CoordinatorState` behind one ROUTER socket.

Members (front ends and external-LB endpoints) send `MemberReport` and `MemberLeft` from a DEALER and get `GroupLoads` back.
Told `{"report_address": "tcp://127.0.0.1:29550", "key_file": null}` as one line on stdin; when stdin ends its parent has died,
and so does it. An address that somebody else has it waits for. With a key file only those who have the same one can speak to it
(`cores/curve.py`). Whoever starts it at a terminal types that line, and ends it with Ctrl-C or Ctrl-D.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from urllib.parse import urlsplit

import zmq

from balancer.coordinator_state import CoordinatorState
from cores import codec
from cores.config import ConfigError, is_loopback
from cores.curve import GroupKey
from cores.log import is_worth_a_line, set_up_logging
from cores.messages import MemberLeft, MemberReport

logger = logging.getLogger(__name__)

EXAMPLE_CONFIG = {"report_address": "tcp://127.0.0.1:29550", "key_file": None}
BIND_INTERVAL_S = 1.0
MAX_BURST = 64  # frames read before the timer gets its turn
_MAX_REPORT_BYTES = 4 * 1024 * 1024
_MAX_QUEUED_SNAPSHOTS = 4  # a stopped member misses snapshots; each is whole, so the next one makes up for it


class DPCoordinator:
    def __init__(self, router: zmq.Socket[bytes], clock: Callable[[], float]) -> None:
        self.num_malformed = 0
        self._num_odd_sizes = 0
        self._router = router
        self._clock = clock
        self._state = CoordinatorState(clock())
        self._identities: dict[str, bytes] = {}

    def run(self, parent_fd: int) -> None:
        """Until `parent_fd` reads end of file."""
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(parent_fd, zmq.POLLIN)
        while True:
            events = dict(poller.poll(int(self._state.wait_s(self._clock()) * 1000) + 1))
            if parent_fd in events and not os.read(parent_fd, 4096):
                return
            self.receive_burst()
            self.publish_due()

    def receive_burst(self) -> int:
        """Reads what is there, but at most `MAX_BURST` frames: input that never ends must not keep the timer from its turn."""
        for num_read in range(MAX_BURST):
            try:
                parts = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return num_read
            self._on_frame(parts)
        return MAX_BURST

    def publish_due(self) -> None:
        publish = self._state.on_timer(self._clock())
        if publish is None:
            return
        self._identities = {member: self._identities[member] for member in publish.members}
        frame = codec.encode(publish.loads)
        for identity in self._identities.values():
            # The ROUTER drops what a member cannot take, gone or full: right for a snapshot.
            self._router.send_multipart([identity, frame], zmq.NOBLOCK)

    def _on_frame(self, parts: list[bytes]) -> None:
        try:
            identity, frame = parts
            message = codec.decode(frame)
        except ValueError as error:  # includes `CodecError`
            self._count_malformed(str(error))
            return
        if isinstance(message, MemberReport):
            if message.member not in self._identities:
                self._check_size(message)
            self._identities[message.member] = identity
            self._state.on_report(message, self._clock())
        elif isinstance(message, MemberLeft):
            self._state.on_left(message.member)
        else:
            self._count_malformed(f"{type(message).__name__} is not for the coordinator")

    def _check_size(self, report: MemberReport) -> None:
        """Of a newcomer. It is let in whatever it was told: we only inform."""
        other = self._state.of_another_size(report)
        if other is None:
            return
        self._num_odd_sizes += 1
        if is_worth_a_line(self._num_odd_sizes):
            logger.warning(
                "endpoints of one group were told different sizes: %s has --data-parallel-size %d, %s has %d",
                report.url, report.group_size, other.url, other.group_size,
            )  # fmt: skip

    def _count_malformed(self, why: str) -> None:
        self.num_malformed += 1
        if is_worth_a_line(self.num_malformed):
            logger.warning("dropped malformed frame %d: %s", self.num_malformed, why)


def read_config(line: str) -> tuple[str, GroupKey | None]:
    """The address to bind and the key, from the configuration line. Raises `ValueError`."""
    try:
        config = json.loads(line)
    except ValueError as error:
        raise ValueError(f"the first line on stdin must be JSON, got {line!r}") from error
    address = config.get("report_address") if isinstance(config, dict) else None
    if not isinstance(address, str):
        raise ValueError(f"report_address must be a ZMQ address, got {address!r}")
    key_file = config.get("key_file")
    check_address(address, has_key=key_file is not None)
    try:
        return address, None if key_file is None else GroupKey.read(key_file)
    except ConfigError as error:
        raise ValueError(str(error)) from error


def read_log_settings(line: str) -> dict[str, str]:
    """Of the same line, whatever else is wrong with it."""
    try:
        config = json.loads(line)
    except ValueError:
        return {}
    if not isinstance(config, dict):
        return {}
    names = {"log_level": "level", "log_format": "log_format"}
    return {parameter: str(config[name]) for name, parameter in names.items() if name in config}


def check_address(address: str, *, has_key: bool) -> None:
    """Raises `ValueError` for an address where strangers could speak to us: without keys, nothing proves who sent a frame."""
    url = urlsplit(address)
    if url.scheme == "ipc":
        return
    if url.scheme != "tcp" or url.hostname is None:
        raise ValueError(f"report_address must be tcp://HOST:PORT or ipc://PATH, got {address!r}")
    if not has_key and not is_loopback(url.hostname):
        raise ValueError(f"report_address {address!r} is not a loopback address: that needs CURVE keys, and none are given")


def bind(context: zmq.Context[zmq.Socket[bytes]], address: str, key: GroupKey | None = None) -> zmq.Socket[bytes]:
    router = context.socket(zmq.ROUTER)
    if key is not None:
        key.secure_server(router)
    router.setsockopt(zmq.LINGER, 0)
    router.setsockopt(zmq.MAXMSGSIZE, _MAX_REPORT_BYTES)
    router.setsockopt(zmq.SNDHWM, _MAX_QUEUED_SNAPSHOTS)
    router.setsockopt(zmq.IPV6, int("[" in address))
    try:
        router.bind(address)
    except zmq.ZMQError:
        router.close()
        raise
    return router


def bind_when_free(
    context: zmq.Context[zmq.Socket[bytes]], address: str, key: GroupKey | None, parent_fd: int
) -> zmq.Socket[bytes] | None:
    """None when `parent_fd` reads end of file before."""
    has_said = False
    while True:
        try:
            return bind(context, address, key)
        except zmq.ZMQError as error:
            if error.errno != errno.EADDRINUSE:
                raise
        if not has_said:
            has_said = True
            logger.warning(
                "%s is in use: another group, or another endpoint with rank 0 of this one, is here. Each group needs its own "
                "--data-parallel-rpc-port. Serving goes on without this coordinator, which waits for the address", address,
            )  # fmt: skip
        if select.select([parent_fd], [], [], BIND_INTERVAL_S)[0] and not os.read(parent_fd, 4096):
            return None


def main() -> int:
    is_at_terminal = sys.stdin.isatty()
    # Ctrl-C goes to the whole process group; a parent drains first and then closes our stdin.
    signal.signal(signal.SIGINT, signal.SIG_DFL if is_at_terminal else signal.SIG_IGN)
    if is_at_terminal:
        print(f"coordinator: waits for a line like {json.dumps(EXAMPLE_CONFIG)}", file=sys.stderr)
    line = sys.stdin.readline()
    set_up_logging(**read_log_settings(line))
    try:
        address, key = read_config(line)
    except ValueError as error:
        print(f"coordinator: bad configuration: {error}", file=sys.stderr)
        return 1
    with zmq.Context() as context, contextlib.ExitStack() as stack:
        if key is not None:
            stack.callback(key.authenticator(context).stop)
        try:
            router = bind_when_free(context, address, key, sys.stdin.fileno())
        except zmq.ZMQError as error:
            print(f"coordinator: cannot bind: {error}", file=sys.stderr)
            return 1
        if router is None:
            return 0
        with router:
            print(f"coordinator: listens on {router.getsockopt_string(zmq.LAST_ENDPOINT)}", flush=True)
            DPCoordinator(router, time.monotonic).run(sys.stdin.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())
