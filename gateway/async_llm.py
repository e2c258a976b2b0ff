"""The engine client: from a prompt to a stream of outputs, over whatever ranks there are.

Theory of operation
-------------------
A request is tokenized and checked (`InputProcessor`), registered, booked and sent (`RequestSender`); then its reader waits on a
collector. One task, the `OutputHandler`, reads what ranks say from one queue, in order, and feeds all collectors.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
import shutil
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, aclosing, contextmanager
from typing import Any

from cores.messages import RankId
from cores.pooling_params import PoolingParams
from cores.sampling_params import SamplingParams, is_int
from gateway.admission import Admission, Usage
from gateway.client_status import snapshot_of
from gateway.config import GatewayConfig
from gateway.core_client import AsyncMPClient, make_async_mp_client
from gateway.core_client.base import FrontEndPlace
from gateway.endpoint_stores import EndpointStores
from gateway.engine_client import EngineClient, ModelConfig, Prompt, PromptPieces
from gateway.errors import EngineDeadError, InvalidRequestError, OverloadedError
from gateway.failover import Failover
from gateway.grammar_checker import GrammarChecker
from gateway.input_processor import InputProcessor, ProcessedInput, add_special_tokens
from gateway.input_session import InputSession
from gateway.loop_lag import LoopLag
from gateway.lora_manager import LoraManager
from gateway.models import with_absolute_paths
from gateway.operations import UTILITY_TIMEOUT_S
from gateway.output_collector import RequestOutputCollector
from gateway.output_handler import OutputHandler
from gateway.output_processor import OutputProcessor
from gateway.outputs import PoolingRequestOutput, RequestOutput, to_pooling_output
from gateway.renderer import Renderer
from gateway.request_logger import RequestLogger
from gateway.request_sender import RequestOptions, RequestSender
from gateway.sampling_defaults import read_sampling_defaults
from gateway.stat_loggers import LogLine, StatLoggerFactory, StatLoggers, make_tracer
from gateway.status import StatusSnapshot

logger = logging.getLogger(__name__)

IDLE_POLL_S = 0.02


class AsyncLLM(EngineClient):
    """Build it with `await AsyncLLM.from_config(config)`; end it with `await llm.shutdown()`."""

    def __init__(
        self,
        config: GatewayConfig,
        model_config: ModelConfig,
        renderer: Renderer,
        core_client: AsyncMPClient,
        *,
        stores: EndpointStores | None = None,
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
        self.failover = Failover(
            core_client, self.output_processor, clock,
            is_enabled=config.fault.failover, max_wait_s=config.fault.engine_ready_timeout,
        )  # fmt: skip
        self.loop_lag = LoopLag(clock)
        self._clock = clock
        self._started_s = clock()
        self._draining = False
        self._stopped = False
        self._ending: asyncio.Task[None] | None = None
        stores = stores or EndpointStores()
        self.admission = Admission(config.admission, stores.slots)
        self.group = stores.group
        self.loras: LoraManager = LoraManager(
            core_client,
            stores.loras,
            config.server.served_model_name or (model_config.name,),
            is_enabled=config.engine.enable_lora,
        )
        self.sender = RequestSender(core_client, self.output_processor, self.failover, self.admission, self.loras, clock)
        self.output_handler = OutputHandler(
            core_client, self.output_processor, self.sender, self.failover, self.admission, config.output_chunk_size, clock
        )
        self.stats = StatLoggers(self.output_processor)
        core_client.ranks.before_serving = self._restore
        core_client.aborts.on_abort = self.sender.on_abort_elsewhere
        core_client.on_bound = lambda handle, rank_id: self.output_processor.set_rank(handle, rank_id.rank, clock())
        self._own_run_directory: str | None = None
        self._warnings: set[str] = set()  # that have been said: each once

    @classmethod
    async def from_config(
        cls,
        config: GatewayConfig,
        place: FrontEndPlace | None = None,
        on_shutdown: Callable[[float], None] | None = None,
        stores: EndpointStores | None = None,
        stat_loggers: Sequence[StatLoggerFactory] = (),
        on_core_client: Callable[[AsyncMPClient], None] = lambda core_client: None,
    ) -> AsyncLLM:
        """An engine client whose ranks are all ready.

        Without a `place` (in a user's script) it starts the launcher and its engine cores as children, which end with it.
        `on_shutdown` is called with a time in seconds when the launcher wants the front end to drain. `stat_loggers` make
        loggers that get statistics, besides those that are installed as plug-ins. `on_core_client` is told who waits for the
        ranks, before it does.

        Raises `ConfigError` for a setting or model directory that cannot be used, `EngineDeadError` with the engine's own cause
        when a rank does not start.
        """
        started_s, tracer = time.monotonic(), make_tracer(config)
        async with AsyncExitStack() as undo:
            own_run_directory = None
            if place is None:
                own_run_directory = tempfile.mkdtemp(prefix="gateway-")
                undo.callback(shutil.rmtree, own_run_directory, ignore_errors=True)
                place = FrontEndPlace(run_directory=own_run_directory)
            config = dataclasses.replace(config, engine=with_absolute_paths(config.engine))
            server, sampling_defaults = config.server, read_sampling_defaults(config)
            # In a thread: a tokenizer of 128,000 tokens loads for a second, and /live must answer.
            arguments = (server.chat_template, server.marker_tokens, server.chat_template_defaults)
            renderer = await asyncio.to_thread(Renderer.from_directory, config.engine.model, *arguments)
            undo.callback(renderer.close)
            core_client = make_async_mp_client(config, place)
            undo.push_async_callback(core_client.shutdown)
            if on_shutdown is not None:
                core_client.on_shutdown = on_shutdown
            on_core_client(core_client)
            await core_client.start()
            model_config = ModelConfig.of(config, core_client.ready_messages, sampling_defaults)
            llm = cls(config, model_config, renderer, core_client, stores=stores)
            llm._own_run_directory, llm._started_s = own_run_directory, started_s
            undo.pop_all()  # from here on they are the client's to close
        try:
            llm._start([*stat_loggers, *tracer])
            for rank_id in core_client.serving:
                await llm.restore_rank(rank_id)
            await llm.loras.adopt()
        except BaseException:
            await llm.shutdown()
            raise
        return llm

    def _start(self, stat_loggers: Sequence[StatLoggerFactory]) -> None:
        """All that runs beside requests. Statistics last: they are about the rest."""
        self.output_handler.start()
        self.loop_lag.start()
        index, wanted = self.core_client.place.index, self.config.observability
        for factory in stat_loggers:
            stat_logger = factory(self.config, index)
            self.stats.add(type(stat_logger).__name__, stat_logger)
        self.stats.add_plugins(self.config, index)
        if not wanted.disable_log_stats:
            self.stats.add("log line", LogLine(self._clock))
        if wanted.enable_log_requests:
            request_logger = RequestLogger(wanted.max_log_len)
            self.sender.on_sent = request_logger.on_sent
            self.stats.add("request log", request_logger)
        self.stats.start(self.status)

    # --- state --------------------------------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        return not self._stopped and not self.errored

    @property
    def is_stopped(self) -> bool:
        return self._stopped

    @property
    def errored(self) -> bool:
        return self.output_handler.error is not None or self.core_client.failure is not None

    @property
    def dead_error(self) -> EngineDeadError:
        if self.output_handler.error is not None:
            return self.output_handler.dead_error
        cause = self.core_client.failure
        return EngineDeadError(f"the engine is dead: {cause}", cause=cause)

    @property
    def _end_error(self) -> EngineDeadError | None:
        """Why no request is answered any more."""
        if self.errored:
            return self.dead_error
        return EngineDeadError("the engine client was shut down") if self._stopped else None

    @property
    def should_keep_api_server_alive(self) -> bool:
        return self.config.fault.keep_alive_on_engine_death

    # --- requests -----------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompt: Prompt | PromptPieces,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        lora_request: str | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        session_id: str | None = None,
        tenant: str | None = None,
        kv_hints: Mapping[str, Any] | None = None,
        prompt_text: str | None = None,
        cache_salt: str | None = None,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        unused = {
            "kv_hints": kv_hints, "reasoning_ended": reasoning_ended, "reasoning_parser_kwargs": reasoning_parser_kwargs,
        }  # fmt: skip
        for name, value in unused.items():
            if value is not None:
                self._warn_once(f"{name} has no effect yet")
        options = RequestOptions(
            request_id=request_id, prompt_text=prompt_text, priority=priority, data_parallel_rank=data_parallel_rank,
            session_id=session_id, tenant=tenant, lora_name=lora_request, cache_salt=cache_salt,
            trace_headers=self._kept(trace_headers), tokenization_kwargs=tokenization_kwargs, timeout_s=timeout_s,
        )  # fmt: skip
        if isinstance(prompt, AsyncIterator):
            return self._answer_pieces(prompt, sampling_params, options)
        return self._answer(prompt, sampling_params, options)

    def _kept(self, trace_headers: Mapping[str, str] | None) -> Mapping[str, str] | None:
        if trace_headers and not self.stats.wants_traces:
            self._warn_once("trace headers are dropped: no traces endpoint is configured")
            return None
        return trace_headers

    def _warn_once(self, text: str) -> None:
        if text not in self._warnings:
            self._warnings.add(text)
            logger.warning("%s", text)

    async def _answer(
        self, prompt: Prompt, sampling_params: SamplingParams, options: RequestOptions
    ) -> AsyncGenerator[RequestOutput, None]:
        self.model_config.check_task("generate")
        # What is no number is refused by `process` before it awaits anything.
        with self.preparing(sampling_params.n if is_int(sampling_params.n) else 0):
            processed = await self.input_processor.process(prompt, sampling_params, options.tokenization_kwargs)
        with self._in_flight(processed, options) as collector:
            finished = False
            while not finished:
                output = collector.get_nowait() or await collector.get()
                finished = output.finished
                yield output

    async def _answer_pieces(
        self, pieces: PromptPieces, sampling_params: SamplingParams, options: RequestOptions
    ) -> AsyncGenerator[RequestOutput, None]:
        if sampling_params.n != 1:
            raise InvalidRequestError(f"n must be 1 for a prompt in pieces, got {sampling_params.n}", "n")

        def answer(token_ids: list[int], rank: int | None) -> AsyncGenerator[RequestOutput, None]:
            if rank not in [rank_id.rank for rank_id in self.core_client.eligible]:
                rank = options.data_parallel_rank  # its rank has died since: going on matters more than its cache
            return self._answer(token_ids, sampling_params, dataclasses.replace(options, data_parallel_rank=rank))

        async def encode(text: str, is_first: bool) -> list[int]:
            return await self.renderer.encode_async(text, is_first and add_special_tokens(options.tokenization_kwargs))

        session = InputSession(answer, encode, sampling_params.output_kind)
        async with aclosing(session.run(pieces)) as outputs:
            async for output in outputs:
                yield output

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
        tenant: str | None = None,
        prompt_text: str | None = None,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        options = RequestOptions(
            request_id=request_id, prompt_text=prompt_text, priority=priority, data_parallel_rank=data_parallel_rank,
            session_id=session_id, tenant=tenant, pooling_params=pooling_params, timeout_s=timeout_s,
            trace_headers=self._kept(trace_headers),
        )  # fmt: skip
        self.model_config.check_task("embed")
        with self.preparing():
            processed = await self.input_processor.process_pooling(prompt, pooling_params)
        with self._in_flight(processed, options) as collector:
            output = await collector.get()
        yield to_pooling_output(output)

    def _in_flight(self, processed: ProcessedInput, options: RequestOptions) -> AbstractContextManager[RequestOutputCollector]:
        # Once more: while its prompt was made ready all may have come to an end, and nobody would ever answer.
        if (error := self._end_error) is not None:
            raise error
        return self.sender.in_flight(processed, options)

    async def abort(self, request_id: str) -> None:
        self.sender.abort(request_id)
        self.core_client.aborts.tell(request_id)

    async def cancel(self, request_id: str, tenant: str | None = None) -> bool:
        if not self.sender.abort(request_id, tenant):
            return await self.core_client.aborts.ask(request_id, tenant)
        self.core_client.aborts.tell(request_id, tenant)
        return True

    async def abort_queued(self) -> None:
        self.sender.abort_queued()
        self.core_client.aborts.tell(None)

    def abort_all(self) -> None:
        """Ends everything in flight: every reader gets its partial answer with finish reason "abort"."""
        self.sender.abort_all()

    def check_admission(self, num_sequences: int = 1, num_tokens: int = 0) -> None:
        refusal = self.refusal(num_sequences, num_tokens)
        if refusal is not None:
            self.admission.num_rejected += isinstance(refusal, OverloadedError)
            raise refusal

    @contextmanager
    def preparing(self, num_sequences: int = 1) -> Iterator[None]:
        self.check_admission(num_sequences=0)
        with self.sender.preparing(num_sequences):
            yield

    def refusal(self, num_sequences: int = 1, num_tokens: int = 0) -> BaseException | None:
        if (error := self._end_error) is not None:
            return error
        if self._draining:
            return OverloadedError("the server is shutting down")
        if self.core_client.standstill is not None:
            return OverloadedError(f"the engine takes no requests: {self.core_client.standstill_cause}")
        more, reported_tokens = Usage(num_sequences, num_tokens), self.core_client.num_reported_tokens
        return self.admission.refusal(self.sender.usage, more, self._clock(), reported_tokens=reported_tokens)

    def refresh_admission(self) -> None:
        """Shows the other front ends what is in flight here now."""
        self.admission.refresh(self.sender.usage)

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
        insist: bool = False,
    ) -> int:
        if self.errored:
            raise self.dead_error
        return await self.core_client.tell_ranks(method, *args, rank_ids=rank_ids, timeout_s=timeout_s, insist=insist)

    async def order(self, action: str, *, rank: int = 0, size: int = 0, drain_timeout_s: float = 0.0) -> None:
        if self.output_handler.error is not None:  # but for want of ranks: an order may bring one back
            raise self.dead_error
        await self.core_client.order(action, rank=rank, size=size, drain_timeout_s=drain_timeout_s)

    async def _restore(self, rank_id: RankId) -> None:
        """Before a rank that has started again takes requests."""
        timeout_s = self.config.fault.engine_ready_timeout  # of a start, of which this is the end
        await self.restore_rank(rank_id, timeout_s)
        if self.loras.is_enabled:
            await self.loras.restore(rank_id, timeout_s)

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
        if self._ending is None:
            self._ending = asyncio.create_task(self._end(), name="engine-client-end")
            self._stopped = True
        await asyncio.shield(self._ending)  # whoever does not wait for it leaves no process and no file behind

    async def _end(self) -> None:
        async with AsyncExitStack() as ends:  # the last comes first, and each whatever becomes of those before it
            if self._own_run_directory is not None:
                ends.callback(shutil.rmtree, self._own_run_directory, ignore_errors=True)
            ends.push_async_callback(self.core_client.shutdown)
            ends.push_async_callback(self.grammar_checker.close)
            ends.callback(self.renderer.close)
            ends.push_async_callback(self.stats.close)  # they have heard of every end
            self.output_handler.stop()
            self.loop_lag.stop()
            self.output_processor.fail_all(EngineDeadError("the engine client was shut down"))

    async def is_tracing_enabled(self) -> bool:
        return self.stats.wants_traces

    async def do_log_stats(self) -> None:
        self.stats.on_interval(self.status())

    # --- what it looks like -------------------------------------------------------------------------------------------

    def status(self) -> StatusSnapshot:
        now = self._clock()
        return snapshot_of(self, now, uptime_s=now - self._started_s, is_draining=self._draining)
