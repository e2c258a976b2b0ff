"""Which part of a text is reasoning: `<think>` … `</think>` at its beginning."""

from __future__ import annotations

from enum import Enum

from cores.sampling_params import Reasoning
from gateway.parsers.markers import WHITE_SPACE, split_at_marker

START, END = "<think>", "</think>"
# By name: whether an answer that does not begin with `<think>` is reasoning. DeepSeek R1 often leaves it out.
REASONING_PARSERS = {"deepseek_r1": True, "qwen3": False}

Split = tuple[str, str]  # reasoning, content


class _At(Enum):
    BEGINNING = "beginning"
    REASONING = "reasoning"
    CONTENT = "content"


class ReasoningParser:
    """Of one answer."""

    def __init__(self, expected: Reasoning) -> None:
        self._at = _At.BEGINNING
        self._unmarked = _At.REASONING if expected.is_open else _At.CONTENT
        self._held = ""
        self._is_behind_marker = False  # and has seen nothing but white space since

    def push(self, text: str) -> Split:
        text, self._held = self._held + text, ""
        if self._at is _At.BEGINNING:
            stripped = text.lstrip(WHITE_SPACE)
            if START.startswith(stripped) and stripped != START:
                self._held = text
                return "", ""
            if stripped.startswith(START):
                self._at, self._is_behind_marker, text = _At.REASONING, True, stripped[len(START) :]
            else:
                self._at = self._unmarked
        if self._at is _At.CONTENT:
            return "", self._behind_marker(text)
        reasoning, marker, rest = split_at_marker(self._behind_marker(text), END)
        if not marker:
            self._held = rest
            return reasoning, ""
        self._at, self._is_behind_marker = _At.CONTENT, True
        return reasoning, self._behind_marker(rest)

    def finish(self) -> Split:
        """What was held back is no marker: no more text will come."""
        text, self._held = self._held, ""
        at = self._unmarked if self._at is _At.BEGINNING else self._at
        return (text, "") if at is _At.REASONING else ("", text)

    def _behind_marker(self, text: str) -> str:
        if self._is_behind_marker:
            text = text.lstrip(WHITE_SPACE)
            self._is_behind_marker = not text
        return text


def expected_reasoning(name: str, prompt: str, *, continues_message: bool = False) -> Reasoning | None:
    """How the answer to this prompt may begin, for a parser of this name; None where the reasoning is over already.

    Templates may open the reasoning in the prompt, or close it there at once where a request wants none. A message that is
    continued may be in the middle of it.
    """
    if continues_message:
        is_open, is_closed = prompt.rfind(START) > prompt.rfind(END), True
    else:
        prompt = prompt.rstrip(WHITE_SPACE)
        is_open, is_closed = prompt.endswith(START), prompt.endswith(END)
    if is_closed and not is_open:
        return None
    return Reasoning(START, END, is_open or REASONING_PARSERS[name])
