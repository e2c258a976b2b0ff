"""An endpoint as a member of its group, beside what the coordinator's own tests say."""

from __future__ import annotations

import asyncio

import pytest
import zmq

from gateway.config import ParallelConfig
from gateway.core_client.coordinator_link import RankRows
from gateway.core_client.group_view import GroupView

DEADLINE_S = 60.0


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
