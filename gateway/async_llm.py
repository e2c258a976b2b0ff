"""The engine client: from a prompt to a stream of outputs, over whatever ranks there are.

Theory of operation
-------------------
A request is tokenized and checked, registered with the output processor, booked and sent; then its reader waits on a collector.
One task, the output handler, reads everything that any rank says from one queue, in order, and is the only one that feeds
collectors. It works in slices and gives the loop a turn after each, so that no batch, however large, delays the others' HTTP.

Nothing is awaited between registering and sending: a cancelled or failed send undoes both.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import random
import shutil
import tempfile
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from balancer.load import RoutingRequest
from cores.messages import EngineCoreOutputs, EngineCoreRequest, RankId, UtilityResult
from cores.pooling_params import PoolingParams
from cores.sampling_params import SamplingParams
from gateway.admission import Admission, OneFrontEnd, Usage, UsageSlots
from gateway.config import GatewayConfig
from gateway.core_client import AsyncMPClient, make_async_mp_client
from gateway.core_client.base import EngineDied, EngineFailed, FrontEndPlace, RanksChanged, SentRequest
from gateway.engine_client import EngineClient, ModelConfig, Prompt, PromptPieces
from gateway.errors import DeadlineExceededError, EngineDeadError, GatewayError, InvalidRequestError, OverloadedError
from gateway.failover import Failover
from gateway.grammar_checker import GrammarChecker
from gateway.group_settings import GroupStore
from gateway.input_processor import InputProcessor, ProcessedInput, check_options
from gateway.input_session import InputSession
from gateway.loop_lag import LoopLag
from gateway.lora_manager import LoraManager
from gateway.lora_store import LoraStore, OwnLoraStore
from gateway.models import with_absolute_paths
from gateway.operations import UTILITY_TIMEOUT_S
from gateway.output_collector import RequestOutputCollector
from gateway.output_processor import OutputProcessor
from gateway.outputs import PoolingRequestOutput, RequestOutput, to_pooling_output
from gateway.parallel_sampling import ParentRequest
from gateway.renderer import Renderer
from gateway.shared_value import OwnValue
from gateway.status import BalancerStatus, FrontEndStatus, StatusSnapshot, Totals
from gateway.version import __version__

logger = logging.getLogger(__name__)

IDLE_POLL_S = 0.02


class _NoDeadline:
    def cancel(self) -> None:
        pass


NO_DEADLINE = _NoDeadline()


class AsyncLLM(EngineClient):
    """Build it with `await AsyncLLM.from_config(config)`; end it with `await llm.shutdown()`."""

    def __init__(
        self,
        config: GatewayConfig,
        model_config: ModelConfig,
        renderer: Renderer,
        core_client: AsyncMPClient,
        *,
        slots: UsageSlots | None = None,
        lora_store: LoraStore | None = None,
        group_store: GroupStore | None = None,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self.config = config
        self.model_config = model_config
        self.renderer = renderer
        self.grammar_checker = GrammarChecker(model_config)
        self.input_processor = InputProcessor(
            model_config, renderer, rng or random.Random(), check_grammar=self.grammar_checker.check
        )
        self.output_processor = OutputProcessor(renderer.tokenizer)
        self.core_client = core_client
        self.failover = Failover(core_client, self.output_processor, is_enabled=config.fault.failover)
        self.loop_lag = LoopLag(clock)
        self._clock = clock
        self._started_s = clock()
        self._output_handler: asyncio.Task[None] | None = None
        self._handler_error: BaseException | None = None
        self._draining = False
        self._stopped = False
        self._num_requests = 0
        self.num_expired = 0  # requests that had no token by their deadlines
        self.admission = Admission(config.admission, slots or OneFrontEnd())
        self.group = group_store or OwnValue()
        self.loras: LoraManager = LoraManager(
            core_client,
            lora_store or OwnLoraStore(),
            config.server.served_model_name or (model_config.name,),
            is_enabled=config.engine.enable_lora,
        )
        core_client.before_serving = self._restore
        core_client.on_bound = lambda handle, rank_id: self.output_processor.set_rank(handle, rank_id.rank)
        self._trace_warned = False
        self._own_run_directory: str | None = None

    @classmethod
    async def from_config(
        cls,
        config: GatewayConfig,
        place: FrontEndPlace | None = None,
        on_shutdown: Callable[[float], None] | None = None,
        slots: UsageSlots | None = None,
        lora_store: LoraStore | None = None,
        group_store: GroupStore | None = None,
    ) -> AsyncLLM:
        """An engine client whose ranks are all ready.

        Without a `place` (in a user's script) it starts the launcher and its engine cores as children, which end with it.
        `on_shutdown` is called with a time in seconds when the launcher wants the front end to drain; `slots`, `lora_store` and
        `group_store` are where several front ends see each other's usage, adapters and operations.

        Raises `ConfigError` for a setting or model directory that cannot be used, `EngineDeadError` with the engine's own cause
        when a rank does not start.
        """
        own_run_directory = None
        if place is None:
            own_run_directory = tempfile.mkdtemp(prefix="gateway-")
            place = FrontEndPlace(run_directory=own_run_directory)
        core_client = None
        try:
            config = dataclasses.replace(config, engine=with_absolute_paths(config.engine))
            renderer = Renderer.from_directory(config.engine.model, config.server.chat_template)
            core_client = make_async_mp_client(config, place)
            if on_shutdown is not None:
                core_client.on_shutdown = on_shutdown
            await core_client.start()
            llm = cls(
                config,
                ModelConfig.of(config, core_client.ready_messages),
                renderer,
                core_client,
                slots=slots,
                lora_store=lora_store,
                group_store=group_store,
            )
        except BaseException:
            if core_client is not None:
                await core_client.shutdown()
            if own_run_directory is not None:
                shutil.rmtree(own_run_directory, ignore_errors=True)
            raise
        llm._own_run_directory = own_run_directory
        llm._start_output_handler()
        try:
            for rank_id in core_client.serving:
                await llm.restore_rank(rank_id)
            await llm.loras.adopt()
        except BaseException:
            await llm.shutdown()
            raise
        return llm

    # --- state --------------------------------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        return not self._stopped and not self.errored

    @property
    def is_stopped(self) -> bool:
        return self._stopped

    @property
    def errored(self) -> bool:
        return self._handler_error is not None or self.core_client.failure is not None

    @property
    def dead_error(self) -> EngineDeadError:
        if self._handler_error is not None:
            return EngineDeadError(f"the output handler ended: {self._handler_error!r}", cause=repr(self._handler_error))
        cause = self.core_client.failure
        return EngineDeadError(f"the engine is dead: {cause}", cause=cause)

    @property
    def should_keep_api_server_alive(self) -> bool:
        return self.config.fault.keep_alive_on_engine_death

    # --- requests -----------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: Prompt | PromptPieces,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        lora_request: str | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        session_id: str | None = None,
        prompt_text: str | None = None,
        cache_salt: str | None = None,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        if isinstance(prompt, AsyncIterator):

            def answer(token_ids: list[int], rank: int | None) -> AsyncGenerator[RequestOutput, None]:
                if rank not in [rank_id.rank for rank_id in self.core_client.eligible]:
                    rank = None  # its rank has died since: going on matters more than its cache
                return self.generate(
                    token_ids, sampling_params, request_id, lora_request=lora_request, trace_headers=trace_headers,
                    priority=priority, data_parallel_rank=data_parallel_rank if rank is None else rank,
                    session_id=session_id, cache_salt=cache_salt,
                )  # fmt: skip

            if sampling_params.n != 1:
                raise InvalidRequestError(f"n must be 1 for a prompt in pieces, got {sampling_params.n}", "n")
            session = InputSession(answer, self.renderer.encode_async, sampling_params.output_kind)
            async with aclosing(session.run(prompt)) as outputs:
                async for output in outputs:
                    yield output
            return
        if trace_headers:
            self._warn_about_tracing()
        self.model_config.check_task("generate")
        self.check_admission(num_sequences=0)
        processed = await self.input_processor.process(prompt, sampling_params)
        internal_id, collector = self._begin(
            processed, request_id, prompt_text or processed.prompt_text, priority=priority, pinned_rank=data_parallel_rank,
            session_id=session_id, lora_name=lora_request, cache_salt=cache_salt, timeout_s=timeout_s,
        )  # fmt: skip
        deadline = self._set_deadline(internal_id, timeout_s)
        finished = False
        try:
            while not finished:
                output = collector.get_nowait() or await collector.get()
                finished = output.finished
                yield output
        except GatewayError:
            finished = True  # the request has had its end: there is nothing to abort
            raise
        finally:
            deadline.cancel()
            if not finished:
                self._abort(internal_id)

    async def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams,
        request_id: str,
        *,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        session_id: str | None = None,
        prompt_text: str | None = None,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        if trace_headers:
            self._warn_about_tracing()
        self.model_config.check_task("embed")
        self.check_admission(num_sequences=0)
        processed = await self.input_processor.process_pooling(prompt, pooling_params)
        internal_id, collector = self._begin(
            processed, request_id, prompt_text or processed.prompt_text, priority=priority, pinned_rank=data_parallel_rank,
            session_id=session_id, pooling_params=pooling_params, timeout_s=timeout_s,
        )  # fmt: skip
        deadline = self._set_deadline(internal_id, timeout_s)
        ended = False
        try:
            output = await collector.get()
            ended = True
        except GatewayError:
            ended = True
            raise
        finally:
            deadline.cancel()
            if not ended:
                self._abort(internal_id)
        yield to_pooling_output(output)

    def _begin(
        self,
        processed: ProcessedInput,
        external_id: str,
        prompt_text: str | None,
        *,
        priority: int,
        pinned_rank: int | None,
        session_id: str | None,
        lora_name: str | None = None,
        cache_salt: str | None = None,
        pooling_params: PoolingParams | None = None,
        timeout_s: float | None = None,
    ) -> tuple[str, RequestOutputCollector]:
        """Admits, registers and sends a request. Its internal id, and where its outputs come."""
        check_options(
            request_id=external_id, priority=priority, data_parallel_rank=pinned_rank, session_id=session_id,
            cache_salt=cache_salt,
        )  # fmt: skip
        params, num_tokens = processed.sampling_params, len(processed.prompt_token_ids)
        more = Usage(params.n, num_tokens)
        lora = None if lora_name is None else self.loras.require(lora_name, "lora_request")
        self.admission.admit(self._usage, more, self._clock(), reported_tokens=self.core_client.num_reported_tokens)
        request = EngineCoreRequest(
            handle=0,  # each sequence gets its own when it is submitted
            request_id=f"{external_id}-{uuid.uuid4().hex[:8]}",
            prompt_token_ids=processed.prompt_token_ids,
            sampling_params=params,
            arrival_time_s=time.time(),
            num_original_prompt_tokens=num_tokens,
            priority=priority,
            cache_salt=cache_salt,
            session_id=session_id,
            lora_name=lora_name,
            lora_id=None if lora is None else lora.id,
            pooling_params=pooling_params,
        )
        block_keys, tokens_per_key = self.core_client.prefix_of(request)
        routing = RoutingRequest(
            num_prompt_tokens=num_tokens,
            block_keys=block_keys,
            tokens_per_key=tokens_per_key,
            pinned_rank=pinned_rank,
            session_id=session_id,
            priority=priority,
            lora_name=lora_name,
        )
        collector = RequestOutputCollector(params.output_kind)
        now = self._clock()
        sent = SentRequest(request, routing, arrived_s=now, deadline_s=None if timeout_s is None else now + timeout_s)
        self._submit(sent, collector, external_id, prompt_text)
        return request.request_id, collector

    def _submit(
        self,
        sent: SentRequest,
        collector: RequestOutputCollector,
        external_id: str,
        prompt_text: str | None,
    ) -> None:
        """Registers and sends all sequences of a request, or none. Must not be split by an await: see the module."""
        request, params = sent.request, sent.request.sampling_params
        parent = ParentRequest(request.request_id, params) if params.n > 1 else None
        handles: list[int] = []
        try:
            for index in range(params.n):
                handle = self.core_client.next_handle()
                child_params = params if parent is None else parent.child_params(index)
                self.output_processor.add_request(
                    handle=handle,
                    external_id=external_id,
                    internal_id=request.request_id,
                    prompt_text=prompt_text,
                    prompt_token_ids=list(request.prompt_token_ids),
                    params=child_params,
                    sink=collector,
                    parent=parent,
                    index=index,
                    arrival_s=sent.arrived_s,
                    lora_name=request.lora_name,
                )
                handles.append(handle)
                child = dataclasses.replace(request, handle=handle, sampling_params=child_params)
                self._send_or_wait(dataclasses.replace(sent, request=child))
        except BaseException as error:
            self.output_processor.remove(handles)
            self._leave_ranks(handles)  # those that were sent
            if isinstance(error, OverloadedError):
                self.admission.num_rejected += 1
            raise
        self._num_requests += 1

    def _send_or_wait(self, sent: SentRequest) -> None:
        try:
            rank_id = self.core_client.add_request(sent)
        except (OverloadedError, EngineDeadError) as error:
            # A rank that cannot be reached has died a moment ago: what follows its death will send the request elsewhere.
            will_be_sent = isinstance(error, EngineDeadError) or self.core_client.awaits_restart
            if not (self.config.fault.failover and will_be_sent) or self.core_client.failure is not None:
                raise
            self.failover.wait(sent)
        else:
            if rank_id is not None:
                self.output_processor.set_rank(sent.request.handle, rank_id.rank)

    def _set_deadline(self, internal_id: str, timeout_s: float | None) -> asyncio.TimerHandle | _NoDeadline:
        if timeout_s is None:
            return NO_DEADLINE
        return asyncio.get_running_loop().call_later(timeout_s, self._expire, internal_id, timeout_s)

    def _expire(self, internal_id: str, timeout_s: float) -> None:
        """The request's time is over. What has its first token by now was served in time, however long it takes from here."""
        handles = self.output_processor.handles_of(internal_id)
        if all(self.output_processor.accepted_token_ids(handle) for handle in handles):
            return
        self.num_expired += 1
        self._leave_ranks(handles)
        error = DeadlineExceededError(f"no token within the request's timeout of {1000 * timeout_s:.0f} ms")
        self.output_processor.fail(handles, error)

    async def abort(self, request_id: str) -> None:
        self._abort(request_id)

    def _abort(self, request_id: str) -> None:
        self._leave_ranks(self.output_processor.abort(request_id))

    def _leave_ranks(self, handles: Collection[int]) -> None:
        """These have ended here: nobody need work on them any more, or wait for somebody who will."""
        self.failover.drop(handles)
        self.core_client.abort_requests(handles)

    def abort_all(self) -> None:
        """Ends everything in flight: every reader gets its partial answer with finish reason "abort"."""
        self._leave_ranks(self.output_processor.abort_all())

    def check_admission(self, num_sequences: int = 1, num_tokens: int = 0) -> None:
        refusal = self.refusal(num_sequences, num_tokens)
        if refusal is not None:
            self.admission.num_rejected += isinstance(refusal, OverloadedError)
            raise refusal

    def refusal(self, num_sequences: int = 1, num_tokens: int = 0) -> BaseException | None:
        if self.errored:
            return self.dead_error
        if self._stopped:
            return EngineDeadError("the engine client was shut down")
        if self._draining:
            return OverloadedError("the server is shutting down")
        if (standstill := self.core_client.standstill) is not None:
            return OverloadedError(f"the engine takes no requests: it is {standstill}")
        more, reported_tokens = Usage(num_sequences, num_tokens), self.core_client.num_reported_tokens
        return self.admission.refusal(self._usage, more, self._clock(), reported_tokens=reported_tokens)

    def refresh_admission(self) -> None:
        """Shows the other front ends what is in flight here now."""
        self.admission.refresh(self._usage)

    @property
    def _usage(self) -> Usage:
        return Usage(self.output_processor.num_unfinished, self.core_client.num_unreported_tokens)

    def _warn_about_tracing(self) -> None:
        if not self._trace_warned:
            self._trace_warned = True
            logger.warning("trace headers are dropped: no traces endpoint is configured")

    # --- the output handler -------------------------------------------------------------------------------------------

    def _start_output_handler(self) -> None:
        self._output_handler = asyncio.create_task(self._handle_outputs(), name="output-handler")
        self._output_handler.add_done_callback(self._on_handler_done)
        self.loop_lag.start()

    async def _handle_outputs(self) -> None:
        """The only loop over what ranks say. Alive as long as the server."""
        while True:
            match await self.core_client.get_received():
                case EngineCoreOutputs() as outputs:
                    await self._handle_batch(outputs)
                case UtilityResult() as result:
                    self.core_client.on_utility_result(result)
                case EngineDied() as died:
                    self._handle_death(died)
                case RanksChanged():
                    self.failover.resume()
                case EngineFailed(cause):
                    self.failover.forget()
                    self.core_client.forget_queued()
                    self.output_processor.fail_all(EngineDeadError(f"the engine is dead: {cause}", cause=cause))

    async def _handle_batch(self, outputs: EngineCoreOutputs) -> None:
        for done in self.output_processor.process(outputs, self.config.output_chunk_size, self._clock()):
            if done.abort_handles:  # stopped on a stop string, which the engine cannot see
                self._leave_ranks(done.abort_handles)
            if done.finished_handles:
                self.core_client.release(done.finished_handles)
            if num_ended := len(done.finished_handles) + len(done.abort_handles):
                self.admission.drain_rate.on_ended(num_ended, self._clock())
            # Between slices and between batches: queued batches must not keep the loop from HTTP.
            await asyncio.sleep(0)

    def _handle_death(self, died: EngineDied) -> None:
        num_moved = self.failover.num_moved
        lost = self.failover.on_death(self.core_client.on_engine_died(died))
        self.core_client.note_moved(died, self.failover.num_moved - num_moved, len(lost))
        for handle, reason in lost.items():
            text = f"{died.rank_id} died: {died.cause}" + (f"; {reason}" if reason else "")
            siblings = self.output_processor.fail([handle], EngineDeadError(text, died.rank_id.rank, died.cause))
            self._leave_ranks(siblings)  # of n > 1, on ranks that live on
        self.failover.resume()  # what could not reach that rank any more

    def _on_handler_done(self, task: asyncio.Task[None]) -> None:
        if self._stopped:
            return
        if task.cancelled():  # by a program that cancels all tasks of its loop, or whose loop ends: it gets errors, not silence
            self._handler_error = asyncio.CancelledError("not by shutdown()")
            logger.warning("the output handler was cancelled, and not by shutdown(): no request can be answered any more")
        else:
            self._handler_error = task.exception()
            logger.critical("the output handler ended", exc_info=self._handler_error)
        self._leave_ranks(self.output_processor.fail_all(self.dead_error))

    # --- operations ---------------------------------------------------------------------------------------------------

    async def check_health(self) -> None:
        if self.errored:
            raise self.dead_error

    async def call_utility_by_rank(
        self, method: str, *args: Any, timeout_s: float | None = UTILITY_TIMEOUT_S
    ) -> dict[int, Any]:
        if self.errored:
            raise self.dead_error
        return await self.core_client.call_utility(method, *args, timeout_s=timeout_s)

    async def tell_ranks(
        self,
        method: str,
        *args: Any,
        rank_ids: Sequence[RankId] | None = None,
        timeout_s: float | None = UTILITY_TIMEOUT_S,
    ) -> int:
        if self.errored:
            raise self.dead_error
        return await self.core_client.tell_ranks(method, *args, rank_ids=rank_ids, timeout_s=timeout_s)

    async def _restore(self, rank_id: RankId) -> None:
        """Before a rank that has started again takes requests."""
        await self.restore_rank(rank_id)
        if self.loras.is_enabled:
            await self.loras.restore(rank_id)

    def start_draining(self) -> None:
        self._draining = True

    async def wait_until_idle(self, timeout_s: float) -> bool:
        deadline_s = self._clock() + timeout_s
        while self._can_become_idle and self._clock() < deadline_s:  # noqa: ASYNC110  once, at the end of a life
            await asyncio.sleep(IDLE_POLL_S)
        return self.output_processor.num_unfinished == 0

    @property
    def _can_become_idle(self) -> bool:
        """What is in flight has an end, unless it stands still."""
        return self.output_processor.num_unfinished > 0 and self.core_client.standstill not in ("paused", "sleeping")

    async def shutdown(self) -> None:
        if self._stopped:
            return
        self._stopped = True
        if self._output_handler is not None:
            self._output_handler.cancel()
        self.loop_lag.stop()
        self.output_processor.fail_all(EngineDeadError("the engine client was shut down"))
        self.renderer.close()
        await self.grammar_checker.close()
        await self.core_client.shutdown()
        if self._own_run_directory is not None:
            shutil.rmtree(self._own_run_directory, ignore_errors=True)

    # --- what it looks like -------------------------------------------------------------------------------------------

    def status(self) -> StatusSnapshot:
        now, client, counters = self._clock(), self.core_client, self.output_processor.counters
        ranks = tuple(client.rank_statuses(now))
        ages = [rank.signal_age_ms for rank in ranks if rank.signal_age_ms is not None]
        front_end = FrontEndStatus(
            index=self.core_client.place.index,
            pid=os.getpid(),
            in_flight=self.output_processor.num_unfinished,
            queued=self.failover.num_waiting + client.num_queued,
            event_loop_lag_ms=self.loop_lag.worst_ms,
        )
        totals = Totals(
            requests=self._num_requests,
            aborted=counters.aborted,
            failed=counters.failed,
            rejected=self.admission.num_rejected,
            moved=self.failover.num_moved,
            expired=self.num_expired,
            prompt_tokens=counters.prompt_tokens,
            generation_tokens=counters.generation_tokens,
        )
        balancer = self.config.balancer
        policy = balancer.load_balancing_policy if len(ranks) > 1 else "none"
        return StatusSnapshot(
            version=__version__,
            mode=type(client).__name__,
            model=self.model_config.name,
            uptime_s=round(now - self._started_s, 3),
            state=self._state([rank.state for rank in ranks]),
            front_ends=(front_end,),
            ranks=ranks,
            totals=totals,
            balancer=BalancerStatus(policy=policy, dispatch=balancer.dispatch, signal_age_ms=max(ages, default=None)),
            events=client.events.events(now),
            group=client.group_status(now),
            max_loras=self.config.engine.max_loras if self.loras.is_enabled else 0,
            loras=self.loras.statuses(self.output_processor.count_by_lora),
        )

    def _state(self, rank_states: list[str]) -> str:
        if self.errored or self._stopped:
            return "dead"
        if self._draining:
            return "draining"
        if all(state == "ready" for state in rank_states):
            return "ready"
        return self.core_client.standstill or "degraded"
