"""A front end's next life that cannot begin. That a killed one comes back, an end-to-end test shows."""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path

import pytest

from cores.config import UNIX_SOCKETS, FrontEndAddress
from cores.control_messages import FrontEndFailed, FrontEndHello, FrontEndReady
from gateway.config import GatewayConfig
from gateway.launch.front_end_process import FIRST_BACKOFF_S, MAX_RESTARTS, ChildFrontEnd


class Lives:
    """Of a front end that has served, and cannot be started again. `outcome` is what becomes of it: the cause of the
    endpoint's end, or "goes on" when it has waited more than `num_sleeps` times."""

    def __init__(self, num_sleeps: int) -> None:
        self.delays_s: list[float] = []
        self.outcome: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._num_sleeps = num_sleeps

    async def sleep(self, delay_s: float) -> None:
        self.delays_s.append(delay_s)
        if len(self.delays_s) > self._num_sleeps:
            self.outcome.set_result("goes on")
            await asyncio.Event().wait()

    async def run(self, run_directory: Path, last_words: str | None = None, *, has_served: bool = True) -> str:
        """With `last_words` its first life here opens its sockets and says why it gives up."""

        def on_hello(_: FrontEndAddress) -> None:
            front_end.on_message(FrontEndFailed(0, last_words or ""))

        with socket.socket() as listener:
            front_end = ChildFrontEnd(
                0, GatewayConfig(), listener, run_directory, "", on_hello, self.outcome.set_result, self.sleep
            )
            if has_served:
                front_end.on_message(FrontEndReady(0, "DPLBAsyncMPClient"))
            front_end.start("ipc://control", UNIX_SOCKETS)
            if last_words is not None:
                await asyncio.sleep(0)  # now its life has begun
                front_end.on_message(FrontEndHello(0, 1, "ipc://in", "ipc://out"))
            outcome = await self.outcome
            await front_end.stop(0.0)
            return outcome


async def test_a_new_life_without_room_for_its_directory_is_tried_again_and_the_endpoint_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lives = Lives(num_sleeps=1)
    assert await lives.run(tmp_path / "gone") == "goes on"
    assert lives.delays_s == [FIRST_BACKOFF_S, 2 * FIRST_BACKOFF_S]
    assert "the ranks go on: it could not be started: [Errno 2] No such file or directory" in caplog.text


async def test_a_new_life_without_a_process_is_tried_again_and_the_endpoint_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "gone"))
    assert await Lives(num_sleeps=1).run(tmp_path) == "goes on"
    assert "the ranks go on: it could not be started: [Errno 2] No such file or directory" in caplog.text


async def test_a_front_end_that_can_never_be_started_again_ends_the_endpoint_with_the_cause(tmp_path: Path) -> None:
    outcome = await Lives(num_sleeps=MAX_RESTARTS).run(tmp_path / "gone")
    cause = "front end 0 died more than 5 times within ten minutes, the last time: it could not be started: "
    assert outcome.startswith(cause)


async def test_a_front_end_that_has_served_and_now_fails_to_start_is_tried_again_and_the_ranks_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    lives = Lives(num_sleeps=0)
    assert await lives.run(tmp_path, "restore was not done within 600 s on rank-1-1") == "goes on"
    assert lives.delays_s == [FIRST_BACKOFF_S]
    assert "front end 0 died, the ranks go on: restore was not done within 600 s on rank-1-1" in caplog.text


async def test_a_front_end_that_fails_before_it_has_ever_served_ends_the_endpoint_with_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    lives = Lives(num_sleeps=0)
    assert await lives.run(tmp_path, "there is no such model", has_served=False) == "there is no such model"
    assert lives.delays_s == []
