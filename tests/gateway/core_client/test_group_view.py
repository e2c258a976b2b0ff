"""An endpoint as a member of its group, beside what the coordinator's own tests say."""

from __future__ import annotations

import asyncio
import logging

import pytest
import zmq

from cores.codec import decode, encode
from cores.messages import GroupLoads, MemberReport
from cores.testing import ManualClock
from gateway.config import ParallelConfig
from gateway.core_client.coordinator_link import RankRows
from gateway.core_client.group_view import FIRST_WARNING_S, GroupView

DEADLINE_S = 60.0


async def until_logged(caplog: pytest.LogCaptureFixture, count: int) -> list[str]:
    async with asyncio.timeout(DEADLINE_S):
        while len(caplog.records) < count:
            await asyncio.sleep(0)
    return [record.getMessage() for record in caplog.records]


async def test_a_coordinator_that_never_answers_is_no_silent_misconfiguration(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = ManualClock()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 0)
        port = router.bind_to_random_port("tcp://127.0.0.1")  # somebody who takes what comes and says nothing
        config = ParallelConfig(data_parallel_size=2, data_parallel_rpc_port=port)
        view = GroupView(config, context, "http://here", tuple, clock)
        view.start()
        clock.sleep(FIRST_WARNING_S)
        lines = await until_logged(caplog, 1)
        assert lines[0].startswith(
            f"the group's coordinator at tcp://127.0.0.1:{port} has not answered for 15 s: is the endpoint"
        )
        assert "--data-parallel-key-file" in lines[0]
        clock.sleep(FIRST_WARNING_S)  # 30 s, and then rarely
        assert "for 30 s" in (await until_logged(caplog, 2))[1]
        async with asyncio.timeout(DEADLINE_S):
            while not await asyncio.to_thread(router.poll, 10):
                pass
        identity, frame = router.recv_multipart()
        report = decode(frame)
        assert isinstance(report, MemberReport)
        assert report.group_size == 2
        router.send_multipart([identity, encode(GroupLoads(1, ()))])
        assert (await until_logged(caplog, 3))[2] == f"the group's coordinator at tcp://127.0.0.1:{port} answers"
        view.close()


async def test_an_endpoint_that_reports_no_more_says_so_in_its_log(caplog: pytest.LogCaptureFixture) -> None:
    def own_ranks() -> RankRows:
        raise RuntimeError("a rank is off")

    with zmq.Context() as context:
        view = GroupView(ParallelConfig(data_parallel_size=2), context, "http://here", own_ranks)
        view.start()
        async with asyncio.timeout(DEADLINE_S):
            while not caplog.records:
                await asyncio.sleep(0)
        view.close()
    assert [record.getMessage() for record in caplog.records] == ["the group hears no more of this endpoint; serving goes on"]
