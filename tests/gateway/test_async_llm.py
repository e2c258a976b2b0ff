"""The engine client over engines that say exactly what the test wants: order, ends, and what is left behind."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from cores.control_messages import RankRecord
from cores.messages import (
    AbortRequests,
    AddRequest,
    EngineCoreDead,
    RankId,
    UtilityCall,
    UtilityResult,
)
from cores.testing import make_tiny_model_dir
from gateway.config import AdmissionConfig, FaultConfig
from gateway.engine_client import TokenizedPrompt
from gateway.errors import EngineDeadError, InvalidRequestError, OverloadedError
from gateway.output_statistics import FinishedRequest
from gateway.outputs import RequestOutput
from gateway.stat_loggers import StatLogger
from tests.gateway.core_client.fake_group import DEADLINE_S, FakeGroup
from tests.gateway.llm_stage import NO_FAILOVER, ONE, PROMPT, ZERO, Stage, finish, ids_of, tokens_of


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model_dir(tmp_path_factory.mktemp("models") / "tiny")


SetStage = Callable[..., Awaitable[Stage]]


@pytest.fixture
async def set_stage(model: Path) -> AsyncIterator[SetStage]:
    async with AsyncExitStack() as stack:

        async def make(num_ranks: int = 2, **parts: Any) -> Stage:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="gw-", dir="/tmp"))  # a socket's path is short
            group = FakeGroup(Path(directory), num_ranks, **parts)
            stack.push_async_callback(group.close)
            await group.start()
            stage = Stage(group, model)
            stack.push_async_callback(stage.llm.shutdown)
            stack.callback(stage.check_empty)
            return stage

        yield make


# --- order ------------------------------------------------------------------------------------------------------------


async def test_tokens_and_a_death_of_one_poll_reach_the_reader_as_tokens_first_then_the_error(set_stage: SetStage) -> None:
    stage = await set_stage(fault=NO_FAILOVER)
    reader = stage.read(data_parallel_rank=0)
    handle = (await stage.add_of(0)).request.handle
    stage.deliver(*(tokens_of(ZERO, step, handle) for step in range(5)), EngineCoreDead(ZERO, "out of memory"))
    with pytest.raises(EngineDeadError, match="out of memory"):
        await finish(reader)
    assert ids_of(stage.outputs) == [70, 71, 72, 73, 74]


async def test_a_request_that_finished_before_its_ranks_death_has_finished(set_stage: SetStage) -> None:
    stage = await set_stage(fault=NO_FAILOVER)
    reader = stage.read(data_parallel_rank=1)
    handle = (await stage.add_of(1)).request.handle
    stage.deliver(tokens_of(ONE, 0, handle, finished=True), EngineCoreDead(ONE, "gone"))
    outputs = await finish(reader)
    assert outputs[-1].outputs[0].finish_reason == "length"


async def test_a_utility_result_is_heard_behind_the_tokens_that_came_before_it(set_stage: SetStage) -> None:
    stage = await set_stage(1)
    reader = stage.read()
    handle = (await stage.add_of(0)).request.handle
    calling = asyncio.create_task(stage.llm.call_utility("is_paused"))
    call = await stage.group.engines[0].command()
    assert isinstance(call, UtilityCall)
    tokens = [tokens_of(ZERO, step, handle) for step in range(20)]
    stage.deliver(*tokens, UtilityResult(ZERO, call.call_id, value=False), tokens_of(ZERO, 20, handle, finished=True))
    assert await finish(calling) == [False]
    accepted = stage.llm.output_processor.accepted_token_ids(handle)
    assert accepted is None or len(accepted) >= 20
    assert len(ids_of(await finish(reader))) == 21


async def test_the_loop_gets_a_turn_after_every_batch_however_many_wait(set_stage: SetStage) -> None:
    stage = await set_stage(1)
    reader = stage.read()
    handle = (await stage.add_of(0)).request.handle
    stage.deliver(*(tokens_of(ZERO, step, handle, finished=step == 9) for step in range(10)))
    # Without a turn in between, the reader would find one output in which all had merged.
    assert [ids_of([output]) for output in await finish(reader)] == [[70 + step] for step in range(10)]


# --- sending ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 3])
async def test_a_request_that_cannot_be_sent_leaves_nothing(set_stage: SetStage, n: int) -> None:
    stage = await set_stage(1, fault=NO_FAILOVER)
    stage.group.engines[0].hang_up()

    async def is_refused() -> bool:
        reader = stage.read(n=n)
        await asyncio.wait({reader}, timeout=0.05)  # until the socket has noticed, one more is sent into the void
        if reader.done() and isinstance(reader.exception(), EngineDeadError):
            return True
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        return False

    async with asyncio.timeout(DEADLINE_S):
        while not await is_refused():
            pass
    stage.check_empty()
    assert stage.llm.status().totals.failed == 0  # it was never accepted


async def test_a_reader_that_leaves_while_its_prompt_is_tokenized_leaves_nothing(set_stage: SetStage) -> None:
    stage = await set_stage(1)
    begun, never = asyncio.Event(), asyncio.Event()

    async def encode_async(text: str, add_special_tokens: bool) -> list[int]:
        begun.set()
        await never.wait()
        return []

    stage.llm.renderer.encode_async = encode_async  # type: ignore[method-assign]
    reader = stage.read("a long prompt")
    await begun.wait()
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    stage.check_empty()
    assert stage.llm.status().totals.requests == 0
    later = stage.read(PROMPT, "later")
    assert (await stage.add_of(0)).request.request_id.startswith("later-")
    await stage.llm.abort("later")
    await finish(later)


async def test_a_burst_above_the_limit_is_refused_before_its_prompts_are_tokenized(set_stage: SetStage) -> None:
    stage = await set_stage(1, admission=AdmissionConfig(max_num_queued_requests=3))
    tokenizing: list[str] = []
    may_end = asyncio.Event()

    async def encode_async(text: str, add_special_tokens: bool) -> list[int]:
        tokenizing.append(text)
        await may_end.wait()
        return PROMPT

    stage.llm.renderer.encode_async = encode_async  # type: ignore[method-assign]
    readers = [stage.read(f"long prompt {i}", str(i), n=n) for i, n in enumerate([1, 2, 1, 2])]
    for refused in readers[2:]:
        with pytest.raises(OverloadedError, match="3 requests of at most 3"):
            await finish(refused)
    assert tokenizing == ["long prompt 0", "long prompt 1"]
    readers[1].cancel()  # gives its two places back
    await asyncio.gather(readers[1], return_exceptions=True)
    readers.append(stage.read("long prompt 4", "4", n=2))
    await stage.until(lambda: len(tokenizing) == 3)
    may_end.set()
    await stage.until(lambda: stage.llm.output_processor.num_unfinished == 3)
    for request_id in ("0", "4"):
        await stage.llm.abort(request_id)
    await asyncio.gather(readers[0], readers[4])
    assert stage.llm.status().totals.rejected == 2


async def test_children_keep_what_came_with_their_request(set_stage: SetStage) -> None:
    stage = await set_stage(1)
    reader = stage.read(n=3, session_id="s", priority=-4, cache_salt="salt")
    children = [(await stage.add_of(0)).request for _ in range(3)]
    assert {(c.session_id, c.priority, c.cache_salt, c.sampling_params.n) for c in children} == {("s", -4, "salt", 1)}
    assert len({c.handle for c in children}) == len({c.sampling_params.seed for c in children}) == 3
    await stage.llm.abort("mine")
    await finish(reader)


async def test_only_prompts_that_are_still_to_be_computed_count_for_the_token_limit(set_stage: SetStage) -> None:
    stage = await set_stage(1, admission=AdmissionConfig(max_num_queued_tokens=4))
    first = stage.read(request_id="first")
    sent = await stage.add_of(0)
    with pytest.raises(OverloadedError, match="3 prompt tokens of at most 4 are not yet computed, 3 more came"):
        await finish(stage.read(request_id="refused"))
    # Its prompt is computed: from now on it decodes, however long.
    stage.deliver(dataclasses.replace(tokens_of(ZERO, 1, sent.request.handle), command_seq=sent.seq))
    second = stage.read(request_id="second")
    await stage.add_of(0)
    for request_id, reader in (("first", first), ("second", second)):
        await stage.llm.abort(request_id)
        await finish(reader)


# --- abort ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_explicit", [True, False])
async def test_abort_while_a_request_waits_for_its_ranks_next_life(set_stage: SetStage, is_explicit: bool) -> None:
    stage = await set_stage(1, fault=FaultConfig(engine_restarts=1))
    reader = stage.read()
    handle = (await stage.add_of(0)).request.handle
    stage.deliver(tokens_of(ZERO, 0, handle), EngineCoreDead(ZERO, "killed"))
    await stage.until(lambda: stage.llm.failover.num_waiting == 1)
    if is_explicit:
        await stage.llm.abort("mine")
        outputs = await finish(reader)
        assert (ids_of(outputs), outputs[-1].outputs[0].finish_reason) == ([70], "abort")
    else:
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
    stage.check_empty()
    stage.group.tell_state(RankRecord(0, 2, "restarting", "killed", 1))
    await stage.until(lambda: stage.group.state(0) == "restarting")
    await stage.group.begin_life(RankId(0, 2))
    await stage.until(lambda: stage.group.state(0) == "ready")
    later = stage.read(PROMPT, "later")
    assert (await stage.add_of(0)).request.request_id.startswith("later-")  # and not the aborted one
    await stage.llm.abort("later")
    await finish(later)


async def test_abort_after_a_move_goes_to_the_rank_that_has_the_request_now(set_stage: SetStage) -> None:
    stage = await set_stage(2)
    reader = stage.read(data_parallel_rank=0)
    first = await stage.add_of(0)
    stage.deliver(tokens_of(ZERO, 0, first.request.handle), EngineCoreDead(ZERO, "killed"))
    moved = await stage.add_of(1)
    assert list(moved.request.prompt_token_ids) == [*PROMPT, 70]
    await stage.llm.abort("mine")
    assert await stage.group.engines[1].command() == AbortRequests(moved.seq + 1, (moved.request.handle,))
    outputs = await finish(reader)
    assert (ids_of(outputs), outputs[-1].outputs[0].finish_reason) == ([70], "abort")


async def test_a_request_does_not_wait_for_a_restart_for_ever(set_stage: SetStage) -> None:
    stage = await set_stage(1, fault=FaultConfig(engine_restarts=1, engine_ready_timeout=60.0))
    reader = stage.read()
    handle = (await stage.add_of(0)).request.handle
    stage.deliver(tokens_of(ZERO, 0, handle), EngineCoreDead(ZERO, "killed"))
    await stage.until(lambda: stage.llm.failover.num_waiting == 1)
    stage.group.clock.sleep(61.0)
    with pytest.raises(EngineDeadError, match="no rank took the request within 60 s"):
        await finish(reader)
    assert ids_of(stage.outputs) == [70]


# --- requests whose prompt is still made ready ------------------------------------------------------------------------


async def begin_to_tokenize(stage: Stage) -> tuple[asyncio.Task[list[RequestOutput]], asyncio.Event]:
    """A reader whose prompt has its tokens when the event is set."""
    begun, done = asyncio.Event(), asyncio.Event()

    async def encode(text: str, add_special_tokens: bool) -> list[int]:
        begun.set()
        await done.wait()
        return PROMPT

    stage.llm.renderer.encode_async = encode
    reader = stage.read("one two")
    async with asyncio.timeout(DEADLINE_S):
        await begun.wait()
    return reader, done


async def test_a_request_whose_prompt_is_ready_only_after_the_shutdown_is_told_of_it(set_stage: SetStage) -> None:
    stage = await set_stage(1)
    reader, ready = await begin_to_tokenize(stage)
    await stage.llm.shutdown()
    ready.set()
    with pytest.raises(EngineDeadError, match="the engine client was shut down"):
        await finish(reader)


async def test_a_request_whose_prompt_is_ready_only_when_nobody_can_answer_any_more_is_told_why(set_stage: SetStage) -> None:
    stage = await set_stage(1)
    reader, ready = await begin_to_tokenize(stage)
    for task in asyncio.all_tasks():
        if task.get_name() == "output-handler":
            task.cancel()
    await stage.until(lambda: stage.llm.errored)
    ready.set()
    with pytest.raises(EngineDeadError, match="the output handler ended"):
        await finish(reader)


# --- arguments of generate() ------------------------------------------------------------------------------------------


class Traces(StatLogger):
    wants_traces = True

    def __init__(self) -> None:
        self.headers: list[Any] = []

    def on_finished(self, request: FinishedRequest) -> None:
        self.headers.append(request.trace_headers)


async def aborted(stage: Stage, prompt: Any = PROMPT, **options: Any) -> AddRequest:
    """What a rank gets of a request with these arguments."""
    reader = stage.read(prompt, **options)
    command = await stage.add_of(0)
    await stage.llm.abort("mine")
    await finish(reader)
    assert isinstance(await stage.group.engines[0].command(), AbortRequests)
    return command


async def test_trace_headers_are_dropped_with_one_warning_or_reach_whoever_wants_them(
    set_stage: SetStage, caplog: pytest.LogCaptureFixture
) -> None:
    stage = await set_stage(1)
    headers = {"traceparent": "00-1-2-01"}
    for _ in range(3):
        await aborted(stage, trace_headers=headers)
    warnings = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert [r.getMessage() for r in warnings] == ["trace headers are dropped: no traces endpoint is configured"]
    assert not await stage.llm.is_tracing_enabled()
    traces = Traces()
    stage.llm.stats.add("traces", traces)
    assert await stage.llm.is_tracing_enabled()
    await aborted(stage, trace_headers=headers)
    assert traces.headers == [headers]


async def test_what_has_no_effect_yet_is_said_once(set_stage: SetStage, caplog: pytest.LogCaptureFixture) -> None:
    stage = await set_stage(1)
    for _ in range(2):
        await aborted(stage, kv_hints={"x": 1}, reasoning_ended=False, reasoning_parser_kwargs={"y": 2})
    assert sorted(r.getMessage() for r in caplog.records if r.levelno == logging.WARNING) == [
        "kv_hints has no effect yet", "reasoning_ended has no effect yet", "reasoning_parser_kwargs has no effect yet",
    ]  # fmt: skip


async def test_a_prompt_is_text_ids_or_what_a_renderer_made_of_it(set_stage: SetStage) -> None:
    stage = await set_stage(1)
    ids = stage.llm.renderer.tokenizer.encode("one two", False)
    for prompt, text, options in (
        ("one two", "one two", {}),
        (ids, None, {}),
        (ids, "1 2", {"prompt_text": "1 2"}),
        (TokenizedPrompt(ids, "one two"), "one two", {}),
    ):
        command = await aborted(stage, prompt, **options)
        assert list(command.request.prompt_token_ids) == ids
        assert stage.outputs[-1].prompt == text


async def test_special_tokens_are_added_to_a_text_unless_its_sender_has_written_them(set_stage: SetStage) -> None:
    stage = await set_stage(1)
    asked: list[bool] = []

    async def encode_async(text: str, add_special_tokens: bool) -> list[int]:
        asked.append(add_special_tokens)
        return PROMPT

    stage.llm.renderer.encode_async = encode_async  # type: ignore[method-assign]
    for kwargs in (None, {}, {"add_special_tokens": True}, {"add_special_tokens": False}):
        await aborted(stage, "one two", tokenization_kwargs=kwargs)
    assert asked == [True, True, True, False]


@pytest.mark.parametrize("kwargs", [{"truncation": True}, {"add_special_tokens": "yes"}])
async def test_a_tokenization_argument_that_nobody_knows_is_refused(set_stage: SetStage, kwargs: dict[str, Any]) -> None:
    stage = await set_stage(1)
    with pytest.raises(InvalidRequestError, match="tokenization_kwargs takes add_special_tokens"):
        await finish(stage.read("one", tokenization_kwargs=kwargs))
