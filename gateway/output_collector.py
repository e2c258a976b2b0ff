"""Where a request's outputs wait for their reader. One slot: a slow reader costs memory for one output and loses nothing."""

from __future__ import annotations

import asyncio
from array import array
from typing import Protocol

from cores.sampling_params import RequestOutputKind
from gateway.outputs import CompletionOutput, RequestOutput

NUM_PLAIN_TOKENS = 256  # so many unread ones are kept as they came: nearly every reader has read them by then


class OutputSink(Protocol):
    """Where the output processor puts what it has for one request. After a finished output or an error nothing more comes."""

    def put(self, output: RequestOutput) -> None: ...
    def put_error(self, error: Exception) -> None: ...


class RequestOutputCollector:
    """One writer, one reader, one event loop.

    Unread outputs become one: deltas are joined, cumulative outputs replaced, per sequence. A final-only stream has but one.
    An error does not destroy unread tokens: they are read first, then it is raised, from then on every time.
    """

    __slots__ = ("_backlogs", "_error", "_has_ended", "_joins", "_output", "_waiter")

    def __init__(self, output_kind: RequestOutputKind) -> None:
        self._joins = output_kind is RequestOutputKind.DELTA
        self._output: RequestOutput | None = None
        self._backlogs: dict[int, _Backlog] = {}  # of sequences of `_output` of which much is unread, by index
        self._error: Exception | None = None
        self._has_ended = False  # the finished output has been read
        # The event: of one reader, and lighter than asyncio.Event in the path of every token.
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_empty(self) -> bool:
        """Nothing to read or to raise."""
        return self._output is None and self._error is None

    def put(self, output: RequestOutput) -> None:
        """Takes over `output`: it may be changed until it is read."""
        if self._output is None:
            self._output = output
        else:
            self._merge(self._output, output)
        self._wake()

    def put_error(self, error: Exception) -> None:
        if self._error is None:
            self._error = error
        self._wake()

    def get_nowait(self) -> RequestOutput | None:
        """What is unread, None if nothing is. Raises the error once all outputs are read."""
        output = self._output
        if output is not None:
            self._output = None
            self._has_ended = output.finished
            if self._backlogs:
                self._give_back(output)
            return output
        if self._error is not None:
            raise self._error
        if self._has_ended:
            raise RuntimeError("the stream has ended: its finished output has been read")
        return None

    async def get(self) -> RequestOutput:
        """Waits for something to read. Cancelling it loses nothing."""
        while (output := self.get_nowait()) is None:
            assert self._waiter is None, "a collector has one reader"
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return output

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _merge(self, unread: RequestOutput, newer: RequestOutput) -> None:
        unread.finished = newer.finished
        if newer.prompt_logprobs is not None:
            unread.prompt_logprobs = newer.prompt_logprobs
        if unread.rank is None:
            unread.rank = newer.rank
        if self._joins and len(unread.outputs) == len(newer.outputs) == 1 and unread.outputs[0].index == newer.outputs[0].index:
            self._append(unread.outputs[0], newer.outputs[0])  # what n = 1 always is
            return
        by_index = {completion.index: completion for completion in unread.outputs}
        for completion in newer.outputs:
            older = by_index.get(completion.index)
            if older is None or not self._joins:
                by_index[completion.index] = completion
            else:
                self._append(older, completion)
        unread.outputs = [by_index[index] for index in sorted(by_index)]

    def _append(self, older: CompletionOutput, newer: CompletionOutput) -> None:
        backlog = self._backlogs.get(older.index)
        if backlog is None and len(older.token_ids) >= NUM_PLAIN_TOKENS:
            backlog = self._backlogs[older.index] = _Backlog(older)
        if backlog is None:
            older.text += newer.text
            older.token_ids += newer.token_ids
        else:
            backlog.add(newer)
        if newer.logprobs:
            older.logprobs = older.logprobs or []
            older.logprobs += newer.logprobs
        older.finish_reason = newer.finish_reason
        older.stop_reason = newer.stop_reason

    def _give_back(self, output: RequestOutput) -> None:
        for completion in output.outputs:
            backlog = self._backlogs.pop(completion.index, None)
            if backlog is not None:
                completion.text, completion.token_ids = backlog.take()

    def check_invariants(self) -> None:
        assert self._output is not None or not self._backlogs
        if self._output is not None:
            indexes = [completion.index for completion in self._output.outputs]
            assert indexes == sorted(set(indexes)), indexes
            assert self._backlogs.keys() <= set(indexes), self._backlogs.keys()
            assert not self._has_ended
            waiter = self._waiter
            assert waiter is None or waiter.done(), "a reader sleeps beside an unread output"


class _Backlog:
    """Text and ids of one sequence whose reader has stopped for a while: as bytes, which take 10 a token where strings and
    numbers take 50, and to which a token is added without copying all those before it."""

    __slots__ = ("_text", "_token_ids")

    def __init__(self, completion: CompletionOutput) -> None:
        """Takes them over from `completion`."""
        self._text = bytearray()
        self._token_ids = array("I")
        self.add(completion)
        completion.text, completion.token_ids = "", []

    def add(self, completion: CompletionOutput) -> None:
        self._text += completion.text.encode(errors="surrogatepass")
        self._token_ids.extend(completion.token_ids)

    def take(self) -> tuple[str, list[int]]:
        return self._text.decode(errors="surrogatepass"), self._token_ids.tolist()
