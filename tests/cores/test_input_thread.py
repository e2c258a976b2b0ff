"""The input thread's lines: it says that it lives, and ends when nobody answers or something is missing."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Iterator

import pytest
import zmq

from cores.codec import decode, encode
from cores.config import FrontEndAddress
from cores.control_messages import EngineAlive
from cores.engine_loop import ClientCommand, Inbound, ThreadFailed
from cores.engine_sockets import LAUNCHER_TIMEOUT_S, InputThread, LauncherLostError, ZmqSockets
from cores.messages import AbortRequests, EngineReady, RankId

DEADLINE_S = 60.0

READY = EngineReady(
    rank_id=RankId(0, 1), pid=1, node="n", device="cpu", max_model_len=1, vocab_size=1, eos_token_ids=(), block_size=1,
    num_kv_blocks=1, max_num_seqs=1, max_num_batched_tokens=1,
)  # fmt: skip


@pytest.fixture
def launcher() -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind("tcp://127.0.0.1:0")
        yield router
        router.close(linger=0)


def test_an_engine_that_hears_nothing_of_a_launcher_on_another_node_says_so_and_ends(launcher: zmq.Socket[bytes]) -> None:
    inbox: queue.SimpleQueue[Inbound] = queue.SimpleQueue()
    clock = itertools.count(0.0, LAUNCHER_TIMEOUT_S / 8)  # time passes with every look at it
    sockets = ZmqSockets(RankId(0, 1))
    control = sockets.dealer(launcher.getsockopt_string(zmq.LAST_ENDPOINT))
    InputThread(sockets, inbox, control, [], READY, LAUNCHER_TIMEOUT_S, lambda: float(next(clock))).run()
    sockets.close()
    failed = inbox.get_nowait()
    assert isinstance(failed, ThreadFailed)
    assert isinstance(failed.error, LauncherLostError)
    said = [decode(launcher.recv_multipart()[1]) for _ in range(3)]
    assert said == [READY, EngineAlive(RankId(0, 1)), EngineAlive(RankId(0, 1))]


def test_an_engine_that_misses_a_command_of_a_front_end_says_so_and_ends(launcher: zmq.Socket[bytes]) -> None:
    inbox: queue.SimpleQueue[Inbound] = queue.SimpleQueue()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as front_end:
        front_end.bind("tcp://127.0.0.1:0")
        there = FrontEndAddress(index=0, input_address=front_end.getsockopt_string(zmq.LAST_ENDPOINT), output_address="")
        sockets = ZmqSockets(RankId(0, 1))
        control = sockets.dealer(launcher.getsockopt_string(zmq.LAST_ENDPOINT))
        thread = InputThread(sockets, inbox, control, [there], READY)
        thread.start()
        identity, _ = front_end.recv_multipart()
        for seq in (1, 2, 4):
            front_end.send_multipart([identity, encode(AbortRequests(seq, (9,)))])
        assert [inbox.get(timeout=DEADLINE_S) for _ in range(2)] == [ClientCommand(0, AbortRequests(i, (9,))) for i in (1, 2)]
        failed = inbox.get(timeout=DEADLINE_S)
        assert isinstance(failed, ThreadFailed)
        assert str(failed.error) == "1 command of front end 0 got lost: its connection broke"
        thread.join(DEADLINE_S)
        sockets.close()
        front_end.close(linger=0)
