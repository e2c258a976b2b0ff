"""The coordinator with real sockets, in this process and as a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from balancer.coordinator import MAX_BURST, DPCoordinator, bind, read_config
from cores.codec import decode, encode
from cores.control_messages import Shutdown
from cores.curve import GroupKey
from cores.messages import GroupLoads, MemberLeft, MemberReport, RankId, RankLoad
from cores.testing import ManualClock

DEADLINE_MS = 60_000
Dealers = Callable[[str], "zmq.Socket[bytes]"]
Members = list[tuple["zmq.Socket[bytes]", MemberReport]]


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context() as context:
        yield context


@pytest.fixture
def connect(context: zmq.Context[zmq.Socket[bytes]]) -> Iterator[Dealers]:
    sockets: list[zmq.Socket[bytes]] = []

    def connect(address: str) -> zmq.Socket[bytes]:
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RCVTIMEO, DEADLINE_MS)
        dealer.connect(address)
        sockets.append(dealer)
        return dealer

    yield connect
    for dealer in sockets:
        dealer.close()


@contextmanager
def coordinator_process(address: str = "tcp://127.0.0.1:0") -> Iterator[tuple[subprocess.Popen[str], str]]:
    with start_process(json.dumps({"report_address": address})) as process:
        try:
            yield process, bound_address(process)
        finally:
            process.kill()


def start_process(line: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-m", "balancer.coordinator"], stdin=pipe, stdout=pipe, stderr=pipe, text=True, bufsize=1
    )
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    return process


def bound_address(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("coordinator: listens on ")
    return line.split()[-1]


def make_report(member: str, rank: int, waiting: int = 0) -> MemberReport:
    return MemberReport(member, f"http://{member}", ((RankId(rank, 1), "ready", RankLoad(num_waiting=waiting)),))


def report(members: Members) -> None:
    for dealer, text in members:
        dealer.send(encode(text))


def receive_loads(dealer: zmq.Socket[bytes]) -> GroupLoads:
    loads = decode(dealer.recv())
    assert isinstance(loads, GroupLoads)
    return loads


def receive_until(dealer: zmq.Socket[bytes], ranks: set[int], members: Members) -> GroupLoads:
    """The first snapshot with exactly these ranks. A snapshot comes every second, so the number of tries is a deadline too.
    Members report again and again, as they do: one that is silent for three seconds expires."""
    for _ in range(400):
        report(members)
        loads = receive_loads(dealer)
        if {row[0].rank for row in loads.ranks} == ranks:
            return loads
    raise AssertionError(f"no snapshot with the ranks {ranks}; the last has {loads.ranks}")


def test_each_member_hears_of_all_and_of_those_who_leave(connect: Dealers) -> None:
    with coordinator_process() as (_, address):
        first, second = connect(address), connect(address)
        members = [(first, make_report("first", 0, waiting=3)), (second, make_report("second", 1, waiting=5))]
        for dealer in (first, second):
            loads = receive_until(dealer, {0, 1}, members)
            assert [(row[1], row[2].num_waiting, row[3]) for row in loads.ranks] == [
                ("ready", 3, "http://first"),
                ("ready", 5, "http://second"),
            ]
            assert all(0.0 <= row[4] < DEADLINE_MS / 1000 for row in loads.ranks)
        second.send(encode(MemberLeft("second")))
        receive_until(first, {0}, members[:1])


def test_member_that_falls_silent_expires(connect: Dealers) -> None:
    with coordinator_process() as (_, address):
        first, second = connect(address), connect(address)
        members = [(first, make_report("first", 0)), (second, make_report("second", 1))]
        receive_until(first, {0, 1}, members)
        receive_until(first, {0}, members[:1])


def test_flood_of_reports_does_not_starve_publication(connect: Dealers) -> None:
    with coordinator_process() as (_, address):
        listener, flooder = connect(address), connect(address)
        frames = [encode(make_report("flooder", 1, waiting)) for waiting in range(2)]
        stop = threading.Event()

        def flood() -> None:
            while not stop.is_set():
                for frame in frames:
                    flooder.send(frame)

        members = [(listener, make_report("listener", 0))]
        thread = threading.Thread(target=flood)
        thread.start()
        try:
            receive_until(listener, {0, 1}, members)
            seqs = set()
            for _ in range(5):
                report(members)
                seqs.add(receive_loads(listener).seq)
            assert len(seqs) == 5
        finally:
            stop.set()
            thread.join()


def test_malformed_frames_are_dropped_and_the_coordinator_lives(connect: Dealers) -> None:
    with coordinator_process() as (process, address):
        dealer = connect(address)
        dealer.send(b"\xc1 not a frame")
        dealer.send(b"")
        dealer.send_multipart([b"two", b"parts"])
        dealer.send(encode(Shutdown(1.0)))
        dealer.send(encode(make_report("a", 0)))
        assert receive_loads(dealer).ranks[0][0] == RankId(0, 1)
        assert process.poll() is None


def test_ends_with_its_parent() -> None:
    with coordinator_process() as (process, _):
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(timeout=DEADLINE_MS / 1000) == 0


def test_whoever_starts_it_at_a_terminal_is_told_what_to_type_and_can_end_it() -> None:
    keyboard, terminal = os.openpty()
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", "balancer.coordinator"]
    try:
        with subprocess.Popen(command, stdin=terminal, stdout=pipe, stderr=pipe, text=True) as process:
            try:
                assert process.stderr is not None
                hint = process.stderr.readline()
                example = json.loads(hint[hint.index("{") :])
                assert read_config(json.dumps(example)) == (example["report_address"], None)
                os.write(keyboard, b'{"report_address": "tcp://127.0.0.1:0"}\n')
                assert bound_address(process).startswith("tcp://127.0.0.1:")
                os.write(keyboard, b"\x04")  # Ctrl-D
                assert process.wait(timeout=DEADLINE_MS / 1000) == 0
            finally:
                process.kill()
    finally:
        os.close(keyboard)
        os.close(terminal)


def test_a_second_rank_0_says_once_that_another_group_has_the_port_and_waits_for_it() -> None:
    with coordinator_process() as (first, address), start_process(json.dumps({"report_address": address})) as second:
        try:
            assert second.stderr is not None
            line = second.stderr.readline()
            assert f"{address} is in use: another group, or another endpoint with rank 0 of this one, is here" in line
            assert "--data-parallel-rpc-port" in line
            first.kill()
            assert bound_address(second) == address
            out, err = second.communicate(timeout=DEADLINE_MS / 1000)  # ends with its stdin
            assert (second.returncode, out, err) == (0, "", "")
        finally:
            second.kill()


def test_one_that_waits_for_its_port_ends_with_its_parent() -> None:
    with coordinator_process() as (_, address), start_process(json.dumps({"report_address": address})) as second:
        try:
            assert second.stderr is not None
            assert "is in use" in second.stderr.readline()
            assert second.communicate(timeout=DEADLINE_MS / 1000) == ("", "")
            assert second.returncode == 0
        finally:
            second.kill()


def test_an_address_that_cannot_be_bound_is_one_clear_line_and_exit_code_1(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/nowhere/c"
    with start_process(json.dumps({"report_address": address})) as process:
        out, err = process.communicate(timeout=DEADLINE_MS / 1000)
        assert (process.returncode, out) == (1, "")
        assert err.startswith("coordinator: cannot bind: No such file or directory")
        assert err.count("\n") == 1


def test_endpoints_that_were_told_different_sizes_of_their_group_are_named_once(
    context: zmq.Context[zmq.Socket[bytes]], connect: Dealers, caplog: pytest.LogCaptureFixture
) -> None:
    with bind(context, "tcp://127.0.0.1:0") as router:
        coordinator = DPCoordinator(router, ManualClock())
        dealer = connect(router.getsockopt_string(zmq.LAST_ENDPOINT))
        small = [replace(make_report(name, rank), group_size=4) for rank, name in enumerate(("a", "b"))]
        large = replace(make_report("c", 5), group_size=8)
        for text in (make_report("older", 3), *small, large, large):
            dealer.send(encode(text))
            assert router.poll(DEADLINE_MS)
            coordinator.receive_burst()
    assert [record.getMessage() for record in caplog.records] == [
        "endpoints of one group were told different sizes: http://c has --data-parallel-size 8, http://a has 4"
    ]


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("nonsense", "the first line on stdin must be JSON, got 'nonsense"),
        ("[]", "report_address must be a ZMQ address, got None"),
        ('{"report_address": 5}', "report_address must be a ZMQ address, got 5"),
        ('{"report_address": "127.0.0.1:5"}', "report_address must be tcp://HOST:PORT or ipc://PATH, got '127.0.0.1:5'"),
        ('{"report_address": "tcp://10.0.0.7:5"}', "'tcp://10.0.0.7:5' is not a loopback address: that needs CURVE keys"),
        ('{"report_address": "tcp://0.0.0.0:5"}', "is not a loopback address"),
        ('{"report_address": "tcp://*:5"}', "is not a loopback address"),
    ],
)
def test_bad_configuration_is_named(line: str, error: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        read_config(line)
    assert error in str(caught.value)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:29550", "tcp://localhost:1", "tcp://[::1]:29550", "ipc:///run/x"])
def test_private_addresses_are_accepted(address: str) -> None:
    assert read_config(json.dumps({"report_address": address})) == (address, None)


def test_only_holders_of_the_key_are_heard_and_served(context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path) -> None:
    keys = []
    for name in ("group", "stranger"):
        path = tmp_path / name
        path.write_text(name * 10)
        path.chmod(0o600)
        keys.append((str(path), GroupKey.read(str(path))))
    (key_file, group_key), (_, strangers_key) = keys
    with start_process(json.dumps({"report_address": "tcp://127.0.0.1:0", "key_file": key_file})) as process:
        address = bound_address(process)
        dealers = [context.socket(zmq.DEALER) for _ in range(3)]
        names = ["keyless", "stranger", "member"]
        for dealer, key in zip(dealers, (None, strangers_key, group_key), strict=True):
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.setsockopt(zmq.RCVTIMEO, DEADLINE_MS)
            if key is not None:
                key.secure_client(dealer)
            dealer.connect(address)
        for rank, (dealer, name) in enumerate(zip(dealers[:2], names[:2], strict=True)):
            with contextlib.suppress(zmq.Again):  # it has been turned away already
                dealer.send(encode(make_report(name, rank)), zmq.NOBLOCK)
        try:
            while True:
                report([(dealers[2], make_report(names[2], 2))])
                loads = decode(dealers[2].recv())
                assert isinstance(loads, GroupLoads)
                assert [row[3] for row in loads.ranks] == ["http://member"]
                if loads.seq >= 3:
                    break
            assert not any(dealer.poll(0) for dealer in dealers[:2])
        finally:
            process.kill()
            for dealer in dealers:
                dealer.close()


def test_bad_configuration_ends_the_process_with_one_line() -> None:
    process = start_process('{"report_address": "tcp://192.0.2.1:5"}')
    out, err = process.communicate(timeout=DEADLINE_MS / 1000)
    assert (process.returncode, out, err.count("\n")) == (1, "", 1)


def test_burst_is_bounded_so_that_the_timer_gets_its_turn(context: zmq.Context[zmq.Socket[bytes]], connect: Dealers) -> None:
    with bind(context, "inproc://coordinator") as router:
        coordinator = DPCoordinator(router, ManualClock())
        dealer = connect("inproc://coordinator")
        for waiting in range(MAX_BURST + 10):
            dealer.send(encode(make_report("a", 0, waiting)))
        dealer.send(b"junk")
        assert coordinator.receive_burst() == MAX_BURST
        assert coordinator.receive_burst() == 11
        assert coordinator.receive_burst() == 0
        assert coordinator.num_malformed == 1
