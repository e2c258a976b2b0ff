"""Token ids of one sequence, as they come, to text. Knows no requests.

Rules
-----
* The pieces joined are what decoding all ids at once gives. Bytes that are no whole character yet are held back; at the end
  they become U+FFFD, as they would in a full decode.
* An id is released with the text that it completes, never before: ids do not run ahead of text.
* The prompt is never shown. A prompt that ends inside a character lends its bytes, so that the first token completes it.
"""

from __future__ import annotations

import codecs
from bisect import bisect_right
from collections.abc import Sequence
from typing import Protocol

from cores.sampling_params import SamplingParams
from gateway.stop_strings import StopStringMatcher
from gateway.tokenizer import ByteTable, Tokenizer

REPLACEMENT = "\ufffd"
NUM_CONTEXT_TOKENS = 6  # of the prompt, for decoders in which a token's text depends on its neighbours
MAX_CHARACTER_TOKENS = 4  # UTF-8 takes at most four bytes: more tokens than that do not wait for the same character
Released = tuple[str, list[int]]  # text, and the ids whose text is out with it


class TextDecoder(Protocol):
    """Ids to text; `is_pending` while the last ones are part of a character."""

    @property
    def is_pending(self) -> bool: ...
    def push(self, token_id: int) -> str: ...
    def flush(self) -> str: ...


class ByteTableDecoder:
    """For byte-level BPE: looks up each token's bytes and decodes UTF-8 as it comes."""

    __slots__ = ("_pending", "_replacement_is_prompt", "_table")

    def __init__(self, table: ByteTable, prompt_token_ids: Sequence[int]) -> None:
        self._table = table
        self._pending = _partial_character(table, prompt_token_ids)
        # If the output does not complete the prompt's last character, its replacement belongs to the prompt.
        self._replacement_is_prompt = bool(self._pending)

    @property
    def is_pending(self) -> bool:
        return bool(self._pending)

    def push(self, token_id: int) -> str:
        if not self._pending and token_id < len(self._table.texts) and (text := self._table.texts[token_id]) is not None:
            return text
        return self._decode(self._table.bytes_of(token_id), final=False)

    def flush(self) -> str:
        return self._decode(b"", final=True)

    def _decode(self, data: bytes, *, final: bool) -> str:
        data = self._pending + data
        text, num_consumed = codecs.utf_8_decode(data, "replace", final)
        self._pending = data[num_consumed:]
        if text and self._replacement_is_prompt:
            self._replacement_is_prompt = False
            text = text.removeprefix(REPLACEMENT)
        return text


def _partial_character(table: ByteTable, token_ids: Sequence[int]) -> bytes:
    """The bytes at the end of a prompt that are no whole character."""
    tail = b""
    for token_id in reversed(token_ids[-NUM_CONTEXT_TOKENS:]):
        tail = table.bytes_of(token_id) + tail
        if len(tail) >= MAX_CHARACTER_TOKENS:
            break
    return tail[codecs.utf_8_decode(tail, "replace", False)[1] :]


