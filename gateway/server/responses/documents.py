"""What a response has said so far, and its JSON. Pure; knows neither events nor connections."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import msgspec

from cores.sampling_params import SamplingParams
from gateway.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from gateway.parsers.choice import ChoiceDelta
from gateway.server.chat_message import AnswerForm
from gateway.server.failure import Failure
from gateway.server.responses.items import (
    COMPLETED,
    FAILED,
    IN_PROGRESS,
    INCOMPLETE,
    CallItem,
    MessageItem,
    OutputItem,
    ReasoningItem,
)
from gateway.server.responses.schema import ResponsesRequest
from gateway.server.usage import ReasoningCounter, UsageCounter

# By finish reason. An abort comes from an operator: there is nothing that the client could have asked for otherwise.
_STATUS = {"stop": COMPLETED, "length": INCOMPLETE, "abort": FAILED}

T = TypeVar("T", MessageItem, ReasoningItem)


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """What all documents of one response share."""

    request_id: str
    model: str
    created_at: int  # Unix time
    num_prompt_tokens: int
    request: ResponsesRequest
    params: SamplingParams
    form: AnswerForm | None = None  # of text that is more than a message
    reasoning_end_id: int | None = None  # the token that ends reasoning, where it is one
    clock: Callable[[], float] = field(default=time.time)


class Piece(NamedTuple):
    """What an output adds to one item; nothing, where it is only begun."""

    item: OutputItem
    text: str
    logprobs: Sequence[PositionLogprobs] = ()


class ResponseState:
    """What has been said so far, and what that makes the response."""

    def __init__(self, head: ResponseHead) -> None:
        self._head = head
        self._form = head.form
        self._parser = None if head.form is None else head.form.new_parser()
        self._items: list[OutputItem] = []
        self._usage = UsageCounter(head.num_prompt_tokens, 1)
        self._reasoning = ReasoningCounter(head.reasoning_end_id)
        self.status = IN_PROGRESS
        self._error: dict[str, str] | None = None

    def add(self, output: RequestOutput) -> list[Piece]:
        self._usage.add(output)
        pieces: list[Piece] = []
        for completion in output.outputs:
            pieces += self._said(completion)
            if completion.finish_reason is not None:
                self.status = _STATUS[completion.finish_reason]
                if not self._items:
                    pieces.append(Piece(self._begin(MessageItem), ""))  # an answer without a word
        if self.status == FAILED:
            self._error = _error("the request was aborted")
        return pieces

    def fail(self, failure: Failure) -> None:
        self.status = FAILED
        self._error = _error(failure.message)

    def status_of(self, item: OutputItem) -> str:
        """Of one that nothing more will be added to: only the last one can have been cut off."""
        return COMPLETED if self.status == COMPLETED or item is not self._items[-1] else INCOMPLETE

    def response(self) -> dict[str, Any]:
        is_over = self.status != IN_PROGRESS
        return {
            **_fixed(self._head),
            "status": self.status,
            "completed_at": int(self._head.clock()) if self.status == COMPLETED else None,
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if self.status == INCOMPLETE else None,
            "output": [item.document(self.status_of(item)) for item in self._items] if is_over else [],
            "usage": self._usage_document() if is_over else None,
        }

    def _said(self, completion: CompletionOutput) -> Iterable[Piece]:
        text, positions = completion.text, completion.logprobs or ()
        if self._parser is not None:
            self._reasoning.add(completion.token_ids)
            said = self._parser.push(text)
            return self._items_of(said if completion.finish_reason is None else said + self._parser.finish())
        if not text and not positions:
            return ()
        item = self._last(MessageItem) or self._begin(MessageItem)
        item.add(text)
        item.positions += positions
        return (Piece(item, text, positions),)

    def _items_of(self, said: ChoiceDelta) -> Iterator[Piece]:
        if said.reasoning:
            yield _grown(self._last(ReasoningItem) or self._begin(ReasoningItem), said.reasoning)
        for part in said.parts:
            if isinstance(part, str):
                yield _grown(self._last(MessageItem) or self._begin(MessageItem), part)
            elif part.name is None:
                yield _grown(self._items[-1], part.arguments)
            else:
                assert self._form is not None
                call = CallItem(self._head.request_id, len(self._items), part.name, self._form.new_call_id())
                self._items.append(call)
                yield _grown(call, part.arguments)

    def _last(self, kind: type[T]) -> T | None:
        """The last item, if it is one of these."""
        return item if self._items and isinstance(item := self._items[-1], kind) else None

    def _begin(self, kind: type[T]) -> T:
        item = kind(self._head.request_id, len(self._items))
        self._items.append(item)
        return item

    def _usage_document(self) -> dict[str, Any]:
        has_reasoned = any(isinstance(item, ReasoningItem) for item in self._items)
        return _usage(self._usage.to_document(), self._reasoning.num_tokens if has_reasoned else 0)


def _grown(item: OutputItem, text: str) -> Piece:
    item.add(text)
    return Piece(item, text)


def whole_response(head: ResponseHead, outputs: Sequence[RequestOutput]) -> bytes:
    """The answer to a request that was not streamed."""
    state = ResponseState(head)
    for output in outputs:
        state.add(output)
    return msgspec.json.encode(state.response())


def _fixed(head: ResponseHead) -> dict[str, Any]:
    """The fields that say what was asked for, defaults included."""
    request, params = head.request, head.params
    wanted = request.text.format if request.text else None
    return {
        "id": f"resp_{head.request_id}",
        "object": "response",
        "created_at": head.created_at,
        "model": head.model,
        "background": False,
        "conversation": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {"effort": request.reasoning.effort if request.reasoning else None, "summary": None},
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "store": False,  # whatever was asked for: nothing is kept
        "temperature": params.temperature,
        "text": {"format": {"type": "text"} if wanted is None else wanted, "verbosity": "medium"},
        "tool_choice": request.tool_choice or "auto",
        "tools": request.tools or [],
        "top_logprobs": params.logprobs or 0,
        "top_p": params.top_p,
        "truncation": "disabled",
        "user": request.user,
    }


def _error(message: str) -> dict[str, str]:
    return {"code": "server_error", "message": message}


def _usage(counts: dict[str, Any], num_reasoning_tokens: int) -> dict[str, Any]:
    """The same numbers under this API's names."""
    document = {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {**counts["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
        "total_tokens": counts["total_tokens"],
    }
    if "num_moves" in counts:
        document["num_moves"] = counts["num_moves"]
    return document
