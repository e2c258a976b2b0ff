"""A streamed response as server-sent events. Takes outputs, returns bytes; writes nothing.

A stream is: created, in_progress, output_item.added, content_part.added; a delta for each piece of text; then the same from the
inside out: output_text.done, content_part.done, output_item.done, and the whole response as completed, incomplete or failed.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.outputs import CompletionOutput, RequestOutput
from gateway.server.failure import Failure
from gateway.server.responses.documents import (
    FAILED,
    IN_PROGRESS,
    ResponseHead,
    ResponseState,
    logprobs_of,
    message,
)

DELTA = "response.output_text.delta"
_EMPTY_PART: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
_to_json = msgspec.json.Encoder().encode


class ResponseEncoder:
    """The events of one stream."""

    is_slow = False  # no output has more to show than its own tokens

    def __init__(self, head: ResponseHead) -> None:
        self._state = ResponseState(head)
        self._item_id = head.item_id
        self._sequence_number = 0
        # Where the text is: the same in all events of the message's only part.
        self._place = {"item_id": head.item_id, "output_index": 0, "content_index": 0}
        # All of a usual delta but its text and its number is made here, as `sse` does it.
        start = {"type": DELTA, **self._place, "logprobs": []}
        self._before_delta = f"event: {DELTA}\ndata: ".encode() + _to_json(start)[:-1] + b',"delta":'

    @property
    def is_finished(self) -> bool:
        return self._state.status != IN_PROGRESS

    def open(self) -> bytes:
        response = self._state.response()
        return (
            self._event("response.created", {"response": response})
            + self._event("response.in_progress", {"response": response})
            + self._event("response.output_item.added", {"output_index": 0, "item": message(self._item_id, IN_PROGRESS, [])})
            + self._event("response.content_part.added", {**self._place, "part": _EMPTY_PART})
        )

    def encode(self, output: RequestOutput) -> bytes:
        """The events of one output; empty if it has nothing to show yet."""
        # Called for every output of every stream: the usual one must stay this short.
        self._state.add(output)
        return b"".join([self._delta(completion) for completion in output.outputs])

    def close(self) -> bytes:
        """The end of a stream that has finished."""
        state = self._state
        if not self.is_finished:
            raise RuntimeError(f"the response of {self._item_id} ended without a finish reason")
        return (
            self._event("response.output_text.done", {**self._place, "text": state.text(), "logprobs": state.logprobs()})
            + self._event("response.content_part.done", {**self._place, "part": state.part()})
            + self._event("response.output_item.done", {"output_index": 0, "item": state.item()})
            + self._event(f"response.{state.status}", {"response": state.response()})
        )

    def fail(self, failure: Failure) -> bytes:
        """The end of a stream that had begun: for clients that follow the response's state, then for those that want an error,
        which has the fields of this API and, as in all our streams, the object that an answer with its status would have."""
        self._state.fail(failure)
        error = failure.document()
        return self._event(f"response.{FAILED}", {"response": self._state.response()}) + self._event(
            "error", {"code": error["code"], "message": error["message"], "param": error["param"], "error": error}
        )

    def _delta(self, completion: CompletionOutput) -> bytes:
        if completion.logprobs:
            fields = {**self._place, "logprobs": logprobs_of(completion.logprobs), "delta": completion.text}
            return self._event(DELTA, fields)
        if not completion.text:
            return b""
        number = self._next_number()
        return self._before_delta + _to_json(completion.text) + b',"sequence_number":%d}\n\n' % number

    def _event(self, kind: str, fields: dict[str, Any]) -> bytes:
        document = {"type": kind, **fields, "sequence_number": self._next_number()}
        return f"event: {kind}\ndata: ".encode() + _to_json(document) + b"\n\n"

    def _next_number(self) -> int:
        number = self._sequence_number
        self._sequence_number += 1
        return number
