"""Which parts of a text are tool calls, where calls are JSON.

A call is a JSON object with a name and arguments. As soon as its beginning says both, the call begins, and its arguments come
out as the model writes them; what is wrong with them from there on is the client's to see. An object that is written in another
order comes out once it is complete, or as content if it is no call. Mistral's newer models write the name in front of the
arguments instead.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from enum import Enum

from cores.sampling_params import is_text
from gateway.parsers.json_scanner import Found, JsonScanner
from gateway.parsers.markers import WHITE_SPACE, split_at_marker

# Bounded, so that trying it with every piece of a text that never matches costs no more than the text.
_HEAD = re.compile(
    r'\{\s{0,64}"name"\s{0,64}:\s{0,64}"([^"\\]{1,256})"\s{0,64},\s{0,64}"(?:arguments|parameters)"\s{0,64}:\s{0,64}(?=\{)'
)
ARGUMENTS = ("arguments", "parameters")
# What stands between a marker and the arguments, where that is the name alone. Models may add an id, which nobody needs.
_NAMED = re.compile(r"\s*([\w.-]{1,256})\s*(?:\[CALL_ID\]\s*\w{1,64}\s*)?(?:\[ARGS\]\s*)?", re.ASCII)
_MAYBE_NAMED = re.compile(r"[\s\w.\[\]-]{1,512}", re.ASCII)


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """How a family of models writes calls: START call between call … END."""

    start: str = ""  # the marker in front of calls
    end: str = ""  # behind them
    between: str = ""  # characters in front of a call, beside white space
    is_bare: bool = False  # an answer may be a call from its beginning, without the marker
    takes_names: bool = False  # behind `start` may stand a name, and arguments alone: one call for each `start`


FORMATS = {
    "hermes": ToolCallFormat("<tool_call>", "</tool_call>"),
    "llama3_json": ToolCallFormat("<|python_tag|>", between=";", is_bare=True),
    "mistral": ToolCallFormat("[TOOL_CALLS]", "]", between="[,", takes_names=True),
}
# What a grammar holds an answer to where a call is required: no model needs to know it.
REQUIRED = ToolCallFormat("", "]", between="[,", is_bare=True)


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of a call. Its first one has the name."""

    index: int
    name: str | None
    arguments: str = ""


@dataclass(slots=True)
class CallsAndContent:
    """In the order in which they were said."""

    parts: list[str | CallDelta] = field(default_factory=list)

    @property
    def content(self) -> str:
        return "".join([part for part in self.parts if isinstance(part, str)])

    @property
    def calls(self) -> list[CallDelta]:
        return [part for part in self.parts if isinstance(part, CallDelta)]

    def add(self, part: str | CallDelta) -> None:
        if part:
            self.parts.append(part)


class _At(Enum):
    CONTENT = "content"
    NAME = "name"  # of a call that is a name and arguments
    CALLS = "calls"  # behind a marker or a call: where the next call may be
    OBJECT = "object"  # in a call whose name is not known yet
    ARGUMENTS = "arguments"
    REST = "rest"  # behind the arguments, in the same object