class PrefixDecoder:
    """For any tokenizer: decodes the new ids behind those before them and takes off what those give alone.

    A run of ids that never makes a character (invalid bytes, or a token that is U+FFFD) is let go after a few.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, prompt_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._ids: list[int] = []
        self._num_shown = 0  # the first of `_ids`, kept as context
        self._shown_text = ""
        self._keep(list(prompt_token_ids[-NUM_CONTEXT_TOKENS:]))

    @property
    def is_pending(self) -> bool:
        return len(self._ids) > self._num_shown

    def push(self, token_id: int) -> str:
        if self._skip_special_tokens and token_id in self._tokenizer.special_ids:
            return ""  # nor is it context for what follows
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if text.endswith(REPLACEMENT) and len(self._ids) - self._num_shown < MAX_CHARACTER_TOKENS:
            return ""
        return self._show(text)

    def flush(self) -> str:
        return self._show(self._decode(self._ids))

    def _show(self, text: str) -> str:
        new = _behind(self._shown_text, text)
        # A token without text, such as the space that is dropped at the start of a text, is no context by itself.
        self._keep(self._ids[self._num_shown :] if new else self._ids[-NUM_CONTEXT_TOKENS:])
        return new

    def _keep(self, context: list[int]) -> None:
        self._ids, self._num_shown, self._shown_text = context, len(context), self._decode(context)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, self._skip_special_tokens)


def _behind(shown: str, text: str) -> str:
    """What `text` says beyond `shown`. They differ only where `shown` ends in the replacement of a broken character."""
    num_same = len(shown)
    while not text.startswith(shown[:num_same]):
        num_same -= 1
    return text[num_same:]


class IncrementalDetokenizer:
    """One sequence's ids to text, up to its first stop string. `stop_string` is set once one has ended it."""

    __slots__ = (
        "_decoder", "_direct", "_ends", "_ids", "_matcher", "_min_tokens", "_num_decoded", "_num_released", "_num_tokens",
        "_texts", "stop_string",
    )  # fmt: skip

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        table = tokenizer.byte_table(params.skip_special_tokens)
        self._decoder: TextDecoder = (
            PrefixDecoder(tokenizer, params.skip_special_tokens, prompt_token_ids)
            if table is None
            else ByteTableDecoder(table, prompt_token_ids)
        )
        self._matcher = StopStringMatcher(params.stop, params.include_stop_str_in_output) if params.stop else None
        self._min_tokens = params.min_tokens
        self.stop_string: str | None = None
        self._num_tokens = 0
        self._num_decoded = 0  # characters
        self._num_released = 0
        self._ids: list[int] = []  # not released yet
        self._ends: list[int] = []  # where the text of the first of them ends; the others' last character is still to come
        # While nothing can be held back, a token's text is found here; empty at other times.
        self._texts: list[str | None] = [] if table is None or self._matcher else table.texts
        self._direct = [] if self._decoder.is_pending else self._texts

    def push(self, token_id: int) -> Released:
        """The text and ids that this id releases. Not to be called again once `stop_string` is set."""
        try:
            text = self._direct[token_id]
        except IndexError:
            text = None
        if text is not None:
            return text, [token_id]
        return self._push_slowly(token_id)

    def push_hidden(self, token_id: int) -> None:
        """The token that ended the sequence and is not to be shown; its id comes out of `finish`."""
        self._ids.append(token_id)

    def finish(self) -> Released:
        """All that is held back: no more ids will come."""
        text = "" if self.stop_string is not None else self._decoder.flush()
        if self._matcher is not None and self.stop_string is None:
            text = self._match(self._matcher, text) + self._matcher.take_held()
        ids, self._ids = self._ids, []
        self._ends.clear()
        return text, ids

    def _push_slowly(self, token_id: int) -> Released:
        self._num_tokens += 1
        self._ids.append(token_id)
        text = self._decoder.push(token_id)
        self._num_decoded += len(text)
        self._mark_ends(bool(text))
        if self._matcher is not None:
            text = self._match(self._matcher, text)
        self._num_released += len(text)
        return text, self._take_ids()

    def _match(self, matcher: StopStringMatcher, text: str) -> str:
        text, self.stop_string = matcher.feed(text, armed=self._num_tokens > self._min_tokens)
        return text

    def _mark_ends(self, has_text: bool) -> None:
        """Of a partial character, its first bytes came with the oldest unmarked id; text means that it is complete."""
        if not self._decoder.is_pending:
            num_complete = len(self._ids)
        elif has_text:
            num_complete = len(self._ids) - 1  # the last id began the next one
        else:
            return
        self._ends.extend([self._num_decoded] * (num_complete - len(self._ends)))

    def _take_ids(self) -> list[int]:
        if self.stop_string is not None or (self._num_released == self._num_decoded and not self._decoder.is_pending):
            ids, self._ids, self._ends, self._direct = self._ids, [], [], self._texts
            return ids
        num_out = bisect_right(self._ends, self._num_released)
        ids = self._ids[:num_out]
        del self._ids[:num_out], self._ends[:num_out]
        self._direct = [] if self._ids else self._texts
        return ids
