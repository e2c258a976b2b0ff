"""Refusals for want of room or of a key: a line, then how many more."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.errors import OverloadedError
from gateway.server.refusal_log import INTERVAL_S, RefusalLog


def test_the_first_is_told_and_then_one_in_ten_seconds_with_the_number_of_those_between() -> None:
    log = RefusalLog()
    assert log.note(5.0) == 0
    assert [log.note(5.0 + i / 10) for i in range(40)] == [None] * 40
    assert log.note(5.0 + INTERVAL_S) == 40
    assert log.note(6.0 + INTERVAL_S) is None
    assert log.note(5.0 + 2 * INTERVAL_S) == 1


async def test_clients_that_try_again_while_an_endpoint_drains_do_not_fill_its_log(
    serve: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def refuses(_request: Any) -> None:
        raise OverloadedError("the server is draining")

    served = await serve(refuses)
    statuses = [(await served.post("/v1/completions", {"prompt": "x"}))[0] for _ in range(20)]
    assert statuses == [503] * 20
    assert [record.levelname for record in caplog.records if "is draining" in record.message].count("WARNING") == 1


async def test_a_board_with_a_wrong_key_does_not_fill_the_log_nor_hide_what_is_refused_for_want_of_room(
    serve: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def refuses(_request: Any) -> None:
        raise OverloadedError("the server is draining")

    served = await serve(refuses, api_key=("secret",))
    with caplog.at_level("INFO"):
        statuses = [(await served.get("/status", Authorization="Bearer wrong"))[0] for _ in range(20)]
        right = {"Authorization": "Bearer secret"}
        assert (await served.post("/v1/completions", {"prompt": "x"}, **right))[0] == 503
    assert statuses == [401] * 20
    lines = [record.message for record in caplog.records if "failed: " in record.message]
    assert len(lines) == 2
    assert "GET /status failed: 401" in lines[0]
    assert "is draining" in lines[1]
