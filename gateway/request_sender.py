"""The way of a request to its ranks, and back out of them: admitted, registered, booked and sent, or nothing of it.

Nothing is awaited between registering and sending: a failed send undoes both, and no cancellation can come between.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from balancer.load import RoutingRequest
from cores.messages import EngineCoreRequest
from cores.pooling_params import PoolingParams
from gateway.admission import Admission, Usage
from gateway.core_client import AsyncMPClient
from gateway.core_client.base import SentRequest
from gateway.errors import DeadlineExceededError, GatewayError, OverloadedError
from gateway.failover import Failover
from gateway.input_processor import ProcessedInput, check_options
from gateway.lora_manager import LoraManager
from gateway.output_collector import RequestOutputCollector
from gateway.output_processor import OutputProcessor
from gateway.parallel_sampling import ParentRequest
from gateway.request_state import RequestStream


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """What comes with a prompt besides its parameters."""

    request_id: str  # the caller's
    prompt_text: str | None = None
    priority: int = 0
    data_parallel_rank: int | None = None
    session_id: str | None = None
    tenant: str | None = None
    lora_name: str | None = None
    cache_salt: str | None = None
    pooling_params: PoolingParams | None = None
    trace_headers: Mapping[str, str] | None = None
    tokenization_kwargs: Mapping[str, Any] | None = None
    timeout_s: float | None = None  # to the first token of each of its sequences


class _NoDeadline:
    def cancel(self) -> None:
        pass


NO_DEADLINE = _NoDeadline()


class RequestSender:
    """On behalf of `AsyncLLM`."""

    def __init__(
        self,
        core_client: AsyncMPClient,
        outputs: OutputProcessor,
        failover: Failover,
        admission: Admission,
        loras: LoraManager,
        clock: Callable[[], float],
    ) -> None:
        self.num_requests = 0
        self.num_expired = 0  # requests that had no token by their deadlines
        self.on_sent: Callable[[EngineCoreRequest, str | None], None] | None = None  # for the log: the request and its text
        self._num_preparing = 0  # sequences that hold places and whose prompts are not tokenized yet
        self._core_client = core_client
        self._outputs = outputs
        self._failover = failover
        self._admission = admission
        self._loras = loras
        self._clock = clock

    @property
    def usage(self) -> Usage:
        """What is in flight here, or about to be."""
        return Usage(self._outputs.num_unfinished + self._num_preparing, self._core_client.num_unreported_tokens)

    @contextlib.contextmanager
    def preparing(self, num_sequences: int) -> Iterator[None]:
        """Holds their places while their prompts are made ready. Raises `OverloadedError` where there are none."""
        reported_tokens = self._core_client.num_reported_tokens
        self._admission.admit(self.usage, Usage(num_sequences), self._clock(), reported_tokens=reported_tokens)
        self._num_preparing += num_sequences
        try:
            yield
        finally:
            self._num_preparing -= num_sequences

    @contextlib.contextmanager
    def in_flight(self, processed: ProcessedInput, options: RequestOptions) -> Iterator[RequestOutputCollector]:
        """Where its outputs come. Who leaves before the end aborts it. Raises what `EngineClient.generate` raises."""
        internal_id, collector = self._send(processed, options)
        deadline: asyncio.TimerHandle | _NoDeadline = NO_DEADLINE
        try:
            deadline = self._set_deadline(internal_id, options.timeout_s)
            yield collector
        except GatewayError:
            raise  # the request has had its end: there is nothing to abort
        except BaseException:
            self.abort(internal_id)
            raise
        finally:
            deadline.cancel()

    def _send(self, processed: ProcessedInput, options: RequestOptions) -> tuple[str, RequestOutputCollector]:
        """Its internal id, and where its outputs come."""
        check_options(
            request_id=options.request_id, priority=options.priority, data_parallel_rank=options.data_parallel_rank,
            session_id=options.session_id, cache_salt=options.cache_salt, timeout_s=options.timeout_s,
        )  # fmt: skip
        params, num_tokens = processed.sampling_params, len(processed.prompt_token_ids)
        lora = None if options.lora_name is None else self._loras.require(options.lora_name, "lora_request")
        more, reported_tokens = Usage(params.n, num_tokens), self._core_client.num_reported_tokens
        self._admission.admit(self.usage, more, self._clock(), reported_tokens=reported_tokens)
        request = EngineCoreRequest(
            handle=0,  # each sequence gets its own
            request_id=f"{options.request_id}-{uuid.uuid4().hex[:8]}",
            prompt_token_ids=processed.prompt_token_ids,
            sampling_params=params,
            arrival_time_s=time.time(),
            num_original_prompt_tokens=num_tokens,
            priority=options.priority,
            cache_salt=options.cache_salt,
            session_id=options.session_id,
            lora_name=options.lora_name,
            lora_id=None if lora is None else lora.id,
            pooling_params=options.pooling_params,
        )
        block_keys, tokens_per_key = self._core_client.prefix_of(request)
        routing = RoutingRequest(
            num_prompt_tokens=num_tokens,
            block_keys=block_keys,
            tokens_per_key=tokens_per_key,
            pinned_rank=options.data_parallel_rank,
            session_id=options.session_id,
            tenant=options.tenant,
            priority=options.priority,
            lora_name=options.lora_name,
        )
        now = self._clock()
        deadline_s = None if options.timeout_s is None else now + options.timeout_s
        collector = RequestOutputCollector(params.output_kind)
        stream = RequestStream(
            external_id=options.request_id,
            internal_id=request.request_id,
            prompt=options.prompt_text or processed.prompt_text,
            prompt_token_ids=processed.prompt_token_ids.copy(),
            params=params,
            sink=collector,
            arrival_s=now,
            parent=ParentRequest(request.request_id, params) if params.n > 1 else None,
            lora_name=options.lora_name,
            tenant=options.tenant,
            trace_headers=options.trace_headers,
        )
        self._send_all(SentRequest(request, routing, arrived_s=now, deadline_s=deadline_s), stream)
        if self.on_sent is not None:
            self.on_sent(request, stream.prompt)
        return request.request_id, collector

    def _send_all(self, sent: SentRequest, stream: RequestStream) -> None:
        """Registers and sends all sequences of a request, or none. Must not be split by an await: see the module."""
        request, params, parent = sent.request, sent.request.sampling_params, stream.parent
        handles: list[int] = []
        try:
            for index in range(params.n):
                handle = self._core_client.next_handle()
                child_params = params if parent is None else parent.child_params(index)
                self._outputs.add_sequence(stream, handle=handle, index=index, params=child_params)
                handles.append(handle)
                child = dataclasses.replace(request, handle=handle, sampling_params=child_params)
                self._failover.send(dataclasses.replace(sent, request=child))
        except BaseException as error:
            self._outputs.remove(handles)
            self.leave_ranks(handles)  # those that were sent
            if isinstance(error, OverloadedError):
                self._admission.num_rejected += 1
            raise
        self.num_requests += 1

    def _set_deadline(self, internal_id: str, timeout_s: float | None) -> asyncio.TimerHandle | _NoDeadline:
        if timeout_s is None:
            return NO_DEADLINE
        return asyncio.get_running_loop().call_later(timeout_s, self._expire, internal_id, timeout_s)

    def _expire(self, internal_id: str, timeout_s: float) -> None:
        """The request's time is over. What has its first token by now was served in time, however long it takes from here."""
        handles = self._outputs.handles_of(internal_id)
        if all(self._outputs.accepted_token_ids(handle) for handle in handles):
            return
        self.num_expired += 1
        self.leave_ranks(handles)
        error = DeadlineExceededError(f"no token within the request's timeout of {1000 * timeout_s:.0f} ms")
        self._outputs.fail(handles, error)

    def abort(self, request_id: str, tenant: str | None = None) -> bool:
        """Ends the requests of that external or internal id and tenant (None: whoever's). Whether there were any."""
        handles = self._outputs.abort(request_id, tenant)
        self.leave_ranks(handles)
        return bool(handles)

    def abort_queued(self) -> None:
        """Ends the requests that no rank has yet, in whole or in part."""
        self.leave_ranks(self._outputs.abort_sequences([*self._core_client.queued_handles, *self._failover.waiting_handles]))

    def on_abort_elsewhere(self, request_id: str | None, tenant: str | None) -> bool:
        """Another front end was asked to. None: what no rank has yet. Whether there were any of that id here."""
        if request_id is not None:
            return self.abort(request_id, tenant)
        self.abort_queued()
        return False

    def abort_all(self) -> None:
        self.leave_ranks(self._outputs.abort_all())

    def leave_ranks(self, handles: Collection[int]) -> None:
        """These have ended here: nobody need work on them any more, or wait for somebody who will."""
        self._failover.drop(handles)
        self._core_client.abort_requests(handles)