class ToolCallParser:
    """Of one answer."""

    def __init__(self, form: ToolCallFormat) -> None:
        self._form = form
        self._at = _At.CALLS if form.is_bare else _At.CONTENT
        self._held = ""
        self._opening: str | None = "" if form.is_bare else None  # since the marker, as long as no call came of it
        self._is_behind_call = False  # and has seen nothing but white space since
        self._num_calls = 0
        self._is_named = False  # the call that is open: it ends with its arguments
        self._scanner = JsonScanner()
        self._num_scanned = 0

    def push(self, text: str) -> CallsAndContent:
        self._held += text
        out = CallsAndContent()
        step = {
            _At.CONTENT: self._in_content, _At.CALLS: self._in_calls, _At.NAME: self._in_name, _At.OBJECT: self._in_object,
            _At.ARGUMENTS: self._in_arguments, _At.REST: self._in_rest,
        }  # fmt: skip
        while self._held and step[self._at](out):
            pass
        return out

    def finish(self) -> CallsAndContent:
        """No more text will come: what was held back for what might follow is content, unless it only closes calls."""
        text, self._held = (self._opening or "") + self._held, ""
        closes_calls = self._at is _At.CALLS and self._opening is None
        return CallsAndContent([] if closes_calls or not text else [text])

    # Each takes what it can from what is held, and says whether to go on.

    def _in_content(self, out: CallsAndContent) -> bool:
        if self._is_behind_call:
            self._held = self._held.lstrip(WHITE_SPACE)
            self._is_behind_call = not self._held
        if not self._form.start:
            out.add(self._held)
            self._held = ""
            return False
        before, marker, self._held = split_at_marker(self._held, self._form.start)
        out.add(before)
        if not marker:
            return False
        self._at, self._opening, self._is_behind_call = _At.CALLS, marker, False
        return True

    def _in_calls(self, out: CallsAndContent) -> bool:
        text, end = self._held.lstrip(WHITE_SPACE + self._form.between), self._form.end
        if not text or (end != text and end.startswith(text)):
            return False
        if self._form.takes_names and self._opening is not None and self._held.lstrip(WHITE_SPACE)[0] not in "[{":
            self._at = _At.NAME
        elif text.startswith("{"):
            if self._opening is not None:
                self._opening += self._held[: len(self._held) - len(text)]
            self._at, self._held, self._scanner, self._num_scanned = _At.OBJECT, text, JsonScanner(), 0
        elif self._opening is not None:
            self._give_up(out, 0)
        else:
            self._at, self._is_behind_call, self._held = _At.CONTENT, True, text.removeprefix(end)
        return True

    def _in_name(self, out: CallsAndContent) -> bool:
        head, brace, _ = self._held.partition("{")
        if not brace and _MAYBE_NAMED.fullmatch(head):
            return False
        named = _NAMED.fullmatch(head)
        if not brace or named is None:
            self._give_up(out, 0)
            return True
        self._begin_call(out, named[1])
        self._at, self._held, self._scanner, self._is_named = _At.ARGUMENTS, self._held[len(head) :], JsonScanner(), True
        return True

    def _in_object(self, out: CallsAndContent) -> bool:
        if head := _HEAD.match(self._held):
            self._begin_call(out, head[1])
            self._at, self._held, self._scanner, self._is_named = _At.ARGUMENTS, self._held[head.end() :], JsonScanner(1), False
            return True
        found, at = self._scanner.scan(self._held, self._num_scanned, 0)
        self._num_scanned = at
        if found is Found.NOTHING:
            return False
        call = _to_call(self._held[:at]) if found is Found.END else None
        if call is None:
            self._give_up(out, at)
            return True
        self._begin_call(out, *call)
        self._at, self._held = _At.CALLS, self._held[at:]
        return True

    def _in_arguments(self, out: CallsAndContent) -> bool:
        found, at = self._scanner.scan(self._held, 0, 0 if self._is_named else 1)
        if at:
            out.add(CallDelta(self._num_calls - 1, None, self._held[:at]))
        self._held = self._held[at:]
        if found is Found.NOTHING:
            return False
        if self._is_named:
            self._at, self._is_behind_call = _At.CONTENT, True
        else:
            self._at = _At.REST if found is Found.END else _At.CALLS
        return True

    def _in_rest(self, out: CallsAndContent) -> bool:
        found, at = self._scanner.scan(self._held, 0, 0)
        self._held = self._held[at:]
        if found is not Found.NOTHING:
            self._at = _At.CALLS
        return found is not Found.NOTHING

    def _begin_call(self, out: CallsAndContent, name: str, arguments: str = "") -> None:
        out.add(CallDelta(self._num_calls, name, arguments))
        self._num_calls += 1
        self._opening = None

    def _give_up(self, out: CallsAndContent, at: int) -> None:
        """It is no call up to there: content, as it was written."""
        out.add((self._opening or "") + self._held[:at])
        self._at, self._held, self._opening, self._is_behind_call = _At.CONTENT, self._held[at:], None, False


def _to_call(text: str) -> tuple[str, str] | None:
    """(name, arguments as JSON) of a whole object; None if it is no call."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    arguments = next((call[key] for key in ARGUMENTS if key in call), None)
    if not (isinstance(call.get("name"), str) and call["name"] and isinstance(arguments, dict)):
        return None
    found = call["name"], json.dumps(arguments, ensure_ascii=False)
    return found if all(map(is_text, found)) else None


class NamedCallParser:
    """An answer that a grammar holds to the arguments of one function."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def push(self, text: str) -> CallsAndContent:
        if not text:
            return CallsAndContent()
        name, self._name = self._name, None
        return CallsAndContent([CallDelta(0, name, text)])

    def finish(self) -> CallsAndContent:
        return CallsAndContent()
