"""An operator at a running server: pause, sleep, new weights, over HTTP."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import requests

from tests.e2e.conftest import ANSWER_TIMEOUT_S, SLOW_MS

BODY = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "temperature": 0, "stream": True}


class Stream:
    """A completion, read in a thread of its own."""

    def __init__(self, url: str) -> None:
        self.texts: list[str] = []
        self.finish_reason: str | None = None
        self._thread = threading.Thread(target=self._read, args=(url,), daemon=True)
        self._thread.start()

    def _read(self, url: str) -> None:
        with requests.post(url + "/v1/completions", json=BODY, stream=True, timeout=ANSWER_TIMEOUT_S) as response:
            for line in response.iter_lines():
                if line.startswith(b"data: {"):
                    choice = json.loads(line.removeprefix(b"data: "))["choices"][0]
                    self.texts.append(choice["text"])
                    self.finish_reason = choice["finish_reason"] or self.finish_reason

    def join(self) -> str:
        self._thread.join(ANSWER_TIMEOUT_S)
        assert not self._thread.is_alive()
        return "".join(self.texts)


def test_a_paused_server_is_healthy_and_not_ready_and_its_streams_go_on_as_if_nothing_had_been(
    serve: Callable[..., Any], simulated: list[str], tiny_model: str, poll: Callable[..., Any]
) -> None:
    settings = ("-dp", "2", "--shutdown-timeout", "600")
    server = serve(*simulated, *settings, env={"GATEWAY_SERVER_DEV_MODE": "1"})
    fast_ms = 2

    def post(path: str, body: Any = None) -> requests.Response:
        return requests.post(server.url + path, json=body, timeout=ANSWER_TIMEOUT_S)

    undisturbed = Stream(server.url).join()
    server.set_step_ms(SLOW_MS)
    stream = Stream(server.url)
    poll(lambda: len(stream.texts) >= 2, "the stream has begun")
    assert post("/pause?mode=keep").json() == {"status": "paused"}
    assert server.get("/is_paused").json() == {"is_paused": True}
    assert [server.get(path).status_code for path in ("/health", "/ready", "/live")] == [200, 503, 200]
    assert server.status()["state"] == "paused"
    late = post("/v1/completions", BODY)
    assert (late.status_code, late.json()["error"]["code"]) == (503, "overloaded")
    assert int(late.headers["Retry-After"]) >= 1
    halted = len(stream.texts)
    assert post("/resume").json() == {"status": "resumed"}
    server.set_step_ms(fast_ms)
    assert stream.join() == undisturbed
    assert (stream.finish_reason, halted < len(stream.texts)) == ("length", True)

    assert post("/sleep?level=2").status_code == 200
    assert server.get("/is_sleeping").json() == {"is_sleeping": True}
    assert server.status()["state"] == "sleeping"
    assert post("/resume").status_code == 400
    assert post("/wake_up?tags=weights").status_code == 200
    assert server.get("/ready").status_code == 503
    assert post("/wake_up").status_code == 200
    assert server.get("/ready").status_code == 200

    assert post("/update_weights", {"update_info": {"directory": tiny_model, "version": 7}}).json()["version"] == 7
    assert post("/update_weights", {"update_info": {"directory": "/nowhere"}}).status_code == 400
    assert [row["weight_version"] for row in server.status()["ranks"]] == [7, 7]
    assert post("/collective_rpc", {"method": "discard_weights"}).json() == {"results": [None, None]}

    # A drain does not wait for what stands still: `stop` has no patience for ten minutes.
    server.set_step_ms(SLOW_MS)
    frozen = Stream(server.url)
    poll(lambda: len(frozen.texts) >= 2, "the stream has begun")
    post("/pause?mode=keep")
    assert server.stop() == 0
    frozen.join()
    assert frozen.finish_reason == "abort"
