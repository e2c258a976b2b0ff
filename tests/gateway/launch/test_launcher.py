"""The launcher itself: its clockwork, and its bounds beside those of the processes that it ends."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq.asyncio

from cores.codec import Message, decode, encode
from cores.control_messages import FrontEndHello, GroupOrder, GroupOrderDone, GroupState, front_end_identity
from cores.messages import RankId
from gateway import stat_loggers
from gateway.config import GatewayConfig
from gateway.launch.front_end_process import DRAIN_MARGIN_S
from gateway.launch.launcher import Launcher, StartError
from gateway.server import app
from tests.gateway.launch.fake_ranks import FakeRankLauncher, make_ready

SLACK_S = 3.0  # of a busy machine
DEADLINE_S = 60.0


async def test_a_launcher_that_looks_for_lost_nodes_no_more_ends_the_endpoint_with_the_cause() -> None:
    def broken(now: float) -> None:
        raise RuntimeError("a wheel is off")

    with tempfile.TemporaryDirectory(prefix="gw-", dir="/tmp") as directory, zmq.asyncio.Context() as context:
        launcher = Launcher(GatewayConfig(), FakeRankLauncher(), Path(directory))
        launcher._ranks.look_for_lost_nodes = broken  # type: ignore[method-assign]
        starting = asyncio.create_task(launcher.start())
        with context.socket(zmq.DEALER) as front_end:
            front_end.setsockopt(zmq.IDENTITY, front_end_identity(0))
            front_end.connect(f"ipc://{directory}/control")
            await front_end.send(encode(FrontEndHello(0, 1, "ipc://in", "ipc://out")))
            async with asyncio.timeout(DEADLINE_S):
                cause = await launcher.failure
        assert cause == "the launcher's ticker ended: RuntimeError('a wheel is off')"
        with pytest.raises(StartError, match="a wheel is off"):
            await starting
        await launcher.kill()


async def test_an_order_that_the_end_of_the_server_interrupts_is_answered() -> None:
    async def until_said(socket: zmq.asyncio.Socket, is_it: Callable[[Message], bool]) -> Message:
        async with asyncio.timeout(DEADLINE_S):
            while not is_it(message := decode((await socket.recv_multipart())[-1])):
                pass
            return message

    with tempfile.TemporaryDirectory(prefix="gw-", dir="/tmp") as directory, zmq.asyncio.Context() as context:
        launcher = Launcher(GatewayConfig(), FakeRankLauncher(), Path(directory))
        starting = asyncio.create_task(launcher.start())
        with context.socket(zmq.DEALER) as front_end, context.socket(zmq.DEALER) as rank:
            for socket, identity in ((front_end, front_end_identity(0)), (rank, RankId(0, 1).identity)):
                socket.setsockopt(zmq.IDENTITY, identity)
                socket.setsockopt(zmq.LINGER, 0)
                socket.connect(f"ipc://{directory}/control")
            await front_end.send(encode(FrontEndHello(0, 1, "ipc://in", "ipc://out")))
            await until_said(front_end, lambda said: isinstance(said, GroupState) and said.ranks[0].pid is not None)
            await rank.send(encode(make_ready(RankId(0, 1))))
            async with asyncio.timeout(DEADLINE_S):
                await starting
            await front_end.send(encode(GroupOrder(7, "restart", 0, drain_timeout_s=1000.0)))
            await until_said(front_end, lambda said: isinstance(said, GroupState) and said.ranks[0].state == "draining")
            await launcher.kill()
            done = await until_said(front_end, lambda said: isinstance(said, GroupOrderDone))
    assert done == GroupOrderDone(7, "the server ends: the order was not carried out", "conflict")


def test_a_front_end_with_a_slow_reader_and_a_slow_stat_logger_ends_by_itself_before_it_is_killed() -> None:
    assert app.STOP_TIMEOUT_S + stat_loggers.CLOSE_TIMEOUT_S + SLACK_S <= DRAIN_MARGIN_S
