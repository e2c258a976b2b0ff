"""What the front end knows of a request in flight: one stream to one reader, with one state per sequence. Knows no engines."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cores.messages import Finished, FirstToken, TokenLogprobs
from cores.sampling_params import RequestOutputKind, SamplingParams
from gateway.detokenizer import IncrementalDetokenizer
from gateway.logprobs import PromptLogprobs, position_logprobs
from gateway.output_collector import OutputSink
from gateway.outputs import CompletionOutput, PositionLogprobs, RequestOutput, RequestStats
from gateway.parallel_sampling import ParentRequest
from gateway.tokenizer import Tokenizer


@dataclass(slots=True)
class RankStay:
    """A sequence at a rank, for traces. Times are the front end's clock, in seconds."""

    handle: int
    rank: int
    since_s: float
    first_token_s: float | None = None  # its first one there
    until_s: float | None = None  # when the rank died; None: it ended there


@dataclass(slots=True, kw_only=True, eq=False)
class RequestStream:
    """One request as its reader sees it: its sequences share a sink, statistics and one end."""

    external_id: str
    internal_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams  # of the request; each of several sequences has its own
    sink: OutputSink
    arrival_s: float
    parent: ParentRequest | None = None  # where there are several sequences
    lora_name: str | None = None
    tenant: str | None = None
    trace_headers: Mapping[str, str] | None = None
    rank: int | None = None
    stays: list[RankStay] = field(default_factory=list)  # as they began; only where traces are made
    states: dict[int, RequestState] = field(default_factory=dict)  # of sequences that have not ended, by handle
    prompt_logprobs: PromptLogprobs | None = None  # as far as they have come, where they were asked for
    longest: int = 0  # tokens of the longest sequence that has ended
    num_open: int = field(init=False)  # sequences that have not ended
    stats: RequestStats = field(init=False)

    def __post_init__(self) -> None:
        self.num_open = 1 if self.parent is None else self.parent.n
        self.stats = RequestStats(self.arrival_s)

    @property
    def waits_for_all(self) -> bool:
        return self.parent is not None and self.params.output_kind is RequestOutputKind.FINAL_ONLY

    def put(self, completion: CompletionOutput) -> None:
        """To the reader; a completion with a finish reason ends its sequence."""
        completions: list[CompletionOutput] | None = [completion]
        if completion.finished:
            self.num_open -= 1
            if self.waits_for_all and self.parent is not None:
                completions = self.parent.record(completion)
        if completions is not None:
            self._put(completions)

    def put_aborted(self) -> None:
        """Ends all open sequences with one last output that holds what they have."""
        completions = [state.finish("abort", None) for state in sorted(self.states.values(), key=lambda state: state.index)]
        self.num_open = 0
        if self.waits_for_all and self.parent is not None:
            for completion in completions:
                completions = self.parent.record(completion) or completions  # the last one gives them all
        self._put(completions)

    def _put(self, completions: list[CompletionOutput]) -> None:
        output = RequestOutput(
            self.external_id, self.prompt, self.prompt_token_ids, completions, self.num_open == 0, self.stats, self.rank
        )
        if self.prompt_logprobs is not None and self.prompt_logprobs.is_complete:
            output.prompt_logprobs = self.prompt_logprobs
        self.sink.put(output)

    def on_end(self, state: RequestState) -> None:
        """Of a sequence, whatever ended it."""
        self.longest = max(self.longest, len(state.accepted))

    def on_first_token(self, first: FirstToken) -> None:
        """Of the first sequence that has one: the others' prompt is found in its cache."""
        self.stats.queued_s = first.queued_s
        self.stats.num_cached_tokens = first.num_cached_tokens

    def last_stay(self, handle: int) -> RankStay | None:
        return next((stay for stay in reversed(self.stays) if stay.handle == handle), None)


