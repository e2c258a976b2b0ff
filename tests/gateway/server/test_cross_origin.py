"""Browsers ask for pages of other origins only where the operator has said so."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.config import ConfigError, ServerConfig

PAGE = "https://chat.example.com"
PREFLIGHT = {"Origin": PAGE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,x-a"}
CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize("allowed", [(PAGE, "http://localhost:3000"), ("*",)])
async def test_a_preflight_needs_no_key_and_is_answered_without_data(serve: Any, allowed: tuple[str, ...]) -> None:
    served = await serve(allowed_origins=allowed, api_key=("secret",))
    async with served.http.options(served.url + CHAT, headers=PREFLIGHT) as response:
        assert (response.status, await response.read()) == (204, b"")
        assert response.headers["Access-Control-Allow-Origin"] == PAGE
        assert response.headers["Access-Control-Allow-Headers"] == "authorization,x-a"
        assert "POST" in response.headers["Access-Control-Allow-Methods"]
        assert response.headers["Vary"] == "Origin"
    assert not served.state.metrics.answers, "it is no inference request"


async def test_answers_errors_and_streams_may_be_read_by_an_allowed_page(serve: Any) -> None:
    served = await serve(allowed_origins=(PAGE,))
    for body, status in ((BODY, 200), (BODY | {"stream": True}, 200), ({}, 400)):
        async with served.http.post(served.url + CHAT, json=body, headers={"Origin": PAGE}) as response:
            assert response.status == status
            assert response.headers["Access-Control-Allow-Origin"] == PAGE
            assert "X-Request-Id" in response.headers["Access-Control-Expose-Headers"]


@pytest.mark.parametrize("allowed", [(), ("https://other.example.com",)])
async def test_other_pages_are_told_nothing_and_an_options_request_needs_the_key(serve: Any, allowed: tuple[str, ...]) -> None:
    served = await serve(allowed_origins=allowed, api_key=("secret",))
    async with served.http.options(served.url + "/status", headers=PREFLIGHT) as response:
        assert response.status == 401
        assert "Access-Control-Allow-Origin" not in response.headers


async def test_an_options_request_that_asks_for_nothing_is_no_preflight(serve: Any) -> None:
    served = await serve(allowed_origins=("*",), api_key=("secret",))
    async with served.http.options(served.url + "/status", headers={"Origin": PAGE}) as response:
        assert response.status == 401


@pytest.mark.parametrize("origin", ["chat.example.com", "https://chat.example.com/", "https://", "null", ""])
def test_what_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match="--allowed-origins"):
        ServerConfig(allowed_origins=(origin,))
