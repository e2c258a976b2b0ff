from __future__ import annotations

import asyncio
import logging

import pytest

from cores.launch.ray_head import HeadWatch

DEADLINE_S = 60.0


async def until(caplog: pytest.LogCaptureFixture, text: str) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while text not in caplog.text:
            await asyncio.sleep(0.005)


async def test_a_head_that_goes_is_said_once_and_so_is_one_that_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    watch = HeadWatch(f"{host}:{port}", interval_s=0.01)
    server.close()
    await server.wait_closed()
    await until(caplog, f"Ray's head at {host}:{port} is gone")
    assert watch.is_gone
    server = await asyncio.start_server(lambda reader, writer: writer.close(), host, port)
    await until(caplog, "answers again")
    assert not watch.is_gone
    watch.close()
    server.close()
    assert [record.levelname for record in caplog.records if "Ray's head" in record.message] == ["CRITICAL", "INFO"]
