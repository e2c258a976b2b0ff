"""One answer's text to reasoning, content and tool calls: one stage behind the other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from gateway.parsers.reasoning import END, START, ReasoningParser
from gateway.parsers.tool_calls import TOOL_CALL_PARSERS, CallDelta, CallsAndContent


class CallStage(Protocol):
    def push(self, text: str) -> CallsAndContent: ...
    def finish(self) -> CallsAndContent: ...


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    reasoning: str = ""
    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)

    def __add__(self, other: ChoiceDelta) -> ChoiceDelta:
        """Pieces of one call become one piece."""
        calls: list[CallDelta] = []
        for call in (*self.calls, *other.calls):
            if calls and calls[-1].index == call.index:
                calls[-1] = CallDelta(call.index, calls[-1].name, calls[-1].arguments + call.arguments)
            else:
                calls.append(call)
        return ChoiceDelta(self.reasoning + other.reasoning, self.content + other.content, calls)


class ChoiceParser:
    """Of one of a request's answers. Each needs its own."""

    def __init__(self, reasoning: ReasoningParser | None, calls: CallStage | None, *, max_calls: int | None = None) -> None:
        self._reasoning = reasoning
        self._calls = calls
        self._max_calls = max_calls
        self.has_calls = False

    def push(self, text: str) -> ChoiceDelta:
        reasoning, content = ("", text) if self._reasoning is None else self._reasoning.push(text)
        return self._delta(reasoning, CallsAndContent(content) if self._calls is None else self._calls.push(content))

    def finish(self) -> ChoiceDelta:
        """All that is held back: no more text will come."""
        reasoning, content = ("", "") if self._reasoning is None else self._reasoning.finish()
        if self._calls is None:
            return self._delta(reasoning, CallsAndContent(content))
        return self._delta(reasoning, self._calls.push(content)) + self._delta("", self._calls.finish())

    def _delta(self, reasoning: str, found: CallsAndContent) -> ChoiceDelta:
        calls = [call for call in found.calls if self._max_calls is None or call.index < self._max_calls]
        self.has_calls = self.has_calls or bool(calls)
        return ChoiceDelta(reasoning, found.content, calls)


def parse_whole(parser: ChoiceParser, text: str) -> ChoiceDelta:
    return ChoiceDelta() + parser.push(text) + parser.finish()


def marker_tokens(tool_call_parser: str | None, reasoning_parser: str | None) -> tuple[str, ...]:
    """What a tokenizer must not leave out, even where it calls it special."""
    markers = [START, END] if reasoning_parser else []
    if tool_call_parser:
        form = TOOL_CALL_PARSERS[tool_call_parser]
        markers += [form.start, form.end]
    return tuple(markers)
