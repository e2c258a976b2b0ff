"""One engine: requests in, a step at a time, columns of new tokens out. Knows no sockets, no threads, nor what computes."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterable

from cores.cache_watch import CacheWatch
from cores.config import EngineConfig
from cores.lora import LoraError
from cores.lora_operations import LoraOperations
from cores.messages import (
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineState,
    Finished,
    FinishReason,
    FirstToken,
    RankId,
    RankLoad,
    SchedulerStats,
    UtilityCall,
    UtilityResult,
)
from cores.operations import Operations
from cores.request import Request
from cores.runner.interface import ModelInfo, ModelRunner, RunnerOperations
from cores.sampling_params import InvalidParameterError
from cores.scheduler import RequestUpdate
from cores.step_engine import HostedEngine, StepEngine, make_step_engine
from cores.step_times import StepTimes
from cores.utilities import Utilities

logger = logging.getLogger(__name__)


class EngineCore:
    """Requests and steps of one rank. All methods are called from one thread."""

    def __init__(
        self,
        rank_id: RankId,
        config: EngineConfig,
        info: ModelInfo,
        runner: ModelRunner | HostedEngine,
        clock: Callable[[], float],
    ) -> None:
        """`runner` is loaded, and `info` is what it turned out to be."""
        if isinstance(runner, HostedEngine):
            engine: StepEngine = runner.engine
            operations: RunnerOperations = runner.operations
        else:
            engine, operations = make_step_engine(config, info, runner), runner
        self.rank_id = rank_id
        self.info = info
        self.step_count = 0
        self.command_seqs: dict[int, int] = {}  # by front end: its highest command applied
        self._runner = operations
        self._clock = clock
        self._engine = engine
        self.loras = LoraOperations(operations, engine, config.max_loras if config.enable_lora else 0)
        self.cache_watch = CacheWatch(rank_id, engine.record_cache_changes, engine.cached_landmarks)
        self._times = StepTimes(decodes="generate" in info.supported_tasks)
        self._ended: list[tuple[int, int, Finished]] = []  # (client, handle, how) of requests that ended outside a step
        self.operations = Operations(
            rank_id, engine, operations, self.abort_all, lambda: self.has_requests or bool(self._ended),
            config.profile_dir, info.no_sleep,
        )  # fmt: skip
        self._utilities = Utilities(rank_id, self, self.operations, self.loras)

    @property
    def max_model_len(self) -> int:
        """Of the model, or of the KV cache where that is smaller."""
        return self._engine.max_model_len

    @property
    def has_work(self) -> bool:
        """There is something that `step` would do."""
        return self._can_compute or bool(self._ended)

    @property
    def has_requests(self) -> bool:
        """Also while they stand still."""
        return self._engine.has_work

    @property
    def _can_compute(self) -> bool:
        return self._engine.has_work and not self.operations.standstill.is_frozen

    @property
    def state(self) -> EngineState:
        return self.operations.standstill.state

    def load(self) -> RankLoad:
        times = self._times
        return self._engine.load(times.step_ms, times.prefill_tokens_per_s, times.decode_tokens_per_s)

    def stats(self) -> SchedulerStats:
        return self._engine.stats()

    # --- commands -----------------------------------------------------------------------------------------------------

    def note_command(self, client: int, seq: int) -> None:
        """The command with this number is applied; every report from now on says so."""
        self.command_seqs[client] = max(seq, self.command_seqs.get(client, 0))

    def add_request(self, client: int, request: EngineCoreRequest) -> None:
        """Queues a request. One that cannot be served ends with the next step's outputs, with an error that says why."""
        if (client, request.handle) in self._engine:
            logger.warning("front end %d uses handle %d twice; the second request is ignored", client, request.handle)
            return
        if self.operations.standstill.is_closed:  # its front end cannot have known yet
            self._ended.append((client, request.handle, Finished(FinishReason.REJECTED, error=f"the engine is {self.state}")))
            return
        error, lora_id = self._error_in(request), None
        if error is None and request.lora_name is not None:
            try:
                lora_id = self.loras.resolve(request.lora_name, request.lora_id)
            except LoraError as refusal:
                error = str(refusal)
        if error is not None:
            self._ended.append((client, request.handle, Finished(FinishReason.ERROR, error=error)))
            return
        queued = Request.from_engine_core_request(client, request, self.max_model_len, self.info.eos_token_ids, lora_id)
        finished = self._engine.add_request(queued, self._clock())
        if finished is not None:
            self._ended.append((client, request.handle, finished))

    def _error_in(self, request: EngineCoreRequest) -> str | None:
        """What the scheduler and the runner rely on, and a foreign front end may have got wrong."""
        task = "generate" if request.pooling_params is None else "embed"
        if task not in self.info.supported_tasks:
            return f"this model can {', '.join(self.info.supported_tasks)}, not {task}"
        prompt = request.prompt_token_ids
        if prompt and max(prompt) >= self.info.vocab_size:
            return f"prompt token ids must be below the vocabulary's {self.info.vocab_size}, got {max(prompt)}"
        if not 0 <= request.num_original_prompt_tokens <= len(prompt):
            return f"num_original_prompt_tokens must be between 0 and {len(prompt)}, got {request.num_original_prompt_tokens}"
        missing = request.sampling_params.first_missing(self.info.features)
        if missing is not None:
            return f"{missing} is not supported by this engine"
        try:
            request.sampling_params.verify()
        except InvalidParameterError as error:
            return str(error)
        return None

    def refuse_request(self, client: int, handle: int) -> None:
        """The request came too late: it ends as aborted, with the next step's outputs."""
        self._ended.append((client, handle, Finished(FinishReason.ABORT)))

    def abort_requests(self, client: int, handles: Iterable[int]) -> None:
        """Forgets these requests, without a final output: their front end asked for it. Unknown handles are no-ops."""
        for handle in handles:
            self._engine.abort((client, handle))

    def abort_all(self, client: int | None = None) -> None:
        """Ends all requests (of one front end) as aborted; each gets its final output with the next step."""
        for key in self._engine.request_keys():
            if client is None or key[0] == client:
                self._engine.abort(key)
                self.refuse_request(*key)

    def forget_client(self, client: int) -> None:
        """The front end is gone: its requests end without a word, and its successor counts commands and handles from 1."""
        self.abort_requests(client, [key[1] for key in self._engine.request_keys() if key[0] == client])
        self._ended = [ended for ended in self._ended if ended[0] != client]
        self.command_seqs.pop(client, None)
        self._utilities.forget_client(client)
        self.cache_watch.forget(client)

    def call_utility(self, call: UtilityCall, client: int = 0) -> UtilityResult | None:
        """Runs a rare operation by name. None: it takes steps, and its result is among a later `take_late_results`."""
        return self._utilities.call(client, call)

    def take_late_results(self) -> list[tuple[int, UtilityResult]]:
        """Results by front end that have become due. To be asked after every step."""
        return self._utilities.take_late_results()

    # --- one step -----------------------------------------------------------------------------------------------------

    def step(self) -> dict[int, EngineCoreOutputs]:
        """Computes one batch. Outputs by front end, for those that have any; empty without work."""
        updates: list[RequestUpdate] = []
        if self._can_compute:
            start = self._clock()
            updates, num_prefill_tokens, num_decodes = self._engine.step(start)
            self.step_count += 1
            self._times.add(self._clock() - start, num_prefill_tokens, num_decodes)
            self.loras.drop_unused()
        return self._make_outputs(updates)

    def _make_outputs(self, updates: list[RequestUpdate]) -> dict[int, EngineCoreOutputs]:
        outputs: dict[int, EngineCoreOutputs] = {}
        load = self.load()
        for update in updates:  # once per token: whatever is added here costs every token of every request
            client, handle = update.request.key
            mine = outputs.get(client)
            if mine is None:
                mine = outputs[client] = self._empty_outputs(client, load)
            row = len(mine.handles)
            if update.prompt_logprobs is not None:
                mine.prompt_logprobs[row] = update.prompt_logprobs
            if update.token_id is None:
                if update.vector is not None:
                    _add_extras(mine, row, update)
                _append_empty_row(mine, handle, update.finished)
                continue
            if update.is_first or update.finished is not None or update.logprobs is not None:
                _add_extras(mine, row, update)
            mine.handles.append(handle)
            mine.token_ids.append(update.token_id)
            if mine.counts is not None:
                mine.counts.append(1)
        for client, handle, finished in self._ended:
            mine = outputs.get(client)
            if mine is None:
                mine = outputs[client] = self._empty_outputs(client, load)
            _append_empty_row(mine, handle, finished)
        self._ended.clear()
        return outputs

    def _empty_outputs(self, client: int, load: RankLoad) -> EngineCoreOutputs:
        return EngineCoreOutputs(
            rank_id=self.rank_id, step=self.step_count, command_seq=self.command_seqs.get(client, 0), load=load,
            handles=array("I"), token_ids=array("I"), weight_version=self.operations.weight_version,
        )  # fmt: skip

    def shutdown(self) -> None:
        self._runner.shutdown()

    def check_invariants(self) -> None:
        self._engine.check_invariants()
        self.loras.check_invariants()
        self.operations.standstill.check_invariants()


def _add_extras(outputs: EngineCoreOutputs, row: int, update: RequestUpdate) -> None:
    """The rare parts of a row: its first token's facts, its end, its log-probabilities, its vector."""
    request = update.request
    if update.is_first:
        assert request.first_scheduled_s is not None
        outputs.first_tokens[row] = FirstToken(request.num_cached_tokens, request.first_scheduled_s - request.received_s)
    if update.finished is not None:
        outputs.finished[row] = update.finished
    if update.logprobs is not None:
        outputs.logprobs[row] = [update.logprobs]
    if update.vector is not None:
        outputs.vectors[row] = update.vector


def _append_empty_row(outputs: EngineCoreOutputs, handle: int, finished: Finished | None) -> None:
    """A row without a token, for an end or for log-probabilities: from here on the message needs its column of counts."""
    if outputs.counts is None:
        outputs.counts = array("I", [1]) * len(outputs.handles)
    if finished is not None:
        outputs.finished[len(outputs.handles)] = finished
    outputs.handles.append(handle)
    outputs.counts.append(0)
