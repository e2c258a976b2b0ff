"""The output thread over fake sockets: a front end that does not read costs the others nothing."""

from __future__ import annotations

import queue
from array import array
from dataclasses import replace

import zmq

from cores.codec import Message, decode
from cores.config import FrontEndAddress
from cores.engine_loop import (
    ClientOverflow,
    EngineStatus,
    FrontEndAttached,
    Inbound,
    LastWords,
    LoopTurn,
    Outbound,
    ThreadFailed,
    UtilityReply,
)
from cores.engine_sockets import OutputThread
from cores.gaps import split_number
from cores.messages import (
    EngineCoreDead,
    EngineCoreOutputs,
    EngineState,
    Heartbeat,
    LoadReport,
    RankId,
    RankLoad,
    SchedulerStats,
    UtilityResult,
)
from cores.testing import ManualClock

RANK = RankId(0, 1)


class FakePush:
    """Takes nothing for its first `num_refusals` sends."""

    def __init__(self, num_refusals: int = 0) -> None:
        self.sent: list[Message] = []
        self.is_closed = False
        self._num_refusals = num_refusals

    def send_multipart(self, frames: list[bytes], flags: int) -> None:
        assert flags == zmq.NOBLOCK
        if self._num_refusals > 0:
            self._num_refusals -= 1
            raise zmq.Again
        number, frame = split_number(frames)
        self.sent.append(decode(frame))
        assert number == len(self.sent), "numbers have no gap, also after refusals"

    def close(self, linger: int) -> None:
        assert linger == 0
        self.is_closed = True


class FakeSockets:
    """Front end i of life n listens at `i/n`."""

    def __init__(self, sockets: dict[int, FakePush]) -> None:
        self.by_address = {address(client): socket for client, socket in sockets.items()}

    def push(self, address: str) -> FakePush:
        return self.by_address[address]


def address(client: int, life: int = 1) -> str:
    return f"{client}/{life}"


def front_end(client: int, life: int = 1) -> FrontEndAddress:
    return FrontEndAddress(index=client, input_address="", output_address=address(client, life))


def make_turn(step: int, *clients: int, num_running: int = 0) -> LoopTurn:
    load = RankLoad(num_running=num_running)
    status = EngineStatus(step, True, load, SchedulerStats(num_steps=step), dict.fromkeys(clients, step))
    outputs = {
        client: EngineCoreOutputs(
            rank_id=RANK, step=step, command_seq=step, load=load, handles=array("I", [7]), token_ids=array("I", [step])
        )
        for client in clients
    }
    return LoopTurn(status, outputs)


class Outbox(queue.SimpleQueue):  # type: ignore[type-arg]
    """`wait_s` of the clock pass while the thread waits for an item."""

    def __init__(self, items: list[Outbound], clock: ManualClock, wait_s: float) -> None:
        self._clock, self._wait_s = clock, wait_s
        for item in items:
            self.put(item)

    def get(self, block: bool = True, timeout: float | None = None) -> Outbound:
        self._clock.sleep(self._wait_s)
        item: Outbound = super().get(block, timeout)
        return item


def run_thread(
    sockets: dict[int, FakePush] | FakeSockets, items: list[Outbound], *, wait_s: float = 0.0, max_backlog_bytes: int = 1 << 20
) -> list[Inbound]:
    """Runs the thread's body in this one over a fixed script; returns what it told the loop."""
    clock = ManualClock()
    inbox: queue.SimpleQueue[Inbound] = queue.SimpleQueue()
    outbox = Outbox(items, clock, wait_s)
    status = make_turn(0).status
    if isinstance(sockets, dict):
        sockets = FakeSockets(sockets)
    front_ends = [front_end(int(name.split("/")[0])) for name in sockets.by_address if name.endswith("/1")]
    thread = OutputThread(sockets, RANK, inbox, outbox, front_ends, status, clock, clock.sleep, max_backlog_bytes)  # type: ignore[arg-type]
    thread.run()
    told = []
    while not inbox.empty():
        told.append(inbox.get())
    return told


def outputs_of(socket: FakePush) -> list[int]:
    return [m.step for m in socket.sent if isinstance(m, EngineCoreOutputs)]


def test_outputs_go_to_their_front_end_and_last_words_to_all() -> None:
    sockets = {0: FakePush(), 1: FakePush()}
    assert run_thread(sockets, [make_turn(1, 0), make_turn(2, 0, 1), LastWords("why")]) == []
    assert (outputs_of(sockets[0]), outputs_of(sockets[1])) == ([1, 2], [2])
    assert sockets[0].sent[-1] == sockets[1].sent[-1] == EngineCoreDead(RANK, "why")


