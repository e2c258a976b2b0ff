"""The items that a response's output is made of: a message, reasoning, a function call. Pure; knows what each looks like and
which events tell of it, not how text becomes one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from gateway.outputs import PositionLogprobs
from gateway.server.answers import chat_logprobs

IN_PROGRESS, COMPLETED, INCOMPLETE, FAILED = "in_progress", "completed", "incomplete", "failed"

Event = tuple[str, dict[str, Any]]  # its type, and its fields but the number


class OutputItem:
    """Grows as long as it is the last one."""

    ID_PREFIX: ClassVar[str]
    DELTA: ClassVar[str]  # the type of the event that brings a piece of text

    def __init__(self, request_id: str, index: int) -> None:
        self.index = index
        self.id = f"{self.ID_PREFIX}_{request_id}_{index}" if index else f"{self.ID_PREFIX}_{request_id}"
        self._texts: list[str] = []

    @property
    def place(self) -> dict[str, Any]:
        """What the events of its text begin with."""
        return {"item_id": self.id, "output_index": self.index}

    def add(self, text: str) -> None:
        self._texts.append(text)

    def text(self) -> str:
        # One string again, so that a long stream is joined once.
        self._texts = ["".join(self._texts)]
        return self._texts[0]

    def document(self, status: str) -> dict[str, Any]:
        """In progress it is empty: that is how it begins."""
        raise NotImplementedError

    def opening(self) -> list[Event]:
        return [("response.output_item.added", {"output_index": self.index, "item": self.document(IN_PROGRESS)})]

    def closing(self, status: str) -> list[Event]:
        return [("response.output_item.done", {"output_index": self.index, "item": self.document(status)})]


class TextItem(OutputItem):
    """Text in its only part."""

    PART: ClassVar[str]

    @property
    def place(self) -> dict[str, Any]:
        return {**super().place, "content_index": 0}

    def part(self) -> dict[str, Any]:
        return self._part(self.text())

    def opening(self) -> list[Event]:
        return [*super().opening(), ("response.content_part.added", {**self.place, "part": self._part("")})]

    def closing(self, status: str) -> list[Event]:
        text = {name: value for name, value in self.part().items() if name in ("text", "logprobs")}
        return [
            (f"response.{self.PART}.done", {**self.place, **text}),
            ("response.content_part.done", {**self.place, "part": self.part()}),
            *super().closing(status),
        ]

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": self.PART, "text": text}

    def _content(self, status: str) -> list[dict[str, Any]]:
        return [] if status == IN_PROGRESS else [self.part()]


class MessageItem(TextItem):
    ID_PREFIX, PART, DELTA = "msg", "output_text", "response.output_text.delta"

    def __init__(self, request_id: str, index: int) -> None:
        super().__init__(request_id, index)
        self.positions: list[PositionLogprobs] = []

    def document(self, status: str) -> dict[str, Any]:
        return {"type": "message", "id": self.id, "status": status, "role": "assistant", "content": self._content(status)}

    def part(self) -> dict[str, Any]:
        return {**super().part(), "logprobs": logprobs_of(self.positions)}

    def _part(self, text: str) -> dict[str, Any]:
        return {**super()._part(text), "annotations": [], "logprobs": []}


class ReasoningItem(TextItem):
    ID_PREFIX, PART, DELTA = "rs", "reasoning_text", "response.reasoning_text.delta"

    def document(self, status: str) -> dict[str, Any]:
        return {"type": "reasoning", "id": self.id, "summary": [], "content": self._content(status), "status": status}


class CallItem(OutputItem):
    ID_PREFIX, DELTA = "fc", "response.function_call_arguments.delta"

    def __init__(self, request_id: str, index: int, name: str, call_id: str) -> None:
        super().__init__(request_id, index)
        self._name = name
        self._call_id = call_id

    def document(self, status: str) -> dict[str, Any]:
        arguments = "" if status == IN_PROGRESS else self.text()
        return {
            "type": "function_call",
            "id": self.id,
            "call_id": self._call_id,
            "name": self._name,
            "arguments": arguments,
            "status": status,
        }

    def closing(self, status: str) -> list[Event]:
        done = {**self.place, "name": self._name, "arguments": self.text()}
        return [("response.function_call_arguments.done", done), *super().closing(status)]


def logprobs_of(positions: Sequence[PositionLogprobs]) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = chat_logprobs(positions, 0, False)["content"]
    return entries
