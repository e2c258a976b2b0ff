"""Logging of every process of the gateway: to stderr, one format, text or JSON. Called once by each program's main function.

What children write goes through their parent, which puts their name to each line (`under_name`). A child that logs JSON writes
objects, and its name becomes the field `process`; whatever else a library prints, a JSON log makes an object of it.
"""

from __future__ import annotations

import io
import json
import logging
import re
import sys
import time
from datetime import UTC, datetime

_COLOUR = re.compile("\x1b\\[[0-9;]*m")
_FIELDS = ("request_id", "rank")  # that a line may carry as `extra`
_OURS, _NAMED = '{"time": "', '{"process": "'  # what lines of our JSON begin with, before and after they were named


def is_worth_a_line(count: int) -> bool:
    """For what a broken peer can repeat without end: its 1st, 2nd, 4th, 8th time, so that a flood does not fill the disk."""
    return count & (count - 1) == 0


class JsonFormatter(logging.Formatter):
    """An object on one line: time (UTC), level, logger, message, and traceback, request_id or rank where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": _time(record.created),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields |= {name: record.__dict__[name] for name in _FIELDS if name in record.__dict__}
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str, ensure_ascii=False)


def _time(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def set_up_logging(level: str = "info", log_format: str = "text") -> None:
    logging.basicConfig(
        stream=sys.stderr,
        level=level.upper(),
        format="%(asctime)s.%(msecs)03d %(levelname)-7s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )
    if log_format == "json":
        for handler in logging.getLogger().handlers:
            handler.setFormatter(JsonFormatter())
    for chatty in ("asyncio", "aiohttp.access"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


def logs_json() -> bool:
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)


def under_name(name: str, line: str) -> str:
    """A line of a child's output as a line of our log."""
    if line.startswith(_NAMED):  # of a child of the child
        return f'{{"process": {json.dumps(name)[:-1]}, {line.removeprefix(_NAMED)}'
    if line.startswith(_OURS):
        return f'{{"process": {json.dumps(name)}, {line[1:]}'
    if logs_json():
        fields = {"process": name, "time": _time(time.time()), "level": "INFO", "logger": "output", "message": line}
        return json.dumps(fields, ensure_ascii=False)
    return f"[{name}] {line}"


class PrintedLines(io.TextIOBase):
    """In the place of a stream to which a library prints: its lines go to a logger, without their colours."""

    def __init__(self, logger: logging.Logger, level: int) -> None:
        self._logger = logger
        self._level = level
        self._rest = ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            if plain := _COLOUR.sub("", line).strip():
                self._logger.log(self._level, "%s", plain)
        return len(text)

    def writable(self) -> bool:
        return True


def message_of(line: str) -> str:
    """What a line says, without the JSON around it."""
    if line.startswith((_OURS, _NAMED)):
        try:
            return str(json.loads(line)["message"])
        except (ValueError, KeyError):
            pass
    return line
