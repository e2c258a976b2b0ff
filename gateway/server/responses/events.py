"""A streamed response as server-sent events. Takes outputs, returns bytes; writes nothing.

A stream is: created, in_progress; for each item of the output one after the other output_item.added, content_part.added where
it has parts, a delta for each piece of text, and the same from the inside out (output_text.done, content_part.done,
output_item.done); then the whole response as completed, incomplete or failed.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.outputs import RequestOutput
from gateway.server.failure import Failure
from gateway.server.responses.documents import Piece, ResponseHead, ResponseState
from gateway.server.responses.items import FAILED, IN_PROGRESS, Event, MessageItem, OutputItem, logprobs_of

_to_json = msgspec.json.Encoder().encode


class ResponseEncoder:
    """The events of one stream."""

    is_slow = False  # no output has more to show than its own tokens

    def __init__(self, head: ResponseHead) -> None:
        self._state = ResponseState(head)
        self._request_id = head.request_id
        self._sequence_number = 0
        self._open: OutputItem | None = None
        self._before_delta = b""

    @property
    def is_finished(self) -> bool:
        return self._state.status != IN_PROGRESS

    def open(self) -> bytes:
        response = {"response": self._state.response()}
        return self._events([("response.created", response), ("response.in_progress", response)])

    def encode(self, output: RequestOutput) -> bytes:
        """The events of one output; empty if it has nothing to show yet."""
        # Called for every output of every stream: the usual one must stay this short.
        return b"".join([self._piece(piece) for piece in self._state.add(output)])

    def close(self) -> bytes:
        """The end of a stream that has finished."""
        if not self.is_finished:
            raise RuntimeError(f"the response to {self._request_id} ended without a finish reason")
        return self._close_item() + self._event(f"response.{self._state.status}", {"response": self._state.response()})

    def fail(self, failure: Failure) -> bytes:
        """The end of a stream that had begun: for clients that follow the response's state, then for those that want an error,
        which has the fields of this API and, as in all our streams, the object that an answer with its status would have."""
        self._state.fail(failure)
        error = failure.document()
        return self._event(f"response.{FAILED}", {"response": self._state.response()}) + self._event(
            "error", {"code": error["code"], "message": error["message"], "param": error["param"], "error": error}
        )

    def _piece(self, piece: Piece) -> bytes:
        begun = b"" if piece.item is self._open else self._close_item() + self._open_item(piece.item)
        if piece.logprobs:
            fields = {**piece.item.place, "logprobs": logprobs_of(piece.logprobs), "delta": piece.text}
            return begun + self._event(piece.item.DELTA, fields)
        if not piece.text:
            return begun
        return begun + self._before_delta + _to_json(piece.text) + b',"sequence_number":%d}\n\n' % self._next_number()

    def _open_item(self, item: OutputItem) -> bytes:
        self._open = item
        # All of a usual delta but its text and its number is made here, as `sse` does it.
        start = {"type": item.DELTA, **item.place} | ({"logprobs": []} if isinstance(item, MessageItem) else {})
        self._before_delta = f"event: {item.DELTA}\ndata: ".encode() + _to_json(start)[:-1] + b',"delta":'
        return self._events(item.opening())

    def _close_item(self) -> bytes:
        item, self._open = self._open, None
        return b"" if item is None else self._events(item.closing(self._state.status_of(item)))

    def _events(self, events: list[Event]) -> bytes:
        return b"".join([self._event(kind, fields) for kind, fields in events])

    def _event(self, kind: str, fields: dict[str, Any]) -> bytes:
        document = {"type": kind, **fields, "sequence_number": self._next_number()}
        return f"event: {kind}\ndata: ".encode() + _to_json(document) + b"\n\n"

    def _next_number(self) -> int:
        number = self._sequence_number
        self._sequence_number += 1
        return number
