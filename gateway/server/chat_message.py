"""What a chat answer says beside content: `tool_calls` and reasoning, whole or in deltas, as OpenAI and vLLM write them."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gateway.parsers.choice import ChoiceDelta, ChoiceParser, parse_whole
from gateway.parsers.tool_calls import CallDelta


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """How one request's answers are taken apart."""

    new_parser: Callable[[], ChoiceParser]
    calls_finish: bool = True  # with "tool_calls"; OpenAI says "stop" where the function was named
    new_call_id: Callable[[], str] = lambda: f"call_{secrets.token_hex(12)}"

    def whole_message(self, prefix: str, text: str, finish_reason: str | None) -> tuple[dict[str, Any], str | None]:
        """(fields of the message beside its role, finish reason)"""
        parser = self.new_parser()
        said = parse_whole(parser, text)
        content = prefix + said.content
        message: dict[str, Any] = {"content": content if content or not said else None}
        if said.reasoning:
            message |= _reasoning(said)
        if said.calls:
            message["tool_calls"] = [_function_call(call, self.new_call_id()) for call in said.calls]
        return message, self.finish_reason(parser, finish_reason)

    def streamed_message(self) -> StreamedMessage:
        return StreamedMessage(self, self.new_parser())

    def finish_reason(self, parser: ChoiceParser, engine_s: str | None) -> str | None:
        """A call that was cut off is none: "length" stays."""
        return "tool_calls" if engine_s == "stop" and parser.has_calls and self.calls_finish else engine_s


class StreamedMessage:
    """One choice of a stream."""

    def __init__(self, form: AnswerForm, parser: ChoiceParser) -> None:
        self._form = form
        self._parser = parser

    def push(self, text: str, *, is_last: bool) -> dict[str, Any]:
        """The delta of the next piece; empty if there is nothing to show yet."""
        said = self._parser.push(text)
        if is_last:
            said += self._parser.finish()
        delta: dict[str, Any] = {}
        if said.reasoning:
            delta |= _reasoning(said)
        if said.content:
            delta["content"] = said.content
        if said.calls:
            delta["tool_calls"] = [self._call_delta(call) for call in said.calls]
        return delta

    def finish_reason(self, engine_s: str | None) -> str | None:
        return self._form.finish_reason(self._parser, engine_s)

    def _call_delta(self, call: CallDelta) -> dict[str, Any]:
        if call.name is None:
            return {"index": call.index, "function": {"arguments": call.arguments}}
        return {"index": call.index, **_function_call(call, self._form.new_call_id())}


def _reasoning(said: ChoiceDelta) -> dict[str, str]:
    # vLLM's name today, and the one it had, which many clients still read.
    return {"reasoning": said.reasoning, "reasoning_content": said.reasoning}


def _function_call(call: CallDelta, call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
