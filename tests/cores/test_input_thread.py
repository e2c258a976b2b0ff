"""The input thread's line to the launcher: it says that it lives, and ends when nobody answers."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Iterator

import pytest
import zmq

from cores.codec import decode
from cores.engine_loop import Inbound, ThreadFailed
from cores.engine_sockets import LAUNCHER_TIMEOUT_S, InputThread, LauncherLostError, ZmqSockets
from cores.messages import EngineAlive, EngineReady, RankId

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
