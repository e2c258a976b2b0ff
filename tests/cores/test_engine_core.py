"""Requests in, columns out."""

from __future__ import annotations

from array import array
from typing import Any

from cores.codec import decode, encode
from cores.config import EngineConfig
from cores.engine_core import EngineCore
from cores.messages import (
    EngineCoreOutputs,
    Finished,
    FinishReason,
    FirstToken,
    RankId,
    TokenLogprobs,
)
from cores.request import Request
from cores.runner.interface import ModelInfo, ModelRunnerOutput, SchedulerOutput
from cores.testing import ManualClock, make_request

RANK = RankId(0, 1)
VOCAB_SIZE, EOS = 1000, 2


class CountingRunner:
    """The next token is the request's length. Takes 10 ms a step."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self.errors: dict[int, str] = {}
        self.logprobs: dict[int, TokenLogprobs] = {}
        self.is_shut_down = False

    def load(self) -> ModelInfo:
        return ModelInfo("cpu", max_model_len=200, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,), num_kv_blocks=100, block_size=4)

    def execute(self, batch: SchedulerOutput) -> ModelRunnerOutput:
        self._clock.sleep(0.01)
        tokens = [self._choose(s.request) for s in batch.scheduled if s.samples]
        return ModelRunnerOutput(tokens, logprobs=self.logprobs, errors=self.errors)

    def _choose(self, request: Request) -> int:
        return request.num_tokens

    def shutdown(self) -> None:
        self.is_shut_down = True


def make_core(clock: ManualClock | None = None, **settings: Any) -> tuple[EngineCore, CountingRunner]:
    clock = clock or ManualClock()
    runner = CountingRunner(clock)
    return EngineCore(RANK, EngineConfig(**({"block_size": 4} | settings)), runner.load(), runner, clock), runner


def only(outputs: dict[int, EngineCoreOutputs]) -> EngineCoreOutputs:
    (message,) = outputs.values()
    assert decode(encode(message)) == message
    return message


def test_each_front_end_gets_its_own_rows_and_its_own_command_number() -> None:
    core, _ = make_core()
    for client, handle, seq in ((0, 1, 5), (1, 1, 9), (0, 2, 6)):
        core.add_request(client, make_request(handle, prompt=10 * handle))
        core.note_command(client, seq)
    outputs = core.step()
    assert {c: (list(o.handles), list(o.token_ids), o.command_seq) for c, o in outputs.items()} == {
        0: ([1, 2], [10, 20], 6),
        1: ([1], [10], 9),
    }
    assert all(o.counts is None and o.step == 1 and o.rank_id == RANK for o in outputs.values())
    assert outputs[0].load is outputs[1].load
    core.check_invariants()


def test_the_first_token_tells_cached_tokens_and_queueing_time() -> None:
    clock = ManualClock(100.0)
    core, _ = make_core(clock, max_num_seqs=1)
    core.add_request(0, make_request(1, prompt=[5] * 20, max_tokens=1))
    clock.now += 2.0
    core.add_request(0, make_request(2, prompt=[5] * 20, max_tokens=2))
    assert only(core.step()).first_tokens == {0: FirstToken(0, 2.0)}
    second = only(core.step())
    assert second.first_tokens[0].num_cached_tokens == 16
    assert abs(second.first_tokens[0].queued_s - 0.01) < 1e-9
    assert only(core.step()).first_tokens == {}


def test_an_end_is_in_the_row_of_the_last_token() -> None:
    core, _ = make_core()
    core.add_request(0, make_request(1, prompt=5, max_tokens=3))
    core.add_request(0, make_request(2, prompt=5, max_tokens=2))
    assert only(core.step()).finished == {}
    assert only(core.step()).finished == {1: Finished(FinishReason.LENGTH)}
    assert only(core.step()).finished == {0: Finished(FinishReason.LENGTH)}
    assert core.step() == {}
    assert not core.has_work


def test_a_failed_request_has_a_row_without_a_token() -> None:
    core, runner = make_core()
    for handle in (1, 2, 3):
        core.add_request(0, make_request(handle, prompt=5))
    runner.errors = {1: "NaN"}
    outputs = only(core.step())
    assert (list(outputs.handles), outputs.counts, list(outputs.token_ids)) == ([1, 2, 3], array("I", [1, 0, 1]), [5, 5])
    assert outputs.finished == {1: Finished(FinishReason.ERROR, error="NaN")}


def test_logprobs_lie_beside_their_row() -> None:
    core, runner = make_core()
    core.add_request(0, make_request(1, prompt=5))
    core.add_request(0, make_request(2, prompt=5))
    runner.logprobs = {1: TokenLogprobs(-0.5, 1, (5,), (-0.5,))}
    assert only(core.step()).logprobs == {1: [TokenLogprobs(-0.5, 1, (5,), (-0.5,))]}


def test_requests_that_cannot_be_served_end_with_the_reason() -> None:
    core, _ = make_core()
    bad = {
        1: make_request(1, prompt=[5, VOCAB_SIZE]),
        2: make_request(2, prompt=5, num_original_prompt_tokens=6),
        3: make_request(3, prompt=5, temperature=-1.0),
        4: make_request(4, prompt=200),
        5: make_request(5, prompt=[]),
    }
    for request in bad.values():
        core.add_request(0, request)
    assert core.has_work
    assert not core.has_requests
    outputs = only(core.step())
    assert (outputs.step, list(outputs.counts or []), list(outputs.token_ids)) == (0, [0] * 5, [])
    assert {outputs.handles[row]: finished.error for row, finished in outputs.finished.items()} == {
        1: "prompt token ids must be below the vocabulary's 1000, got 1000",
        2: "num_original_prompt_tokens must be between 0 and 5, got 6",
        3: "temperature must be between 0.0 and 100.0, got -1.0",
        4: "a prompt of 200 tokens leaves no room for output: the model takes 200 in all",
        5: "the prompt is empty",
    }
    assert not core.has_work


def test_a_refused_request_shares_the_message_of_a_running_one() -> None:
    core, _ = make_core()
    core.add_request(0, make_request(1, prompt=5))
    core.add_request(0, make_request(2, prompt=[]))
    outputs = only(core.step())
    assert (list(outputs.handles), list(outputs.counts or []), list(outputs.token_ids)) == ([1, 2], [1, 0], [5])


def test_a_handle_in_use_is_not_given_to_a_second_request() -> None:
    core, _ = make_core()
    core.add_request(0, make_request(1, prompt=5, max_tokens=1))
    core.add_request(0, make_request(1, prompt=50, max_tokens=1))
    assert list(only(core.step()).token_ids) == [5]
    assert not core.has_work


def test_an_abort_by_the_front_end_says_nothing_and_one_by_the_engine_says_so() -> None:
    core, _ = make_core()
    for handle in (1, 2, 3):
        core.add_request(0, make_request(handle, prompt=5))
    core.add_request(1, make_request(1, prompt=5))
    core.abort_requests(0, [2, 99])
    assert list(core.step()[0].handles) == [1, 3]
    core.abort_all(client=0)
    outputs = core.step()
    assert {h: f.reason for h, f in zip(outputs[0].handles, outputs[0].finished.values(), strict=True)} == {
        1: FinishReason.ABORT,
        3: FinishReason.ABORT,
    }
    assert list(outputs[1].token_ids) == [6]
    core.abort_all()
    assert core.step()[1].finished == {0: Finished(FinishReason.ABORT)}
    assert not core.has_work


def test_nothing_of_a_front_end_that_is_gone_reaches_its_successor() -> None:
    core, _ = make_core()
    for client in (0, 1):
        core.add_request(client, make_request(1, prompt=5))
        core.add_request(client, make_request(2, prompt=[]))
        core.note_command(client, 7)
    core.forget_client(0)
    core.add_request(0, make_request(1, prompt=9))
    outputs = core.step()
    assert (list(outputs[0].handles), list(outputs[0].token_ids), outputs[0].command_seq) == ([1], [9], 0)
    assert (list(outputs[1].handles), outputs[1].command_seq) == ([1, 2], 7)


def test_load_and_stats_follow_the_work() -> None:
    core, _ = make_core(max_num_seqs=1)
    core.add_request(0, make_request(1, prompt=9, max_tokens=3))
    core.add_request(0, make_request(2, prompt=7, max_tokens=1))
    core.step()
    load = core.load()
    assert (load.num_waiting, load.num_running, load.num_prefill_tokens, load.num_decodes) == (1, 1, 7, 1)
    assert (load.num_kv_blocks_used, load.num_kv_blocks) == (3, 100)
    assert abs(load.step_ms - 10.0) < 1e-6
    while core.has_work:
        core.step()
    assert core.load().decode_tokens_per_s > 0
    stats = core.stats()
    assert (stats.num_steps, stats.num_requests, stats.num_prompt_tokens, stats.num_generation_tokens) == (4, 2, 16, 4)


def test_command_numbers_never_go_back() -> None:
    core, _ = make_core()
    core.note_command(0, 5)
    core.note_command(0, 4)
    assert core.command_seqs == {0: 5}


def test_shutdown_reaches_the_runner() -> None:
    core, runner = make_core()
    core.shutdown()
    assert runner.is_shut_down