def test_a_full_socket_loses_nothing_and_holds_up_nobody() -> None:
    sockets = {0: FakePush(num_refusals=7), 1: FakePush()}
    run_thread(sockets, [*(make_turn(step, 0, 1) for step in range(1, 6)), LastWords("")])
    assert outputs_of(sockets[0]) == outputs_of(sockets[1]) == [1, 2, 3, 4, 5]
    assert isinstance(sockets[0].sent[-1], EngineCoreDead)


def test_too_long_a_backlog_is_reported_to_the_loop_once() -> None:
    sockets = {0: FakePush(num_refusals=25), 1: FakePush()}
    told = run_thread(sockets, [*(make_turn(step, 0, 1) for step in range(1, 11)), LastWords("")], max_backlog_bytes=200)
    assert told == [ClientOverflow(0)]
    assert outputs_of(sockets[0]) == list(range(1, 11))


def test_a_front_end_without_outputs_hears_of_the_load_and_a_silent_one_gets_no_reports_on_top() -> None:
    sockets = {0: FakePush(), 1: FakePush(), 2: FakePush(num_refusals=10**9)}
    # The last words for front end 2 never leave: the thread gives up after its bound.
    run_thread(sockets, [*(make_turn(step, 0, num_running=step) for step in range(1, 21)), LastWords("")], wait_s=0.06)
    kinds = [type(m) for m in sockets[1].sent]
    assert kinds.count(Heartbeat) == 3
    assert kinds.count(LoadReport) == 17
    assert [type(m) for m in sockets[0].sent].count(LoadReport) == 0
    assert sockets[2].sent == []


def test_reports_in_a_long_step_say_how_old_the_load_is_and_an_idle_engines_is_never_old() -> None:
    busy, idle = make_turn(1, 0), make_turn(2, 0)
    idle = LoopTurn(replace(idle.status, has_work=False), {})
    reply = UtilityReply(0, UtilityResult(RANK, 5))  # something to wake up for
    sockets = {0: FakePush()}
    run_thread(sockets, [busy, reply, reply, idle, reply, LastWords("")], wait_s=0.6)
    beats = [(m.step, round(m.load_age_s, 6)) for m in sockets[0].sent if isinstance(m, Heartbeat)]
    assert beats == [(1, 0.0), (1, 0.6), (1, 1.2), (2, 0.0), (2, 0.0)]


def test_what_waits_for_a_dead_front_end_does_not_reach_its_successor() -> None:
    old, new, other = FakePush(num_refusals=10**9), FakePush(), FakePush()
    sockets = FakeSockets({0: old, 1: other})
    run = [make_turn(1, 0, 1), FrontEndAttached(front_end(0, life=2)), make_turn(2, 0, 1), LastWords("")]
    sockets.by_address[address(0, life=2)] = new
    run_thread(sockets, run)
    assert (outputs_of(old), outputs_of(new), outputs_of(other)) == ([], [2], [1, 2])
    assert old.is_closed
    assert isinstance(new.sent[0], Heartbeat)


def test_a_new_state_or_weight_version_is_told_to_all_before_anything_that_follows_it() -> None:
    sockets = {0: FakePush(), 1: FakePush()}
    ready, reply = make_turn(1, 0), UtilityReply(0, UtilityResult(RANK, 5))
    paused = LoopTurn(replace(ready.status, state=EngineState.PAUSED), {})
    other_weights = LoopTurn(replace(paused.status, weight_version=2), {})
    run_thread(sockets, [ready, paused, reply, ready, other_weights, LastWords("")])
    for client in (0, 1):
        beats = [(m.state, m.weight_version) for m in sockets[client].sent if isinstance(m, Heartbeat)]
        assert beats == [("ready", 0), ("paused", 0), ("ready", 0), ("paused", 2)]
    kinds = [type(m) for m in sockets[0].sent]
    assert kinds[kinds.index(UtilityResult) - 1] is Heartbeat


def test_a_result_that_cannot_be_sent_is_an_error_to_its_caller() -> None:
    sockets = {0: FakePush()}
    reply = UtilityReply(0, UtilityResult(RANK, 5, value=object()))
    run_thread(sockets, [reply, LastWords("")])
    (result,) = [m for m in sockets[0].sent if isinstance(m, UtilityResult)]
    assert result.call_id == 5
    assert result.error is not None
    assert result.error.startswith("the result cannot be sent: TypeError")


def test_an_error_in_the_thread_is_the_engines_end() -> None:
    class BrokenPush(FakePush):
        def send_multipart(self, frames: list[bytes], flags: int) -> None:
            raise zmq.ZMQError(zmq.ENOTSOCK)

    (told,) = run_thread({0: BrokenPush()}, [make_turn(1, 0)])
    assert isinstance(told, ThreadFailed)
