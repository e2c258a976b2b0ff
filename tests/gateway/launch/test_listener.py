from __future__ import annotations

import contextlib
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.config import ServerConfig
from gateway.launch import listener as listening
from gateway.launch.listener import ListenError, listen


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="gw-", dir="/tmp") as name:
        yield Path(name)


def test_port_0_picks_one_and_the_url_says_which() -> None:
    config = ServerConfig(port=0)
    listener = listen(config)
    port = listener.getsockname()[1]
    assert port > 0
    assert listening.url(listener, config) == f"http://127.0.0.1:{port}"
    listening.close(listener)


def test_taken_port_is_one_clear_line() -> None:
    first = listen(ServerConfig(port=0))
    port = first.getsockname()[1]
    with pytest.raises(ListenError, match=f"port {port} on 127.0.0.1 is in use"):
        listen(ServerConfig(port=port))
    listening.close(first)


def test_unknown_host_is_named() -> None:
    with pytest.raises(ListenError, match=r"cannot listen on --host 'no\.such\.host\.invalid'"):
        listen(ServerConfig(host="no.such.host.invalid", port=0))


def test_url_of_ipv6_and_tls() -> None:
    config = ServerConfig(host="::1", port=0, ssl_certfile="c", ssl_keyfile="k")
    listener = listen(config)
    assert listening.url(listener, config) == f"https://[::1]:{listener.getsockname()[1]}"
    listening.close(listener)


def test_unix_socket_is_removed_at_the_end(directory: Path) -> None:
    config = ServerConfig(uds=str(directory / "s"))
    listener = listen(config)
    assert listening.url(listener, config) == f"unix:{directory / 's'}"
    assert (directory / "s").is_socket()
    listening.close(listener)
    assert not (directory / "s").exists()


def test_unix_socket_of_a_killed_server_is_replaced_and_that_of_a_living_one_is_not(directory: Path) -> None:
    config = ServerConfig(uds=str(directory / "s"))
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(directory / "s"))
    listener = listen(config)
    with pytest.raises(ListenError, match="exists and is in use"):
        listen(config)
    listening.close(listener)


def test_file_that_is_no_socket_is_not_touched(directory: Path) -> None:
    (directory / "s").write_text("mine")
    with pytest.raises(ListenError):
        listen(ServerConfig(uds=str(directory / "s")))
    assert (directory / "s").read_text() == "mine"


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's socket options")
def test_a_client_that_stops_reading_costs_the_kernel_little_memory_and_not_for_ever() -> None:
    listener = listen(ServerConfig(port=0))
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(listener.getsockname())
        with listener.accept()[0] as connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 120_000
            connection.setblocking(False)
            num_bytes = 0
            with contextlib.suppress(BlockingIOError):
                while num_bytes < 1024 * 1024:  # without a bound the kernel takes three times as much
                    num_bytes += connection.send(bytes(1000))
            assert num_bytes < 256 * 1024
    listening.close(listener)
