"""Log-probabilities as the engine sends them, to what readers get.

A token's `text` is its own bytes decoded by themselves. Bytes that are no whole character are written `\\xe6`, as OpenAI does:
texts of different tokens then differ, and none holds U+FFFD unless the token means it. `bytes_` is always exact.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import overload

from cores.messages import PromptLogprobsChunk, TokenLogprobs
from gateway.outputs import Logprob, PositionLogprobs
from gateway.tokenizer import Tokenizer


class PromptLogprobs(Sequence[PositionLogprobs | None]):
    """What is known of each token of a prompt; None of its first, which nothing comes before.

    Kept in the columns that engines send: a long prompt has so many that objects for all of them would hold up everybody else.
    They are made one by one, where they are read.
    """

    def __init__(self, tokenizer: Tokenizer, token_ids: Sequence[int], num_top: int) -> None:
        num_scored = len(token_ids) - 1
        self._tokenizer = tokenizer
        self._token_ids = token_ids
        self._num_top = num_top
        self._end = 1  # what is behind this position has not come yet
        self._logprobs = array("f", bytes(4 * num_scored))
        self._ranks = array("I", bytes(4 * num_scored))
        self._top_token_ids = array("I", bytes(4 * num_scored * self._num_top))
        self._top_logprobs = array("f", bytes(4 * num_scored * self._num_top))

    def add(self, chunk: PromptLogprobsChunk) -> None:
        """The next part; or one again, from an engine that had to begin anew. Raises `ValueError` for one that fits nowhere."""
        first, last, num_top = chunk.start - 1, chunk.start - 1 + len(chunk.logprobs), self._num_top
        if chunk.num_top != num_top or not (1 <= chunk.start <= self._end and last < len(self._token_ids)):
            raise ValueError(f"log-probabilities from {chunk.start} on with {chunk.num_top} alternatives fit no prompt")
        self._logprobs[first:last] = chunk.logprobs
        self._ranks[first:last] = chunk.ranks
        self._top_token_ids[first * num_top : last * num_top] = chunk.top_token_ids
        self._top_logprobs[first * num_top : last * num_top] = chunk.top_logprobs
        self._end = max(self._end, last + 1)

    @property
    def is_complete(self) -> bool:
        return self._end == len(self._token_ids)

    @property
    def first_text(self) -> str:
        """Of the token that has no log-probability."""
        return _text(self._tokenizer.token_bytes(self._token_ids[0]))

    @property
    def first_token_id(self) -> int:
        return self._token_ids[0]

    def __len__(self) -> int:
        return len(self._token_ids)

    @overload
    def __getitem__(self, index: int) -> PositionLogprobs | None: ...
    @overload
    def __getitem__(self, index: slice) -> list[PositionLogprobs | None]: ...
    def __getitem__(self, index: int | slice) -> PositionLogprobs | list[PositionLogprobs | None] | None:
        if isinstance(index, slice):
            return [self._at(i) for i in range(len(self))[index]]
        return self._at(range(len(self))[index])

    def _at(self, position: int) -> PositionLogprobs | None:
        if position == 0:
            return None
        i, num_top = position - 1, self._num_top
        top = slice(i * num_top, (i + 1) * num_top)
        entry = TokenLogprobs(
            self._logprobs[i], self._ranks[i], tuple(self._top_token_ids[top]), tuple(self._top_logprobs[top])
        )
        return position_logprobs(self._tokenizer, self._token_ids[position], entry)


def position_logprobs(tokenizer: Tokenizer, token_id: int, entry: TokenLogprobs) -> PositionLogprobs:
    """What is known of one generated token."""
    return PositionLogprobs(
        chosen=_logprob(tokenizer, token_id, entry.logprob, entry.rank),
        top=tuple(
            _logprob(tokenizer, top_id, logprob, rank)
            for rank, (top_id, logprob) in enumerate(zip(entry.top_token_ids, entry.top_logprobs, strict=True), start=1)
        ),
    )


def _logprob(tokenizer: Tokenizer, token_id: int, logprob: float, rank: int) -> Logprob:
    data = tokenizer.token_bytes(token_id)
    return Logprob(token_id, logprob, rank, _text(data), data)


def _text(data: bytes) -> str:
    return data.decode(errors="backslashreplace")
