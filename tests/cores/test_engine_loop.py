"""The busy loop over plain queues: order, drain, refusal, the end."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import pytest

from cores.config import EngineConfig, FrontEndAddress
from cores.control_messages import Shutdown
from cores.engine_core import EngineCore
from cores.engine_loop import (
    ClientCommand,
    ClientOverflow,
    EngineLoop,
    FrontEndAttached,
    Inbound,
    LoopTurn,
    Outbound,
    ThreadFailed,
    UtilityReply,
)
from cores.messages import AbortRequests, AddRequest, CacheEvents, FinishReason, RankId, UtilityCall, WatchCache
from cores.runner.interface import ModelInfo, ModelRunnerOutput, SchedulerOutput
from cores.testing import ManualClock, make_request

RANK = RankId(0, 1)


class Rig:
    """A loop whose runner calls `on_step(n)` in the middle of step n: that is how messages arrive while it works."""

    def __init__(self, on_step: Callable[[int], None] = lambda step: None) -> None:
        self.clock = ManualClock()
        self.inbox: queue.SimpleQueue[Inbound] = queue.SimpleQueue()
        self.outbox: queue.SimpleQueue[Outbound] = queue.SimpleQueue()
        self.on_step = on_step
        info = ModelInfo("cpu", max_model_len=500, vocab_size=1000, eos_token_ids=(), num_kv_blocks=1000)
        self.core = EngineCore(RANK, EngineConfig(), info, self, self.clock)
        self.loop = EngineLoop(self.core, self.inbox, self.outbox, self.clock)
        self._seq = 0

    def load(self) -> ModelInfo:
        raise NotImplementedError

    def execute(self, batch: SchedulerOutput) -> ModelRunnerOutput:
        self.clock.sleep(0.01)
        self.on_step(self.core.step_count + 1)
        return ModelRunnerOutput([9 for s in batch.scheduled if s.samples])

    def shutdown(self) -> None: ...

    def add(self, handle: int, max_tokens: int, client: int = 0) -> None:
        self._seq += 1
        self.inbox.put(ClientCommand(client, AddRequest(self._seq, make_request(handle, prompt=5, max_tokens=max_tokens))))

    def abort(self, *handles: int) -> None:
        self._seq += 1
        self.inbox.put(ClientCommand(0, AbortRequests(self._seq, handles)))

    def run(self) -> list[Outbound]:
        self.loop.run()
        self.core.check_invariants()
        messages = []
        while not self.outbox.empty():
            messages.append(self.outbox.get())
        return messages


def ends(messages: list[Outbound], client: int = 0) -> dict[int, tuple[FinishReason, int]]:
    """How each handle ended, and with how many tokens."""
    reasons: dict[int, FinishReason] = {}
    tokens: dict[int, int] = {}
    for message in messages:
        if isinstance(message, LoopTurn) and client in message.outputs:
            outputs = message.outputs[client]
            for row, handle in enumerate(outputs.handles):
                tokens[handle] = tokens.get(handle, 0) + (1 if outputs.counts is None else outputs.counts[row])
                if row in outputs.finished:
                    assert handle not in reasons
                    reasons[handle] = outputs.finished[row].reason
    return {handle: (reason, tokens[handle]) for handle, reason in reasons.items()}


def test_a_shutdown_without_work_ends_at_once() -> None:
    rig = Rig()
    rig.inbox.put(Shutdown(30.0))
    rig.run()
    assert rig.clock.now == 0.0


def test_a_drain_lets_requests_finish_and_refuses_new_ones() -> None:
    rig = Rig()
    rig.on_step = lambda step: rig.add(2, max_tokens=1) if step == 3 else None
    rig.add(1, max_tokens=10)
    rig.inbox.put(Shutdown(30.0))
    assert ends(rig.run()) == {1: (FinishReason.LENGTH, 10), 2: (FinishReason.ABORT, 0)}


def test_what_is_not_done_at_the_deadline_is_aborted_with_a_final_output_for_each_front_end() -> None:
    rig = Rig()
    rig.add(1, max_tokens=3)
    rig.add(2, max_tokens=400)
    rig.add(2, max_tokens=400, client=1)
    rig.inbox.put(Shutdown(0.05))
    messages = rig.run()
    assert ends(messages) == {1: (FinishReason.LENGTH, 3), 2: (FinishReason.ABORT, 5)}
    assert ends(messages, client=1) == {2: (FinishReason.ABORT, 5)}


def test_a_second_shutdown_can_only_shorten_the_drain() -> None:
    for timeouts_s in ((30.0, 0.05), (0.05, 30.0)):
        rig = Rig()
        rig.add(1, max_tokens=400)
        for timeout_s in timeouts_s:
            rig.inbox.put(Shutdown(timeout_s))
        assert ends(rig.run()) == {1: (FinishReason.ABORT, 5)}


def test_a_request_that_arrives_during_the_last_step_of_a_drain_is_refused_not_lost() -> None:
    rig = Rig()
    rig.on_step = lambda step: rig.add(2, max_tokens=1) if step == 4 else None
    rig.add(1, max_tokens=4)
    rig.inbox.put(Shutdown(30.0))
    assert ends(rig.run()) == {1: (FinishReason.LENGTH, 4), 2: (FinishReason.ABORT, 0)}


def test_an_abort_read_during_a_step_holds_for_the_next_one() -> None:
    rig = Rig()

    def on_step(step: int) -> None:
        if step == 5:
            rig.abort(1)
        if step == 9:
            rig.inbox.put(Shutdown(30.0))

    rig.on_step = on_step
    rig.add(1, max_tokens=400)
    rig.add(2, max_tokens=20)
    turns = [m for m in rig.run() if isinstance(m, LoopTurn) and 0 in m.outputs]
    assert [m.outputs[0].step for m in turns if 1 in m.outputs[0].handles] == [1, 2, 3, 4, 5]
    assert (turns[4].outputs[0].command_seq, turns[5].outputs[0].command_seq) == (2, 3)


def test_every_turn_tells_the_state_after_it() -> None:
    rig = Rig()
    rig.add(1, max_tokens=2)
    rig.add(2, max_tokens=1, client=3)
    rig.inbox.put(Shutdown(30.0))
    turns = [m for m in rig.run() if isinstance(m, LoopTurn)][1:]  # the first is of before the step
    assert [(t.status.step, t.status.has_work, t.status.load.num_running) for t in turns[:2]] == [
        (1, True, 1),
        (2, False, 0),
    ]
    assert turns[0].status.command_seqs == {0: 1, 3: 2}
    assert turns[0].status.load == turns[0].outputs[0].load


def test_a_front_end_that_does_not_read_loses_its_requests_and_nobody_else_does() -> None:
    rig = Rig()
    rig.on_step = lambda step: rig.inbox.put(ClientOverflow(0)) if step == 2 else None
    rig.add(1, max_tokens=50)
    rig.add(1, max_tokens=5, client=1)
    rig.inbox.put(Shutdown(30.0))
    messages = rig.run()
    assert ends(messages, client=0) == {1: (FinishReason.ABORT, 2)}
    assert ends(messages, client=1) == {1: (FinishReason.LENGTH, 5)}


def test_utility_results_come_in_order_with_outputs() -> None:
    rig = Rig()
    rig.add(1, max_tokens=1)
    rig.inbox.put(ClientCommand(4, UtilityCall(1, 55, "reset_prefix_cache")))
    rig.inbox.put(Shutdown(1.0))
    before, after, reply, *turns = rig.run()
    assert isinstance(reply, UtilityReply)
    assert (reply.client, reply.result.call_id, reply.result.error) == (4, 55, None)
    assert isinstance(turns[0], LoopTurn)
    assert turns[0].status.command_seqs[4] == 1
    # No step is to be expected while it runs, however long; and the state after it is told before its answer.
    assert [turn.status.has_work for turn in (before, after) if isinstance(turn, LoopTurn)] == [False, True]


def operate(rig: Rig, method: str, *args: object) -> None:
    rig.inbox.put(ClientCommand(4, UtilityCall(1, 55, method, args)))


def test_a_pause_that_waits_is_answered_behind_the_last_token_and_the_new_state() -> None:
    rig = Rig()

    def on_step(step: int) -> None:
        if step == 2:
            operate(rig, "pause", "wait")
        if step == 5:
            rig.inbox.put(Shutdown(30.0))

    rig.on_step = on_step
    rig.add(1, max_tokens=5)
    messages = rig.run()
    (reply,) = [i for i, message in enumerate(messages) if isinstance(message, UtilityReply)]
    assert ends(messages[:reply]) == {1: (FinishReason.LENGTH, 5)}
    states = [m.status.state for m in messages[:reply] if isinstance(m, LoopTurn)]
    assert (states[0], states[-1]) == ("ready", "paused")
    assert "draining" in states


def test_requests_that_stand_still_are_aborted_by_a_shutdown_without_waiting() -> None:
    rig = Rig()

    def on_step(step: int) -> None:
        if step == 3:
            operate(rig, "pause", "keep")
            rig.inbox.put(Shutdown(30.0))

    rig.on_step = on_step
    rig.add(1, max_tokens=400)
    assert ends(rig.run()) == {1: (FinishReason.ABORT, 3)}
    assert rig.clock.now < 1.0


def test_a_loop_whose_requests_stand_still_waits_for_commands_and_makes_no_steps() -> None:
    rig = Rig()

    def on_step(step: int) -> None:
        if step == 3:
            operate(rig, "pause", "keep")
        if step == 6:
            rig.inbox.put(Shutdown(30.0))

    rig.on_step = on_step
    rig.add(1, max_tokens=9)
    thread = threading.Thread(target=rig.loop.run, daemon=True)
    thread.start()
    turns = []
    while True:  # up to the answer to the pause
        message = rig.outbox.get(timeout=60.0)
        if isinstance(message, UtilityReply):
            break
        turns.append(message)
    assert rig.outbox.get(timeout=60.0).status.step == 3  # type: ignore[union-attr]
    assert rig.outbox.empty()  # it sleeps: a loop that spins would have filled the box
    operate(rig, "resume")
    thread.join(10.0)
    assert not thread.is_alive()
    while not rig.outbox.empty():
        turns.append(rig.outbox.get())
    assert ends(turns) == {1: (FinishReason.LENGTH, 9)}


def test_a_flood_of_commands_does_not_hold_up_steps() -> None:
    rig = Rig()
    for handle in range(2000):
        rig.add(handle, max_tokens=1)
    rig.inbox.put(Shutdown(1000.0))
    turns = [m for m in rig.run() if isinstance(m, LoopTurn)]
    assert turns[0].status.stats.num_requests < 600
    assert len(ends([*turns])) == 2000


def test_the_failure_of_a_thread_beside_it_ends_the_loop() -> None:
    rig = Rig()
    rig.inbox.put(ThreadFailed(OSError("socket is gone")))
    with pytest.raises(OSError, match="socket is gone"):
        rig.loop.run()


def test_an_exception_in_a_step_ends_the_loop_after_what_was_computed_before() -> None:
    rig = Rig()

    def fail(step: int) -> None:
        if step == 3:
            raise RuntimeError("device lost")

    rig.on_step = fail
    rig.add(1, max_tokens=10)
    with pytest.raises(RuntimeError, match="device lost"):
        rig.loop.run()
    assert rig.outbox.qsize() == 2


def test_restarted_front_end_is_not_told_the_command_numbers_of_its_predecessor() -> None:
    rig = Rig()
    rig.add(1, max_tokens=100)
    rig.add(1, max_tokens=100, client=1)
    rig.inbox.put(FrontEndAttached(FrontEndAddress(index=0, input_address="ipc://in", output_address="ipc://out")))
    rig.inbox.put(Shutdown(0.0))
    messages = rig.run()
    attached = next(i for i, message in enumerate(messages) if isinstance(message, FrontEndAttached))
    # What the output thread knows when it connects to the new one, and reports at once.
    told = [message.status.command_seqs for message in messages[:attached] if isinstance(message, LoopTurn)][-1]
    assert told == {1: 2}


def cache_events(messages: list[Outbound], client: int) -> list[CacheEvents]:
    turns = [message for message in messages if isinstance(message, LoopTurn)]
    return [turn.cache_events[client] for turn in turns if client in turn.cache_events]


def test_who_watches_the_cache_is_told_of_steps_and_operations_and_nobody_else_is() -> None:
    rig = Rig()
    rig.inbox.put(ClientCommand(1, WatchCache(1)))
    rig.inbox.put(ClientCommand(0, AddRequest(1, make_request(1, prompt=150, max_tokens=2))))
    rig.on_step = lambda step: rig.inbox.put(ClientCommand(0, UtilityCall(2, 1, "reset_prefix_cache"))) if step == 1 else None
    rig.inbox.put(Shutdown(10.0))
    messages = rig.run()
    told = cache_events(messages, client=1)
    assert [(events.seq, events.is_snapshot, len(events.stored)) for events in told] == [
        (0, True, 0),
        (1, False, 2),
        (2, True, 0),
    ]
    assert cache_events(messages, client=0) == []


def test_restarted_front_end_watches_only_when_it_asks_again() -> None:
    rig = Rig()
    rig.inbox.put(ClientCommand(0, WatchCache(1)))
    rig.inbox.put(FrontEndAttached(FrontEndAddress(index=0, input_address="ipc://in", output_address="ipc://out")))
    rig.add(1, max_tokens=1, client=1)
    rig.inbox.put(Shutdown(10.0))
    assert len(cache_events(rig.run(), client=0)) == 1


def test_a_new_request_is_told_to_the_other_front_ends_before_its_step_and_not_only_after() -> None:
    rig = Rig()
    turns_at_step: list[list[LoopTurn]] = []

    def on_step(step: int) -> None:
        turns_at_step.append([rig.outbox.get() for _ in range(rig.outbox.qsize())])  # type: ignore[misc]

    rig.on_step = on_step
    rig.add(1, max_tokens=2, client=0)
    rig.add(2, max_tokens=2, client=1)
    rig.inbox.put(Shutdown(30.0))
    rig.run()
    (before,) = turns_at_step[0]
    assert (before.status.load.num_waiting, before.status.command_seqs, before.outputs) == (2, {0: 1, 1: 2}, {})
    assert len(turns_at_step[1]) == 1  # nothing new came: only the first step's own turn


def test_a_single_front_end_knows_what_it_has_sent_and_is_told_nothing_twice() -> None:
    rig = Rig()
    rig.on_step = lambda step: None
    rig.add(1, max_tokens=3)
    rig.inbox.put(Shutdown(30.0))
    assert len([message for message in rig.run() if isinstance(message, LoopTurn)]) == 3 + 1  # and the last, of the shutdown