class RequestState:
    """One sequence: its text so far, and what of it the reader has not been given."""

    __slots__ = (
        "_entries", "_has_new", "_include_stop", "_logprobs", "_output_kind", "_stop_token_ids", "_text", "_token_ids",
        "_tokenizer", "_wants_logprobs", "_wants_prompt_logprobs", "accepted", "can_be_plain", "detokenizer", "handle",
        "has_tokens", "index", "is_delta", "is_plain", "last_token_s", "push_one", "stream", "vector",
    )  # fmt: skip

    def __init__(self, handle: int, index: int, tokenizer: Tokenizer, params: SamplingParams, stream: RequestStream) -> None:
        self.handle = handle
        self.index = index
        self.stream = stream
        self.has_tokens = False  # the first has come
        self.last_token_s = 0.0
        # Tokens from engines, so that another one can go on from here. Kept to the end: 4 bytes each, not 36 as in a list.
        self.accepted = array("I")
        self.vector: bytes | None = None  # of a pooling request
        self._tokenizer = tokenizer
        self.detokenizer = IncrementalDetokenizer(tokenizer, params, stream.prompt_token_ids)
        self.push_one = self.detokenizer.push
        self._output_kind = params.output_kind
        self.is_delta = params.output_kind is RequestOutputKind.DELTA
        self._include_stop = params.include_stop_str_in_output
        self._stop_token_ids = params.stop_token_ids
        self._wants_logprobs = params.logprobs is not None
        self._wants_prompt_logprobs = params.prompt_logprobs is not None
        if params.prompt_logprobs is not None and stream.prompt_logprobs is None:
            stream.prompt_logprobs = PromptLogprobs(tokenizer, stream.prompt_token_ids, params.prompt_logprobs)
        # Plain rows take the short path of the output processor: nothing but text, ids and a stop string can come of them.
        self.can_be_plain = not (
            self._wants_logprobs or self._wants_prompt_logprobs or self._output_kind is RequestOutputKind.CUMULATIVE
        )
        self.is_plain = False  # from the first token on
        # Not given to the reader yet (delta), or from the start (the other kinds).
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[PositionLogprobs] = []
        self._entries: list[PositionLogprobs] = []  # of ids that the detokenizer holds back
        self._has_new = False

    def add(self, text: str, token_ids: list[int]) -> None:
        """What the detokenizer has released."""
        self._text.append(text)
        self._token_ids += token_ids
        self._has_new = self._has_new or bool(text or token_ids)
        if self._wants_logprobs:
            self._logprobs += self._entries[: len(token_ids)]
            del self._entries[: len(token_ids)]

    def push(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], finished: Finished | None) -> int:
        """Takes the new tokens of one row, up to a stop string. The number taken."""
        hides_last = finished is not None and self._ends_in_hidden_token(token_ids, finished)
        for i, token_id in enumerate(token_ids):
            self.accepted.append(token_id)
            if self._wants_logprobs:
                self._entries.append(position_logprobs(self._tokenizer, token_id, logprobs[i]))
            if hides_last and i == len(token_ids) - 1:
                self.detokenizer.push_hidden(token_id)
            else:
                self.add(*self.detokenizer.push(token_id))
            if self.detokenizer.stop_string is not None:
                return i + 1
        return len(token_ids)

    def _ends_in_hidden_token(self, token_ids: Sequence[int], finished: Finished) -> bool:
        return bool(token_ids) and not self._include_stop and finished.stop_token_id == token_ids[-1]

    def lacks_logprobs(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> bool:
        return self._wants_logprobs and len(token_ids) != len(logprobs)

    def lacks_prompt_logprobs(self, token_ids: Sequence[int]) -> bool:
        """An engine sends them all before the first token."""
        known = self.stream.prompt_logprobs
        return self._wants_prompt_logprobs and bool(token_ids) and known is not None and not known.is_complete

    def stop_reason(self, finished: Finished) -> int | None:
        """The stop token that the request named; EOS needs no naming."""
        return finished.stop_token_id if finished.stop_token_id in self._stop_token_ids else None

    def take_new(self) -> CompletionOutput | None:
        """What the reader is to be given now, None if there is nothing."""
        if self._output_kind is RequestOutputKind.FINAL_ONLY or not self._has_new:
            return None
        return self._take(None, None)

    def finish(self, finish_reason: str, stop_reason: int | str | None) -> CompletionOutput:
        """The last of this sequence, with all that was held back."""
        self.add(*self.detokenizer.finish())
        return self._take(finish_reason, stop_reason)

    def _take(self, finish_reason: str | None, stop_reason: int | str | None) -> CompletionOutput:
        self._has_new = False
        text = "".join(self._text)
        logprobs = self._logprobs if self._wants_logprobs else None
        if self.is_delta or finish_reason is not None:
            completion = CompletionOutput(self.index, text, self._token_ids, logprobs, finish_reason, stop_reason, self.vector)
            self._text, self._token_ids, self._logprobs = [], [], []
            return completion
        self._text = [text]
        return CompletionOutput(self.index, text, self._token_ids.copy(), None if logprobs is None else logprobs.copy())
