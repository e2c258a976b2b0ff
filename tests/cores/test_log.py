"""Lines of the log, as text and as JSON, our own and those of children."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from cores.log import PrintedLines, message_of, set_up_logging, under_name

Capture = pytest.CaptureFixture[str]
logger = logging.getLogger("gateway.test")


def objects(capsys: Capture) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_json_is_an_object_on_each_line_whatever_the_message_holds(capsys: Capture) -> None:
    set_up_logging("info", "json")
    logger.info('two lines\n and a "quote" of %s', "ü", extra={"request_id": "r-1", "rank": 3})
    logger.debug("not shown")
    try:
        raise ValueError("broken")
    except ValueError:
        logger.exception("it failed")
    first, second = objects(capsys)
    assert first.pop("time").endswith("Z")
    assert first == {
        "level": "INFO", "logger": "gateway.test", "message": 'two lines\n and a "quote" of ü', "request_id": "r-1", "rank": 3,
    }  # fmt: skip
    assert (second["level"], second["message"]) == ("ERROR", "it failed")
    assert second["traceback"].startswith("Traceback")
    assert second["traceback"].endswith("ValueError: broken")


def test_a_childs_json_gets_its_name_and_its_childs_both(capsys: Capture) -> None:
    set_up_logging("info", "json")
    logger.info("hello")
    line = capsys.readouterr().err.rstrip()
    once = under_name("rank 0", line)
    assert json.loads(once) == json.loads(line) | {"process": "rank 0"}
    twice = json.loads(under_name("endpoint 1", once))
    assert twice["process"] == "endpoint 1, rank 0"
    assert twice["message"] == message_of(line) == message_of(once) == "hello"


@pytest.mark.usefixtures("capsys")
def test_what_a_library_prints_is_text_under_its_name_or_an_object() -> None:
    set_up_logging("info", "text")
    assert under_name("rank 0", "libfoo: warning") == "[rank 0] libfoo: warning"
    set_up_logging("info", "json")
    fields = json.loads(under_name("rank 0", 'libfoo: "warning"'))
    assert (fields["process"], fields["logger"], fields["message"]) == ("rank 0", "output", 'libfoo: "warning"')


def test_a_line_that_only_begins_like_ours_is_its_own_message() -> None:
    assert message_of('{"time": "x') == '{"time": "x'
    assert message_of("plain") == "plain"


def test_text_is_the_default(capsys: Capture) -> None:
    set_up_logging()
    logger.info("hello")
    assert capsys.readouterr().err.rstrip().endswith("INFO    gateway.test: hello")


def test_what_a_library_prints_here_is_log_without_its_colours(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    printed = PrintedLines(logging.getLogger("lib"), logging.DEBUG)
    print("\x1b[33m(raylet)\x1b[0m a worker died", file=printed)
    printed.write("half ")
    printed.write("a line\n\nrest")
    assert [(record.name, record.message) for record in caplog.records] == [
        ("lib", "(raylet) a worker died"),
        ("lib", "half a line"),
    ]
