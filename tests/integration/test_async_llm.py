"""`AsyncLLM` embedded in a program: real launcher, real engine processes with the simulated engine, no HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import pytest

from cores.runner.testing import make_tiny_llama
from gateway.config import AdmissionConfig, FaultConfig, ObservabilityConfig
from gateway.errors import EngineDeadError, EngineGenerateError, InvalidRequestError, OverloadedError
from gateway.outputs import RequestOutput
from gateway.sampling_params import RequestOutputKind
from tests.integration.llm_harness import (
    DEADLINE_S,
    DELTA,
    FINAL_ONLY,
    SLOW_MS,
    Start,
    collect,
    frozen,
    is_idle,
    params,
    set_step_ms,
    until,
)


def ids_of(outputs: list[RequestOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.outputs[0].token_ids]


@pytest.fixture(scope="module")
def torch_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.mark.parametrize("kind", [DELTA, FINAL_ONLY])
async def test_a_hundred_requests_at_once_get_exactly_their_tokens(start: Start, kind: RequestOutputKind) -> None:
    llm = await start()
    lengths = [1 + 3 * i % 50 for i in range(100)]
    with frozen(llm):
        tasks = [
            asyncio.create_task(collect(llm, f"prompt {i}", params(n, output_kind=kind), str(i))) for i, n in enumerate(lengths)
        ]
        await until(lambda: llm.output_processor.num_unfinished == 100, "all are in flight")
    streams = await asyncio.gather(*tasks)
    for outputs, length in zip(streams, lengths, strict=True):
        assert sum(len(output.outputs[0].token_ids) for output in outputs) == length
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert outputs[-1].outputs[0].finish_reason == "length"
    assert all(rank.requests_total >= 33 for rank in llm.status().ranks)


async def test_deltas_joined_are_the_final_text(start: Start) -> None:
    llm = await start()
    (final,) = await collect(llm, "one two", params(30, output_kind=FINAL_ONLY))
    deltas = await collect(llm, "one two", params(30, output_kind=DELTA))
    assert "".join(output.outputs[0].text for output in deltas) == final.outputs[0].text


async def test_cancelled_readers_leave_the_others_exact_and_their_ids_free(start: Start) -> None:
    llm = await start()
    with frozen(llm):
        readers = [
            asyncio.create_task(
                collect(llm, f"prompt {i}", params(40, n=3 if i % 20 == 0 else 1, output_kind=FINAL_ONLY), str(i))
            )
            for i in range(100)
        ]
        await until(lambda: llm.output_processor.num_unfinished == 110, "all are in flight")
        for reader in readers[::10]:
            reader.cancel()
    ends = await asyncio.gather(*readers, return_exceptions=True)
    for i, end in enumerate(ends):
        if i % 10 == 0:
            assert isinstance(end, asyncio.CancelledError)
        else:
            assert isinstance(end, list)
            assert [len(sequence.token_ids) for sequence in end[-1].outputs] == [40]
    (again,) = await collect(llm, "prompt", params(3, output_kind=FINAL_ONLY), "0")
    assert again.finished


async def test_abort_gives_the_reader_its_partial_text_and_an_end(start: Start) -> None:
    llm = await start(1, step_ms=20)
    outputs: list[RequestOutput] = []

    async def read() -> None:
        async for output in llm.generate("prompt", params(4000, output_kind=DELTA), "mine"):
            outputs.append(output)

    reader = asyncio.create_task(read())
    await until(lambda: len(outputs) >= 3, "some tokens came")
    await llm.abort("mine")
    await asyncio.wait_for(reader, DEADLINE_S)
    assert outputs[-1].finished
    assert outputs[-1].outputs[0].finish_reason == "abort"
    assert sum(len(output.outputs[0].token_ids) for output in outputs) >= 3
    await llm.abort("mine")
    await llm.abort("unknown")


async def test_n_sequences_are_distinct_when_sampled_and_each_is_whole(start: Start) -> None:
    llm = await start()
    (final,) = await collect(llm, "prompt", params(12, n=4, temperature=1.0, seed=5, output_kind=FINAL_ONLY))
    assert [sequence.index for sequence in final.outputs] == [0, 1, 2, 3]
    assert [len(sequence.token_ids) for sequence in final.outputs] == [12] * 4
    assert len({sequence.text for sequence in final.outputs}) == 4


async def test_stop_string_ends_the_text_and_frees_the_rank(start: Start) -> None:
    llm = await start(1)
    (whole,) = await collect(llm, "prompt", params(60, output_kind=FINAL_ONLY))
    stop = whole.outputs[0].text[20:26]
    (cut,) = await collect(llm, "prompt", params(4000, stop=(stop,), output_kind=FINAL_ONLY))
    assert cut.outputs[0].text == whole.outputs[0].text.partition(stop)[0]
    assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", stop)


async def test_bad_requests_name_the_field_and_leave_nothing_behind(start: Start) -> None:
    llm = await start()
    for prompt, sampling, word in (
        ("", params(5), "prompt"),
        ("x", params(5, top_p=0.0), "top_p"),
        ([10**6], params(5), "prompt"),
        ("x", params(100_000), "max_tokens"),
    ):
        with pytest.raises(InvalidRequestError, match=word):
            await collect(llm, prompt, sampling)
    with pytest.raises(InvalidRequestError, match="data_parallel_rank"):
        async for _ in llm.generate("x", params(5), "r", data_parallel_rank=2):
            pass


async def test_a_pinned_request_goes_to_its_rank(start: Start) -> None:
    llm = await start()
    for _ in range(3):
        async for output in llm.generate("x", params(2), "r", data_parallel_rank=1):
            assert output.rank == 1


async def test_full_admission_refuses_all_or_nothing(start: Start) -> None:
    llm = await start(1, step_ms=SLOW_MS, admission=AdmissionConfig(max_num_queued_requests=4))
    reader = asyncio.create_task(collect(llm, "x", params(300, n=3)))
    await until(lambda: llm.output_processor.num_unfinished == 3, "three sequences are in flight")
    with pytest.raises(OverloadedError, match="at most 4"):
        await collect(llm, "x", params(5, n=2))
    assert len(await collect(llm, "x", params(1))) == 1
    await set_step_ms(llm, 1.0)
    await reader
    assert llm.status().totals.rejected == 1


async def test_a_utility_reaches_all_ranks_and_its_failure_names_the_rank(start: Start) -> None:
    llm = await start()
    await llm.reset_prefix_cache()
    with pytest.raises(EngineGenerateError, match=r"rank \d .*no_such_utility"):
        await llm.call_utility("no_such_utility")
    cancelled = asyncio.create_task(llm.call_utility("reset_prefix_cache"))
    await asyncio.sleep(0)
    cancelled.cancel()
    assert len(await llm.call_utility("reset_prefix_cache")) == 2


async def test_a_failed_request_fails_alone(start: Start) -> None:
    llm = await start(1, fault="fail_request_at_token=5")
    with pytest.raises(EngineGenerateError):
        await collect(llm, "x", params(10))
    assert (await collect(llm, "x", params(3)))[-1].finished


@pytest.mark.parametrize("engine", ["simulated", "torch"])
async def test_a_bug_in_output_processing_costs_one_request_of_sixteen(
    start: Start, engine: str, torch_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"max_num_seqs": 16} | (
        {} if engine == "simulated" else {"model": str(torch_model), "device": "cpu", "dtype": "float32", "num_kv_blocks": 512}
    )
    llm = await start(1, step_ms=3, engine_settings={"engine": engine} | settings)

    def start_all() -> list[asyncio.Task[list[RequestOutput]]]:
        return [asyncio.create_task(collect(llm, f"prompt {i}", params(24, output_kind=DELTA), str(i))) for i in range(16)]

    undisturbed = [ids_of(outputs) for outputs in await asyncio.gather(*start_all())]

    def registers_and_breaks(*args: Any, **fields: Any) -> None:
        add(*args, **fields)
        state = next(reversed(llm.output_processor._states.values()))
        if state.stream.external_id == "5":
            state.push_one = fails_at_the_fourth(state.push_one)

    def fails_at_the_fourth(push_one: Callable[[int], Any]) -> Callable[[int], Any]:
        calls = count(1)

        def broken(token_id: int) -> Any:
            if next(calls) == 4:
                raise ZeroDivisionError("a bug")
            return push_one(token_id)

        return broken

    # The bug is there before the first token is, so that no engine is too fast to meet it.
    add = llm.output_processor.add_sequence
    monkeypatch.setattr(llm.output_processor, "add_sequence", registers_and_breaks)
    readers = start_all()
    ends = await asyncio.wait_for(asyncio.gather(*readers, return_exceptions=True), DEADLINE_S)
    failed = ends.pop(5)
    assert isinstance(failed, EngineGenerateError)
    assert "ZeroDivisionError: a bug" in str(failed)
    assert [ids_of(end) for end in ends if isinstance(end, list)] == undisturbed[:5] + undisturbed[6:]
    await llm.check_health()


async def test_plugged_in_stat_loggers_hear_of_requests_although_statistics_are_off_and_one_that_fails_hurts_nobody(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    package = tmp_path / "somebodys-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: somebodys\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(
        "[gateway.stat_loggers]\n"
        "faulty = tests.gateway.stat_logger_plugin:Faulty\n"
        "gone = tests.gateway.stat_logger_plugin:Gone\n"
        "counter = tests.gateway.stat_logger_plugin:Counter\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    heard = tmp_path / "heard"
    monkeypatch.setenv("STAT_LOGGER_PLUGIN_FILE", str(heard))
    llm = await start(1, observability=ObservabilityConfig(disable_log_stats=True))
    assert llm.stats.names == ["faulty", "counter"]
    headers = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}
    outputs = [output async for output in llm.generate("one", params(7), "mine", trace_headers=headers)]
    assert outputs[-1].finished
    assert heard.read_text() == f"0 mine length 7 {headers['traceparent']}\n"
    lines = [record.getMessage() for record in caplog.records]
    assert any("stat logger 'gone'" in line for line in lines)
    assert any("stat logger 'faulty' failed" in line for line in lines)


async def test_without_failover_a_killed_rank_fails_its_requests_after_their_last_token_and_no_others(start: Start) -> None:
    llm = await start(2, step_ms=SLOW_MS, fault_tolerance=FaultConfig(engine_restarts=0, failover=False))
    tokens: dict[int, int] = {}

    async def read(i: int, rank: int) -> int:
        async for output in llm.generate(f"prompt {i}", params(300, output_kind=DELTA), str(i), data_parallel_rank=rank):
            tokens[i] = tokens.get(i, 0) + len(output.outputs[0].token_ids)
        return tokens[i]

    readers = [asyncio.create_task(read(i, i % 2)) for i in range(6)]
    await until(lambda: len(tokens) == 6, "all have begun")
    pid = llm.status().ranks[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await until(lambda: llm.status().ranks[0].state == "dead", "its death is seen")
    await set_step_ms(llm, 1.0)
    ends = await asyncio.wait_for(asyncio.gather(*readers, return_exceptions=True), DEADLINE_S)
    assert ends[1::2] == [300, 300, 300]
    for end in ends[::2]:
        assert isinstance(end, EngineDeadError)
        assert end.rank == 0
        assert "rank 0" in str(end)
    assert not llm.errored
    await until(lambda: [rank.state for rank in llm.status().ranks] == ["dead", "ready"], "the other is ready")
    with pytest.raises(OverloadedError):
        await read(7, 0)


async def test_without_any_rank_left_everything_fails_with_the_cause(start: Start) -> None:
    llm = await start(1, fault="raise_at_step=5")
    with pytest.raises(EngineDeadError, match="step 5"):
        await collect(llm, "x", params(100))
    await until(lambda: llm.errored, "the client is errored")
    assert "move" not in [event.kind for event in llm.status().events if "elsewhere" in event.text]
    with pytest.raises(EngineDeadError):
        await collect(llm, "x", params(1))
    with pytest.raises(EngineDeadError):
        await llm.check_health()


async def test_a_rank_that_cannot_start_is_an_exception_with_its_cause(start: Start) -> None:
    with pytest.raises(EngineDeadError, match="no_such_fault"):
        await start(2, fault="no_such_fault=1")


async def test_a_shutdown_that_nobody_waits_for_leaves_no_process(start: Start) -> None:
    llm = await start(2)
    embedded = llm.core_client.embedded
    assert embedded is not None
    processes = psutil.Process(embedded.pid).children(recursive=True)
    caller = asyncio.create_task(llm.shutdown())
    await asyncio.sleep(0)  # it has begun
    caller.cancel()
    await asyncio.gather(caller, return_exceptions=True)
    await llm.shutdown()
    assert caller.cancelled()
    assert len(processes) >= 2
    assert not any(process.is_running() for process in processes)


async def test_a_timeout_that_is_none_is_refused_and_runs_nothing(start: Start) -> None:
    llm = await start(1)
    wrong: list[Any] = [float("nan"), float("inf"), 0, -1.0, True, "5"]
    for timeout_s in wrong:
        with pytest.raises(InvalidRequestError, match="timeout_s must be a number above 0 and up to 1000000, or None, got"):
            await anext(llm.generate("a prompt", params(5), "x", timeout_s=timeout_s))
        assert llm.output_processor.num_unfinished == 0


async def test_launcher_death_is_the_end_of_the_engine(start: Start) -> None:
    llm = await start(1, step_ms=20)
    reader = asyncio.create_task(collect(llm, "x", params(8000)))
    await until(lambda: llm.output_processor.num_unfinished == 1, "a request is in flight")
    embedded = llm.core_client.embedded
    assert embedded is not None
    os.kill(embedded.pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError):
        await asyncio.wait_for(reader, DEADLINE_S)
    assert llm.errored


async def test_an_order_ends_with_the_launcher_that_was_to_carry_it_out(start: Start) -> None:
    llm = await start(2)
    embedded = llm.core_client.embedded
    assert embedded is not None
    os.kill(embedded.pid, signal.SIGSTOP)
    order = asyncio.create_task(llm.order("restart", rank=1))
    await asyncio.sleep(0)  # it is sent
    os.kill(embedded.pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="the launcher ended"):
        await asyncio.wait_for(order, DEADLINE_S)


async def test_pieces_of_a_prompt_go_on_one_sequence_on_one_rank(start: Start) -> None:
    llm = await start(2)
    pieces: asyncio.Queue[str | None] = asyncio.Queue()

    async def prompt() -> AsyncIterator[str]:
        while (piece := await pieces.get()) is not None:
            yield piece

    await pieces.put("one two")
    outputs: list[RequestOutput] = []
    num_pieces = 1
    async for output in llm.generate(prompt(), params(6, output_kind=DELTA), "session"):
        outputs.append(output)
        if output.outputs[0].finish_reason and not output.finished:
            num_pieces += 1
            await pieces.put(f" three {num_pieces}" if num_pieces <= 3 else None)
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert sum(len(output.outputs[0].token_ids) for output in outputs) == 18
    assert len({output.rank for output in outputs}) == 1
    # The last piece was answered as if all that was said before it, by both sides, had been its prompt.
    whole = outputs[-1].prompt_token_ids
    (again,) = await collect(llm, whole, params(6, output_kind=FINAL_ONLY))
    ids = [token_id for output in outputs for token_id in output.outputs[0].token_ids]
    assert ids[-6:] == again.outputs[0].token_ids
    assert ids[:6] == whole[len(llm.renderer.tokenizer.encode("one two", True)) :][:6]


async def test_a_session_goes_on_at_another_rank_when_its_own_dies_between_two_pieces(start: Start) -> None:
    llm = await start(2)
    ranks: list[int | None] = []

    async def prompt() -> AsyncIterator[str]:
        yield "one two"
        (first,) = {rank for rank in ranks if rank is not None}
        os.kill(llm.status().ranks[first].pid or 0, signal.SIGKILL)
        await until(lambda: llm.status().ranks[first].state == "dead", "its rank is dead")
        yield " three"

    async for output in llm.generate(prompt(), params(6, output_kind=DELTA), "session"):
        ranks.append(output.rank)
    assert set(ranks) == {0, 1}


async def test_leaving_a_session_aborts_its_piece_and_a_session_without_pieces_is_refused(start: Start) -> None:
    llm = await start(1, step_ms=20)

    async def prompt(*pieces: str) -> AsyncIterator[str]:
        for piece in pieces:
            yield piece

    async with contextlib.aclosing(llm.generate(prompt("one"), params(4000, output_kind=DELTA), "session")) as outputs:
        async for _ in outputs:
            break
    await until(lambda: is_idle(llm), "the rank is idle")
    with pytest.raises(InvalidRequestError, match="no pieces"):
        await collect(llm, prompt(), params(5))
    with pytest.raises(InvalidRequestError, match="n must be 1"):
        await collect(llm, prompt("one"), params(5, n=2))
    wrong: Any = 5
    with pytest.raises(InvalidRequestError, match="the prompt must be text or token ids, got int"):
        await collect(llm, prompt(wrong), params(5))


async def test_a_reader_that_leaves_while_its_request_waits_for_a_restart_leaves_nothing_behind(start: Start) -> None:
    # Its next life never begins.
    llm = await start(1, step_ms=20, fault="stall_at_step=0@epoch=2", fault_tolerance=FaultConfig(engine_restarts=1))
    reader = asyncio.create_task(collect(llm, "x", params(8000)))
    await until(lambda: llm.status().ranks[0].running == 1, "the request runs")
    os.kill(llm.status().ranks[0].pid or 0, signal.SIGKILL)
    await until(lambda: llm.failover.num_waiting == 1, "the request waits")
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    assert llm.failover.num_waiting == llm.output_processor.num_unfinished == 0


async def test_option_that_no_engine_can_read_is_refused_and_not_waited_for(start: Start) -> None:
    llm = await start()
    bad: list[tuple[str, Any]] = [
        ("priority", "x"), ("priority", 2**70), ("data_parallel_rank", "0"), ("session_id", 5), ("session_id", "\ud800"),
        ("cache_salt", 0), ("request_id", None), ("prompt", b"bytes"), ("prompt", None),
    ]  # fmt: skip
    for name, value in bad:
        arguments = {"prompt": "x", "sampling_params": params(3), "request_id": "r"} | {name: value}
        with pytest.raises(InvalidRequestError) as caught:
            await asyncio.wait_for(anext(llm.generate(**arguments)), DEADLINE_S)
        assert caught.value.param == name, value
    assert is_idle(llm)


async def test_program_that_cancels_all_tasks_of_its_loop_gets_errors_and_no_silence(start: Start) -> None:
    llm = await start(step_ms=20)
    reader = asyncio.create_task(collect(llm, "prompt", params(8000)))
    await until(lambda: llm.output_processor.num_unfinished, "it is in flight")
    next(task for task in asyncio.all_tasks() if task.get_name() == "output-handler").cancel()
    with pytest.raises(EngineDeadError, match="the output handler ended"):
        await asyncio.wait_for(reader, DEADLINE_S)
    with pytest.raises(EngineDeadError, match="the output handler ended"):
        await asyncio.wait_for(collect(llm, "prompt", params(3)), DEADLINE_S)
    assert llm.errored
