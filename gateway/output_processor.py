"""What engines send, to what readers get. The only loop over a whole batch in the front end: per-output work goes here.

Knows no sockets, tasks or clocks. Its promise: every registered request is either removed or gets exactly one end, a finished
output or an error; what still comes for it afterwards is dropped and counted.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from cores.messages import EngineCoreOutputs, FinishReason, TokenLogprobs
from cores.sampling_params import SamplingParams
from gateway.errors import EngineGenerateError, GatewayError, OverloadedError
from gateway.output_statistics import FinishedRequest, OutputCounters, TokenTimes
from gateway.outputs import CompletionOutput, RequestOutput
from gateway.request_state import RankStay, RequestState, RequestStream
from gateway.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProcessedOutputs:
    """What the caller has to do after one slice. No handle is in both lists."""

    abort_handles: list[int]  # ended here, by a stop string or a sibling's error; their engines must be told
    finished_handles: list[int]  # ended by their engine
    num_tokens: int


class OutputProcessor:
    """All requests in flight, by the handle of each sequence. `on_finished` and `on_tokens` are for statistics."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        on_finished: Callable[[FinishedRequest], None] | None = None,
        on_tokens: Callable[[TokenTimes], None] | None = None,
    ) -> None:
        self.on_finished = on_finished
        self.on_tokens = on_tokens
        self.keeps_stays = False  # set where somebody makes traces
        self.counters = OutputCounters()
        self._tokenizer = tokenizer
        self._states: dict[int, RequestState] = {}
        self._streams: dict[str, RequestStream] = {}  # by internal id
        self._internal_ids: dict[str, set[str]] = {}  # by external id, which callers may use twice

    # --- requests -----------------------------------------------------------------------------------------------------

    def add_sequence(self, stream: RequestStream, *, handle: int, index: int, params: SamplingParams) -> None:
        """Registers one sequence of a request, and the request with its first one."""
        assert handle not in self._states, f"handle {handle} is in use"
        known = self._streams.setdefault(stream.internal_id, stream)
        assert known is stream, f"internal id {stream.internal_id!r} is in use"
        self._internal_ids.setdefault(stream.external_id, set()).add(stream.internal_id)
        state = RequestState(handle, index, self._tokenizer, params, stream)
        self._states[handle] = stream.states[handle] = state

    def set_rank(self, handle: int, rank: int, now: float) -> None:
        """Who serves a sequence from now on. Readers are told of the first one only."""
        state = self._states.get(handle)
        if state is None:
            return
        if state.stream.rank is None:
            state.stream.rank = rank
        if self.keeps_stays:
            state.stream.stays.append(RankStay(handle, rank, now))

    def remove(self, handles: Iterable[int]) -> None:
        """Takes back the registration of the requests with these sequences: no output, nothing counted."""
        for stream in self._streams_of(handles):
            self._drop(stream)

    def abort(self, request_id: str, tenant: str | None = None) -> list[int]:
        """Ends the requests of that external or internal id, and of that tenant if one is given: their readers get what they
        have, with finish reason "abort". The handles that engines must be told of; none for an unknown or finished id."""
        internal_ids = self._internal_ids.get(request_id, set()) | {request_id}
        streams = [self._streams[internal_id] for internal_id in sorted(internal_ids & self._streams.keys())]
        return self._abort([stream for stream in streams if tenant in (None, stream.tenant)])

    def abort_sequences(self, handles: Iterable[int]) -> list[int]:
        """The same for the requests with these sequences."""
        return self._abort(self._streams_of(handles))

    def _abort(self, streams: Iterable[RequestStream]) -> list[int]:
        handles: list[int] = []
        for stream in streams:
            handles += stream.states
            stream.put_aborted()
            self._end(stream, "abort")
        return handles

    def abort_all(self) -> list[int]:
        """The same for every request."""
        return [handle for internal_id in list(self._streams) for handle in self.abort(internal_id)]

    def fail(self, handles: Iterable[int], error: Exception) -> list[int]:
        """Ends the requests with these sequences with `error`. The handles of their other sequences, which may run in engines
        that live on and must be told."""
        failed = set(handles)
        siblings: list[int] = []
        for stream in self._streams_of(failed):
            siblings += stream.states.keys() - failed
            self._fail(stream, error)
        return sorted(siblings)

    def fail_all(self, error: Exception) -> list[int]:
        """Ends every request with `error`. The handles of their sequences, for engines that live on."""
        handles = list(self._states)
        for stream in list(self._streams.values()):
            self._fail(stream, error)
        return handles

    @property
    def num_unfinished(self) -> int:
        """Sequences in flight."""
        return len(self._states)

    def accepted_token_ids(self, handle: int) -> array[int] | None:
        """All tokens that its rank was seen to generate, also those whose text is held back; None once it has ended."""
        state = self._states.get(handle)
        return None if state is None else state.accepted

    def note_move(self, handle: int, now: float) -> None:
        """The sequence goes on at another rank."""
        stream = self._states[handle].stream
        stream.stats.num_moves += 1
        if (stay := stream.last_stay(handle)) is not None:
            stay.until_s = now

    def count_by_lora(self) -> dict[str, tuple[int, int]]:
        """Sequences that wait for their first token and those that have it, by adapter."""
        counts: dict[str, tuple[int, int]] = {}
        for state in self._states.values():
            name = state.stream.lora_name
            if name is not None:
                waiting, running = counts.get(name, (0, 0))
                counts[name] = (waiting, running + 1) if state.has_tokens else (waiting + 1, running)
        return counts

    def handles_of(self, internal_id: str) -> list[int]:
        """Of the sequences that have not ended; none for an unknown id."""
        stream = self._streams.get(internal_id)
        return [] if stream is None else list(stream.states)

    def _streams_of(self, handles: Iterable[int]) -> list[RequestStream]:
        """Each once, in order of the handles; unknown ones have none."""
        return list(dict.fromkeys(state.stream for handle in handles if (state := self._states.get(handle)) is not None))

    def _fail(self, stream: RequestStream, error: Exception) -> None:
        stream.sink.put_error(error)
        self._end(stream, "error")

    def _end(self, stream: RequestStream, finish_reason: str) -> None:
        """After its reader has been told."""
        self._drop(stream)
        self.counters.on_end(finish_reason)
        if self.on_finished is not None:
            self.on_finished(FinishedRequest.of(stream, finish_reason))

    def _drop(self, stream: RequestStream) -> None:
        for handle, state in stream.states.items():
            stream.on_end(state)
            del self._states[handle]
        stream.states = {}
        del self._streams[stream.internal_id]
        siblings = self._internal_ids[stream.external_id]
        siblings.remove(stream.internal_id)
        if not siblings:
            del self._internal_ids[stream.external_id]

    # --- outputs ------------------------------------------------------------------------------------------------------

    def process(self, outputs: EngineCoreOutputs, chunk_size: int, now: float) -> Iterator[ProcessedOutputs]:
        """Hands out one step's outputs, `chunk_size` rows at a time; the caller gives the loop a turn between slices. Requests
        may come and go meanwhile. Must be iterated to its end."""
        extras = {*outputs.first_tokens, *outputs.finished, *outputs.logprobs, *outputs.prompt_logprobs}
        num_rows, offset = len(outputs.handles), 0
        for start in range(0, num_rows, chunk_size):
            batch = _Slice(outputs, now, None if self.on_tokens is None else TokenTimes(outputs.rank_id.rank))
            offset = self._process_rows(batch, range(start, min(start + chunk_size, num_rows)), offset, extras)
            self.counters.generation_tokens += batch.num_tokens
            if batch.times is not None and self.on_tokens is not None:
                batch.times.num_tokens = batch.num_tokens
                self.on_tokens(batch.times)
            yield ProcessedOutputs(batch.abort_handles, batch.finished_handles, batch.num_tokens)

    def _process_rows(self, batch: _Slice, rows: range, offset: int, extras: set[int]) -> int:
        """The hot path: one turn of this loop is one streamed token. Returns the offset of the next row's tokens.

        A bug that one row meets costs its own request: the others of the batch are nobody's fault.
        """
        states, now, times = self._states, batch.now, batch.times
        handles, token_ids, counts = batch.outputs.handles, batch.outputs.token_ids, batch.outputs.counts
        num_plain = 0
        for row in rows:
            count = 1 if counts is None else counts[row]
            state = states.get(handles[row])
            if state is None:
                self.counters.stray_outputs += 1
                offset += count
                continue
            try:
                if count == 1 and state.is_plain and row not in extras:
                    num_plain += 1
                    stream = state.stream
                    stats = stream.stats
                    stats.num_generation_tokens += 1
                    stats.last_token_s = now
                    if times is not None:
                        times.inter_token_s.append(now - state.last_token_s)
                        state.last_token_s = now
                    state.accepted.append(token_ids[offset])
                    text, ids = state.push_one(token_ids[offset])
                    if state.detokenizer.stop_string is not None:
                        state.add(text, ids)
                        self._stop(batch, state, finished=False)
                    elif not state.is_delta:
                        state.add(text, ids)
                    elif text or ids:
                        completion = CompletionOutput(state.index, text, ids)
                        external_id, prompt, prompt_token_ids = stream.external_id, stream.prompt, stream.prompt_token_ids
                        stream.sink.put(
                            RequestOutput(external_id, prompt, prompt_token_ids, [completion], False, stats, stream.rank)
                        )
                else:
                    self._process_row(batch, state, row, token_ids[offset : offset + count])
            except Exception as error:
                self._fail_row(batch, state, error)
            offset += count
        batch.num_tokens += num_plain
        return offset

    def _fail_row(self, batch: _Slice, state: RequestState, error: Exception) -> None:
        logger.exception("request %s: its output could not be processed", state.stream.internal_id)
        if state.handle not in self._states:
            return  # it had had its end
        text = f"the output of {batch.outputs.rank_id} could not be processed: {type(error).__name__}: {error}"
        siblings = self.fail([state.handle], EngineGenerateError(text))
        has_ended = state.handle in batch.finished_handles
        told = set(batch.abort_handles)
        batch.abort_handles += [h for h in (*siblings, *(() if has_ended else (state.handle,))) if h not in told]

    def _process_row(self, batch: _Slice, state: RequestState, row: int, token_ids: Sequence[int]) -> None:
        """A row of any kind."""
        outputs, stream = batch.outputs, state.stream
        finished, logprobs = outputs.finished.get(row), outputs.logprobs.get(row, ())
        stream.stats.weight_version = outputs.weight_version
        if finished is not None:
            batch.finished_handles.append(state.handle)
        error = self._add_prompt_logprobs(batch, state, row) or self._row_error(batch, state, row, token_ids, logprobs)
        if error is not None:
            siblings = self.fail([state.handle], error)
            batch.abort_handles += siblings if finished is not None else [state.handle, *siblings]
            return
        num_taken = state.push(token_ids, logprobs, finished)
        if num_taken:
            self._book_tokens(batch, state, num_taken)
        if (first := outputs.first_tokens.get(row)) is not None:
            if stream.stats.num_generation_tokens == num_taken:
                stream.on_first_token(first)
            if (stay := stream.last_stay(state.handle)) is not None:
                stay.first_token_s = batch.now
        if (vector := outputs.vectors.get(row)) is not None:
            self._book_vector(batch, state, vector)
        if state.detokenizer.stop_string is not None:
            self._stop(batch, state, finished=finished is not None)
        elif finished is not None:
            self._finish(state, finished.reason.text, state.stop_reason(finished))
        elif (completion := state.take_new()) is not None:
            stream.put(completion)

    @staticmethod
    def _add_prompt_logprobs(batch: _Slice, state: RequestState, row: int) -> EngineGenerateError | None:
        chunk, known = batch.outputs.prompt_logprobs.get(row), state.stream.prompt_logprobs
        if chunk is not None and known is not None:
            try:
                known.add(chunk)
            except ValueError as error:
                return EngineGenerateError(f"{batch.outputs.rank_id}: {error}")
        return None

    @staticmethod
    def _row_error(
        batch: _Slice, state: RequestState, row: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> GatewayError | None:
        finished, rank_id = batch.outputs.finished.get(row), batch.outputs.rank_id
        if finished is not None and finished.reason is FinishReason.ERROR:
            return EngineGenerateError(finished.error or f"{rank_id} failed the request and gave no reason")
        if finished is not None and finished.reason is FinishReason.REJECTED:
            return OverloadedError(f"{rank_id}: {finished.error or 'it takes no requests now'}")
        if state.lacks_logprobs(token_ids, logprobs):
            return EngineGenerateError(f"{rank_id} sent {len(token_ids)} tokens with log-probabilities of {len(logprobs)}")
        if state.lacks_prompt_logprobs(token_ids):
            return EngineGenerateError(f"{rank_id} sent a token before the log-probabilities of the prompt")
        return None

    def _book_tokens(self, batch: _Slice, state: RequestState, num_tokens: int) -> None:
        stream, now, times = state.stream, batch.now, batch.times
        stats = stream.stats
        batch.num_tokens += num_tokens
        stats.num_generation_tokens += num_tokens
        stats.last_token_s = now
        if stats.first_token_s is None:
            stats.first_token_s = now
            self.counters.prompt_tokens += len(stream.prompt_token_ids)
            if stream.rank is None:
                stream.rank = batch.outputs.rank_id.rank
            if times is not None:
                times.time_to_first_token_s.append(now - stats.arrival_s)
        if times is not None and state.has_tokens:
            times.inter_token_s.append(now - state.last_token_s)
        state.last_token_s = now
        state.has_tokens = True
        state.is_plain = state.can_be_plain

    def _book_vector(self, batch: _Slice, state: RequestState, vector: bytes) -> None:
        """All that a pooling request gets; its row ends it."""
        state.vector = vector
        stats = state.stream.stats
        stats.first_token_s = stats.last_token_s = batch.now
        self.counters.prompt_tokens += len(state.stream.prompt_token_ids)

    def _stop(self, batch: _Slice, state: RequestState, *, finished: bool) -> None:
        """Ended by a stop string, which its engine cannot see: that works on the next token unless it has `finished` too."""
        if not finished:
            batch.abort_handles.append(state.handle)
        self._finish(state, "stop", state.detokenizer.stop_string)

    def _finish(self, state: RequestState, finish_reason: str, stop_reason: int | str | None) -> None:
        stream = state.stream
        stream.put(state.finish(finish_reason, stop_reason))
        stream.on_end(state)
        del self._states[state.handle], stream.states[state.handle]
        if stream.num_open == 0:
            self._end(stream, finish_reason)

    def check_invariants(self) -> None:
        assert self._streams.keys() == {i for ids in self._internal_ids.values() for i in ids}
        assert all(self._internal_ids.values()), "an external id is kept without a request"
        for internal_id, stream in self._streams.items():
            assert stream.internal_id == internal_id
            assert internal_id in self._internal_ids[stream.external_id]
            assert 1 <= len(stream.states) <= stream.num_open
        in_streams = {handle: state for stream in self._streams.values() for handle, state in stream.states.items()}
        assert in_streams == self._states
        for handle, state in self._states.items():
            assert state.handle == handle


class _Slice:
    """What has come of one slice so far."""

    __slots__ = ("abort_handles", "finished_handles", "now", "num_tokens", "outputs", "times")

    def __init__(self, outputs: EngineCoreOutputs, now: float, times: TokenTimes | None) -> None:
        self.outputs = outputs
        self.now = now
        self.times = times
        self.abort_handles: list[int] = []
        self.finished_handles: list[int] = []
        self.num_tokens = 0
