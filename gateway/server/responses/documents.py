"""The JSON of the Responses API: the response, its message, its usage. Pure; knows neither events nor connections."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from cores.sampling_params import SamplingParams
from gateway.outputs import PositionLogprobs, RequestOutput
from gateway.server.answers import chat_logprobs
from gateway.server.failure import Failure
from gateway.server.responses.schema import ResponsesRequest
from gateway.server.usage import UsageCounter

IN_PROGRESS, COMPLETED, INCOMPLETE, FAILED = "in_progress", "completed", "incomplete", "failed"
# By finish reason. An abort comes from an operator: there is nothing that the client could have asked for otherwise.
_STATUS = {"stop": COMPLETED, "length": INCOMPLETE, "abort": FAILED}


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """What all documents of one response share."""

    request_id: str
    model: str
    created_at: int  # Unix time
    num_prompt_tokens: int
    request: ResponsesRequest
    params: SamplingParams
    clock: Callable[[], float] = field(default=time.time)

    @property
    def item_id(self) -> str:
        return f"msg_{self.request_id}"


class ResponseState:
    """What has been said so far, and what that makes the response."""

    def __init__(self, head: ResponseHead) -> None:
        self._head = head
        self._texts: list[str] = []
        self._positions: list[PositionLogprobs] = []
        self._usage = UsageCounter(head.num_prompt_tokens, 1)
        self.status = IN_PROGRESS
        self._error: dict[str, str] | None = None

    def add(self, output: RequestOutput) -> None:
        self._usage.add(output)
        for completion in output.outputs:
            self._texts.append(completion.text)
            self._positions += completion.logprobs or ()
            if completion.finish_reason is not None:
                self.status = _STATUS[completion.finish_reason]
        if self.status == FAILED:
            self._error = _error("the request was aborted")

    def fail(self, failure: Failure) -> None:
        self.status = FAILED
        self._error = _error(failure.message)

    def text(self) -> str:
        # One string again, so that a long stream is joined once.
        self._texts = ["".join(self._texts)]
        return self._texts[0]

    def logprobs(self) -> list[dict[str, Any]]:
        return logprobs_of(self._positions)

    def part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self.text(), "annotations": [], "logprobs": self.logprobs()}

    def item(self) -> dict[str, Any]:
        """The message, as it is when nothing more will be added."""
        status = COMPLETED if self.status == COMPLETED else INCOMPLETE
        return message(self._head.item_id, status, [self.part()])

    def response(self) -> dict[str, Any]:
        is_over = self.status != IN_PROGRESS
        return {
            **_fixed(self._head),
            "status": self.status,
            "completed_at": int(self._head.clock()) if self.status == COMPLETED else None,
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if self.status == INCOMPLETE else None,
            "output": [self.item()] if is_over else [],
            "usage": _usage(self._usage.to_document()) if is_over else None,
        }


def whole_response(head: ResponseHead, outputs: Sequence[RequestOutput]) -> bytes:
    """The answer to a request that was not streamed."""
    state = ResponseState(head)
    for output in outputs:
        state.add(output)
    return msgspec.json.encode(state.response())


def message(item_id: str, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "message", "id": item_id, "status": status, "role": "assistant", "content": content}


def logprobs_of(positions: Sequence[PositionLogprobs]) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = chat_logprobs(positions, 0)["content"]
    return entries


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
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "store": False,  # whatever was asked for: nothing is kept
        "temperature": params.temperature,
        "text": {"format": {"type": "text"} if wanted is None else wanted, "verbosity": "medium"},
        "tool_choice": request.tool_choice or "auto",
        "tools": [],
        "top_logprobs": params.logprobs or 0,
        "top_p": params.top_p,
        "truncation": "disabled",
        "user": request.user,
    }


def _error(message: str) -> dict[str, str]:
    return {"code": "server_error", "message": message}


def _usage(counts: dict[str, Any]) -> dict[str, Any]:
    """The same numbers under this API's names."""
    document = {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {**counts["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts["total_tokens"],
    }
    if "num_moves" in counts:
        document["num_moves"] = counts["num_moves"]
    return document
