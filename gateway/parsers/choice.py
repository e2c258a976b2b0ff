"""One answer's text to reasoning, content and tool calls: one stage behind the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from gateway.parsers import tagged_calls
from gateway.parsers.reasoning import END, START, ReasoningParser
from gateway.parsers.tagged_calls import TaggedCallParser
from gateway.parsers.tool_calls import FORMATS, CallDelta, CallsAndContent, ToolCallParser

TOOL_CALL_PARSERS = (*FORMATS, "qwen3_coder")


class CallStage(Protocol):
    def push(self, text: str) -> CallsAndContent: ...
    def finish(self) -> CallsAndContent: ...


@dataclass(slots=True)
class ChoiceDelta(CallsAndContent):
    reasoning: str = ""  # in front of all else

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.parts)

    def __add__(self, other: ChoiceDelta) -> ChoiceDelta:
        """Pieces of one text, or of one call, become one piece."""
        parts: list[str | CallDelta] = []
        for part in (*self.parts, *other.parts):
            last = parts[-1] if parts else None
            if isinstance(part, str) and isinstance(last, str):
                parts[-1] = last + part
            elif isinstance(part, CallDelta) and isinstance(last, CallDelta) and last.index == part.index:
                parts[-1] = CallDelta(last.index, last.name, last.arguments + part.arguments)
            else:
                parts.append(part)
        return ChoiceDelta(parts, self.reasoning + other.reasoning)


class ChoiceParser:
    """Of one of a request's answers. Each needs its own."""

    def __init__(self, reasoning: ReasoningParser | None, calls: CallStage | None, *, max_calls: int | None = None) -> None:
        self._reasoning = reasoning
        self._calls = calls
        self._max_calls = max_calls
        self.has_calls = False

    def push(self, text: str) -> ChoiceDelta:
        reasoning, content = ("", text) if self._reasoning is None else self._reasoning.push(text)
        return self._delta(reasoning, self._found(content))

    def finish(self) -> ChoiceDelta:
        """All that is held back: no more text will come."""
        reasoning, content = ("", "") if self._reasoning is None else self._reasoning.finish()
        said = self._delta(reasoning, self._found(content))
        return said if self._calls is None else said + self._delta("", self._calls.finish())

    def _found(self, content: str) -> CallsAndContent:
        if self._calls is not None:
            return self._calls.push(content)
        return CallsAndContent([content] if content else [])

    def _delta(self, reasoning: str, found: CallsAndContent) -> ChoiceDelta:
        said = ChoiceDelta(reasoning=reasoning)
        for part in found.parts:
            if isinstance(part, str):
                said.add(part)
            elif self._max_calls is None or part.index < self._max_calls:
                said.add(part)
                self.has_calls = True
        return said


def parse_whole(parser: ChoiceParser, text: str) -> ChoiceDelta:
    return ChoiceDelta() + parser.push(text) + parser.finish()


def call_stage(parser: str, functions: Mapping[str, dict[str, Any]]) -> CallStage:
    """`functions` has the schema of each one's arguments."""
    return ToolCallParser(FORMATS[parser]) if parser in FORMATS else TaggedCallParser(functions)


def marker_tokens(tool_call_parser: str | None, reasoning_parser: str | None) -> tuple[str, ...]:
    """What a tokenizer must not leave out, even where it calls it special."""
    markers = [START, END] if reasoning_parser else []
    if tool_call_parser in FORMATS:
        form = FORMATS[tool_call_parser]
        markers += [form.start, form.end, *("[ARGS]", "[CALL_ID]") * form.takes_names]
    elif tool_call_parser:
        markers += [tagged_calls.START, tagged_calls.END]
    return tuple(markers)
