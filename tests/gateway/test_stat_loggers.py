"""Statistics reach everybody who wants them, and nobody who fails hurts a request."""

from __future__ import annotations

import dataclasses
import logging
import threading
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from cores.testing import ManualClock, make_tiny_model_dir
from gateway.config import GatewayConfig
from gateway.output_processor import OutputProcessor
from gateway.output_statistics import FinishedRequest, TokenTimes
from gateway.stat_loggers import LogLine, StatLogger, StatLoggers, log_line
from gateway.status import FrontEndStatus, RankStatus, StatusSnapshot, Totals
from gateway.tokenizer import Tokenizer

FINISHED = FinishedRequest("mine", "mine-1", "stop", 0, 1.0, 1.5, 2.0, 0.0, 1, 3, 0, 7, 0)
SNAPSHOT = StatusSnapshot(
    version="1", mode="AsyncMPClient", model="m", uptime_s=1.0, state="ready",
    front_ends=(FrontEndStatus(index=0, pid=1, in_flight=2),),
    ranks=(RankStatus(rank=0, epoch=1, state="ready", running=2, waiting=1, kv_cache_usage=0.25),),
    totals=Totals(prompt_tokens=100, generation_tokens=50),
)  # fmt: skip


class Memory(StatLogger):
    """Remembers what it heard."""

    def __init__(self, config: GatewayConfig, index: int) -> None:
        self.heard: list[Any] = [index]

    def on_tokens(self, times: TokenTimes) -> None:
        self.heard.append(times)

    def on_finished(self, request: FinishedRequest) -> None:
        self.heard.append(request)

    def on_interval(self, snapshot: StatusSnapshot) -> None:
        self.heard.append(snapshot)

    def close(self) -> None:
        self.heard.append("closed")


class Broken(StatLogger):
    wants_traces = True

    def on_finished(self, request: FinishedRequest) -> None:
        raise RuntimeError("no disk")

    def close(self) -> None:
        raise RuntimeError("no end")


def entry_point(name: str, value: str) -> EntryPoint:
    return EntryPoint(name, value, "gateway.stat_loggers")


@pytest.fixture
def outputs(tmp_path: Any) -> OutputProcessor:
    return OutputProcessor(Tokenizer.from_directory(make_tiny_model_dir(tmp_path / "tiny")))


@pytest.fixture
def loggers(outputs: OutputProcessor) -> StatLoggers:
    return StatLoggers(outputs)


def finish(outputs: OutputProcessor) -> None:
    assert outputs.on_finished is not None
    outputs.on_finished(FINISHED)


def test_nothing_is_collected_for_nobody(outputs: OutputProcessor, loggers: StatLoggers) -> None:
    loggers.add("log line", LogLine(ManualClock()))
    assert outputs.on_tokens is None
    assert outputs.on_finished is None
    assert not loggers.wants_traces


async def test_several_hear_everything(outputs: OutputProcessor, loggers: StatLoggers) -> None:
    memories = [Memory(GatewayConfig(), index) for index in range(2)]
    for memory in memories:
        loggers.add("memory", memory)
    times = TokenTimes(rank=0)
    assert outputs.on_tokens is not None
    outputs.on_tokens(times)
    finish(outputs)
    loggers.on_interval(SNAPSHOT)
    await loggers.close()
    assert [memory.heard for memory in memories] == [[index, times, FINISHED, SNAPSHOT, "closed"] for index in range(2)]


async def test_one_that_fails_is_named_and_the_others_hear_on(
    outputs: OutputProcessor, loggers: StatLoggers, caplog: pytest.LogCaptureFixture
) -> None:
    loggers.add("broken", Broken())
    memory = Memory(GatewayConfig(), 0)
    loggers.add("memory", memory)
    for _ in range(100):
        finish(outputs)
    await loggers.close()
    assert memory.heard == [0, *[FINISHED] * 100, "closed"]
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "stat logger 'broken' failed (1 times so far)"
    assert len(lines) == 7  # the 1st, 2nd, 4th ... 64th time: a flood does not fill the disk
    assert loggers.wants_traces


async def test_one_that_does_not_close_holds_up_nobody_for_long(
    loggers: StatLoggers, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = threading.Event()

    class Hanging(StatLogger):
        def close(self) -> None:
            never.wait()

    monkeypatch.setattr("gateway.stat_loggers.CLOSE_TIMEOUT_S", 0.05)
    loggers.add("hanging", Hanging())
    await loggers.close()
    never.set()
    assert "stat loggers 'hanging' have not closed within 0.05 s" in caplog.text


@pytest.mark.parametrize(
    ("value", "cause"),
    [
        ("gateway.no_such_module:Logger", "ModuleNotFoundError"),
        ("gateway.stat_loggers:NoSuchLogger", "AttributeError"),
        ("gateway.stat_loggers:log_line", "TypeError"),  # it takes other arguments
        ("builtins:max", "TypeError"),
    ],
)
def test_a_plugin_that_cannot_be_made_is_named_and_the_others_are_used(
    loggers: StatLoggers, caplog: pytest.LogCaptureFixture, value: str, cause: str
) -> None:
    plugins = [entry_point("bad", value), entry_point("good", "tests.gateway.stat_logger_plugin:Counter")]
    loggers.add_plugins(GatewayConfig(), 0, plugins)
    assert loggers.names == ["good"]
    (error,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "stat logger 'bad'" in error.getMessage()
    assert cause in caplog.text


def test_the_line_is_about_what_happened_since_the_last_one() -> None:
    assert log_line(None, SNAPSHOT, 10.0) == (
        "prompt 10.0 tok/s, generation 5.0 tok/s, 2 sequences in flight | rank 0: 2 running, 1 waiting, KV cache 25%"
    )
    more = dataclasses.replace(SNAPSHOT, totals=Totals(prompt_tokens=100, generation_tokens=150))
    assert (log_line(SNAPSHOT, more, 10.0) or "").startswith("prompt 0.0 tok/s, generation 10.0 tok/s")


def test_nothing_happened_is_no_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = ManualClock()
    line = LogLine(clock)
    clock.sleep(10.0)
    line.on_interval(SNAPSHOT)
    clock.sleep(10.0)
    line.on_interval(dataclasses.replace(SNAPSHOT, front_ends=()))
    assert len(caplog.records) == 1
