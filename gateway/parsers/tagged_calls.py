"""Calls as Qwen3-Coder writes them, in tags:

    <tool_call>
    <function=weather>
    <parameter=city>
    Bern
    </parameter>
    </function>
    </tool_call>

A call begins with its name, and the text of a parameter comes out as the model writes it; a value that is no text, once it is
whole. The outer tags may be missing, and a closing one where the next tag says as much.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum
from typing import Any

from gateway.parsers.markers import WHITE_SPACE, find_marker, split_at_marker
from gateway.parsers.tool_calls import CallDelta, CallsAndContent
from gateway.parsers.typed_values import parameter_types, value_to_json

START, END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
MAX_NAME_CHARS = 256
TEXT = frozenset({"string"})


class _At(Enum):
    CONTENT = "content"
    OPENED = "opened"  # behind START: where FUNCTION has to follow
    FUNCTION_NAME = "function name"
    PARAMETERS = "parameters"  # between them
    PARAMETER_NAME = "parameter name"
    VALUE = "value"
    CLOSED = "closed"  # behind a call: where END may follow


class TaggedCallParser:
    """Of one answer. `functions` has the schema of each one's arguments."""

    def __init__(self, functions: Mapping[str, dict[str, Any]]) -> None:
        self._functions = functions
        self._at = _At.CONTENT
        self._held = ""
        self._opening = ""  # since the marker, as long as no call came of it
        self._is_behind_call = False  # and has seen nothing but white space since
        self._num_calls = 0
        self._schema: dict[str, Any] = {}  # of the call that is open
        self._num_parameters = 0
        self._types = TEXT  # of the value that is open
        self._value: list[str] = []  # what there is of one that is no text
        self._is_value_new = True

    def push(self, text: str) -> CallsAndContent:
        self._held += text
        out = CallsAndContent()
        step = {
            _At.CONTENT: self._in_content, _At.OPENED: self._in_opened, _At.FUNCTION_NAME: self._in_function_name,
            _At.PARAMETERS: self._in_parameters, _At.PARAMETER_NAME: self._in_parameter_name, _At.VALUE: self._in_value,
            _At.CLOSED: self._in_closed,
        }  # fmt: skip
        while self._held and step[self._at](out):
            pass
        return out

    def finish(self) -> CallsAndContent:
        """No more text will come: what was held back in front of a call is content, and text of a value is the value's."""
        out, text = CallsAndContent(), self._held
        self._held = ""
        if self._at in (_At.CONTENT, _At.OPENED, _At.FUNCTION_NAME):
            out.add(self._opening + text)
            self._opening = ""
        elif self._at is _At.VALUE and text:
            self._add_to_value(out, text)
        return out

    # Each takes what it can from what is held, and says whether to go on.

    def _in_content(self, out: CallsAndContent) -> bool:
        if self._is_behind_call:
            self._held = self._held.lstrip(WHITE_SPACE)
            self._is_behind_call = not self._held
        before, marker, self._held = split_at_marker(self._held, START, FUNCTION)
        out.add(before)
        if not marker:
            return False
        self._at = _At.FUNCTION_NAME if marker.endswith(FUNCTION) else _At.OPENED
        self._opening, self._is_behind_call = marker, False
        return True

    def _in_opened(self, out: CallsAndContent) -> bool:
        text = self._held.lstrip(WHITE_SPACE)
        if not text.startswith(FUNCTION):
            return not FUNCTION.startswith(text) and self._give_up(out)
        at = len(self._held) - len(text) + len(FUNCTION)
        self._opening += self._held[:at]
        self._at, self._held = _At.FUNCTION_NAME, self._held[at:]
        return True

    def _in_function_name(self, out: CallsAndContent) -> bool:
        name, is_whole = self._name()
        if name is None:
            return self._give_up(out)
        if not is_whole:
            return False
        out.add(CallDelta(self._num_calls, name))
        self._num_calls += 1
        self._schema, self._num_parameters = self._functions.get(name, {}), 0
        self._at, self._opening = _At.PARAMETERS, ""
        return True

    def _in_parameters(self, out: CallsAndContent) -> bool:
        # What stands there beside tags belongs to nothing.
        _, marker, self._held = find_marker(self._held, PARAMETER, FUNCTION_END, END)
        if marker == PARAMETER:
            self._at = _At.PARAMETER_NAME
        elif marker:
            self._add_to_arguments(out, "}" if self._num_parameters else "{}")
            self._at = _At.CLOSED
            self._held = self._held if marker == FUNCTION_END else marker + self._held
        return bool(marker)

    def _in_parameter_name(self, out: CallsAndContent) -> bool:
        name, is_whole = self._name()
        if name is None:
            self._at = _At.PARAMETERS
            return True
        if not is_whole:
            return False
        self._types = parameter_types(self._schema, name)
        between, quote = ", " if self._num_parameters else "{", '"' if self._types == TEXT else ""
        self._add_to_arguments(out, f"{between}{_quoted(name)}: {quote}")
        self._num_parameters += 1
        self._at, self._value, self._is_value_new = _At.VALUE, [], True
        return True

    def _in_value(self, out: CallsAndContent) -> bool:
        text, marker, rest = find_marker(self._held, PARAMETER_END, PARAMETER, FUNCTION_END)
        if self._is_value_new and text:
            text, self._is_value_new = text.removeprefix("\n"), False
        # The line break in front of the tag is the tag's.
        shown = text.removesuffix("\n")
        self._add_to_value(out, shown)
        if not marker:
            self._held = text[len(shown) :] + rest
            return False
        self._add_to_arguments(out, '"' if self._types == TEXT else value_to_json("".join(self._value), self._types))
        self._at, self._held = _At.PARAMETERS, rest if marker == PARAMETER_END else marker + rest
        return True

    def _in_closed(self, out: CallsAndContent) -> bool:
        text = self._held.lstrip(WHITE_SPACE)
        if text != END and END.startswith(text):
            return False
        self._at, self._is_behind_call, self._held = _At.CONTENT, True, text.removeprefix(END)
        return True

    def _name(self) -> tuple[str | None, bool]:
        """What is there of it, and whether that is all; None where it is no name."""
        name, end, rest = self._held.partition(">")
        if len(name) > MAX_NAME_CHARS or any(char in name for char in "<\n") or (end and not name.strip()):
            return None, False
        if end:
            self._held = rest
        return name.strip(), bool(end)

    def _add_to_value(self, out: CallsAndContent, text: str) -> None:
        if self._types == TEXT:
            self._add_to_arguments(out, _quoted(text)[1:-1])
        elif text:
            self._value.append(text)

    def _add_to_arguments(self, out: CallsAndContent, text: str) -> None:
        if text:
            out.add(CallDelta(self._num_calls - 1, None, text))

    def _give_up(self, out: CallsAndContent) -> bool:
        """It is no call so far: content, as it was written."""
        out.add(self._opening)
        self._at, self._opening = _At.CONTENT, ""
        return True


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
