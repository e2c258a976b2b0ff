"""One request of a batch of sixteen fails; the others must not notice, to the last token."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import aiohttp
import pytest

from cores.runner.testing import make_tiny_llama
from tests.e2e.conftest import Server
from tests.e2e.test_load_and_faults import client_session, completion, events, start_streams

NUM_OTHERS = 15
EOS = 2


class Others:
    """Fifteen streams of so many tokens each, and what they are when nothing fails."""

    def __init__(self, server: Server, session: aiohttp.ClientSession, length: int) -> None:
        self._server = server
        self._session = session
        self._length = length
        self._streams: list[asyncio.Task[dict[str, Any]]] = []
        self._undisturbed: list[dict[str, Any]] = []

    async def run_undisturbed(self) -> None:
        await self.start()
        self._undisturbed = [await stream for stream in self._streams]

    async def start(self) -> None:
        self._streams = await start_streams(self._session, self._server.url, NUM_OTHERS, max_tokens=self._length)

    async def check(self) -> None:
        """They are still in flight, and end as if nothing had failed."""
        assert not any(stream.done() for stream in self._streams), "they were not in flight together"
        assert self._server.get("/health").status_code == 200
        ends = [await asyncio.wait_for(stream, 60) for stream in self._streams]
        assert ends == self._undisturbed
        assert {(end["reason"], end["done"]) for end in ends} == {("length", True)}
        assert self._server.get("/health").status_code == 200
        assert self._server.rank(0)["restarts"] == 0


# --- the simulated engine's fault hook --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "fields", "cause"),
    [
        # As a sampler or a grammar would say it. It is due in every request, but the others have fewer tokens.
        ("fail_request_at_token=301", {}, "simulated fault at token 301"),
        # Met in the front end: it asked for log-probabilities, and there are none.
        ("lose_logprobs_at_token=301", {"logprobs": 1}, "sent 1 tokens with log-probabilities of 0"),
    ],
)
async def test_a_fault_of_the_engine_ends_its_stream_with_an_error_event(
    serve: Callable[..., Server], simulated: list[str], fault: str, fields: dict[str, Any], cause: str
) -> None:
    server = serve(*simulated, "step_ms=5", f"fault={fault}", "--max-num-seqs", "16")
    num_events, error = 0, {}
    async with client_session() as session:
        others = Others(server, session, length=300)
        await others.run_undisturbed()
        async with completion(session, server.url, prompt="bad", max_tokens=400, **fields) as response:
            async for event in events(response):
                assert isinstance(event, dict), event
                num_events += 1
                error = event.get("error", {})
                if num_events == 150:  # half of its life: at its end the others have had half of theirs
                    await others.start()
        await others.check()
    assert num_events > 150
    assert error["code"] == "engine_generate_error"
    assert cause in error["message"]


# --- torch ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def torch_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")
    server = Server(
        str(model), "--engine", "torch", "--device", "cpu", "--dtype", "float32", "--data-parallel-backend", "mp",
        "--num-kv-blocks", "512", "--max-num-seqs", "16",
    )  # fmt: skip
    yield server
    server.stop()


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": [EOS], "min_tokens": 1, "ignore_eos": False},  # the sampler finds no token to choose
        {"structured_outputs": {"regex": "[0-9]+"}, "allowed_token_ids": [50], "ignore_eos": False},  # nor with a grammar
    ],
)
async def test_a_fault_of_sampler_or_grammar_on_torch_is_a_500(torch_server: Server, fields: dict[str, Any]) -> None:
    body = {"model": "tiny", "prompt": "bad", "max_tokens": 20, **fields}
    async with client_session() as session:
        others = Others(torch_server, session, length=200)
        await others.run_undisturbed()
        # Once alone: then its grammar is compiled, and the second fails while the others have long to go.
        for is_alone in (True, False):
            if not is_alone:
                await others.start()
            async with session.post(f"{torch_server.url}/v1/completions", json=body) as response:
                answer = await response.json()
            assert response.status == 500
            assert answer["error"]["code"] == "engine_generate_error"
            assert "leave no token to choose" in answer["error"]["message"]
        await others.check()
