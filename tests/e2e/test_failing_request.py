"""One request of a batch of sixteen fails; the others must not notice, to the last token."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import aiohttp
import pytest

from cores.runner.testing import make_tiny_llama
from tests.e2e.conftest import ANSWER_TIMEOUT_S, Server, wait_for
from tests.e2e.test_load_and_faults import client_session, read_to_the_end, stream

NUM_OTHERS = 15
BAD_SEED = 4711
EOS = 2
T = TypeVar("T")


class Others:
    """Fifteen streams of so many tokens each, and what they are when nothing fails. All are there before the rank may make a
    step: they run side by side, token by token, with whatever else is sent meanwhile."""

    def __init__(self, server: Server, session: aiohttp.ClientSession, length: int) -> None:
        self._server = server
        self._session = session
        self._length = length
        self._streams: list[asyncio.Task[dict[str, Any]]] = []
        self._undisturbed: list[dict[str, Any]] = []

    async def run_undisturbed(self) -> None:
        self._undisturbed = list(await asyncio.gather(*self._read_all()))

    def _read_all(self) -> list[asyncio.Task[dict[str, Any]]]:
        return [
            asyncio.create_task(
                read_to_the_end(self._session, self._server.url, asyncio.Event(), **stream(i), max_tokens=self._length)
            )
            for i in range(NUM_OTHERS)
        ]

    async def run_beside(self, bad: Coroutine[Any, Any, T]) -> T:
        """What the bad one gave, which is to fail long before the others end."""
        with self._server.frozen():
            asking = asyncio.create_task(bad)
            self._streams = self._read_all()
            is_so_far = functools.partial(self._are_in_flight, 1 + NUM_OTHERS)
            await asyncio.to_thread(wait_for, is_so_far, "all are in flight")
        return await asyncio.wait_for(asking, ANSWER_TIMEOUT_S)

    def _are_in_flight(self, number: int) -> bool:
        return self._server.num_in_flight() == number

    async def check(self) -> None:
        """They end as if nothing had failed."""
        assert self._server.get("/health").status_code == 200
        ends = list(await asyncio.wait_for(asyncio.gather(*self._streams), ANSWER_TIMEOUT_S))
        assert ends == self._undisturbed
        assert {(end["reason"], end["done"]) for end in ends} == {("length", True)}
        assert self._server.get("/health").status_code == 200
        assert self._server.rank(0)["restarts"] == 0


# --- the simulated engine's fault hook --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "fields", "cause"),
    [
        # As a sampler or a grammar would say it.
        (f"fail_request_at_token=151@seed={BAD_SEED}", {}, "simulated fault at token 151"),
        # Met in the front end: it asked for log-probabilities, and there are none.
        (f"lose_logprobs_at_token=151@seed={BAD_SEED}", {"logprobs": 1}, "sent 1 tokens with log-probabilities of 0"),
    ],
)
async def test_a_fault_of_the_engine_ends_its_stream_with_an_error_event(
    serve: Callable[..., Server], simulated: list[str], fault: str, fields: dict[str, Any], cause: str
) -> None:
    server = serve(*simulated, f"fault={fault}", "--max-num-seqs", "16")
    async with client_session() as session:
        others = Others(server, session, length=300)
        await others.run_undisturbed()
        bad = await others.run_beside(
            read_to_the_end(session, server.url, asyncio.Event(), prompt="bad", max_tokens=300, seed=BAD_SEED, **fields)
        )
        await others.check()
    assert bad["text"]
    assert not bad["done"]
    assert bad["error"]["code"] == "engine_generate_error"
    assert cause in bad["error"]["message"]


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

        async def ask() -> tuple[int, dict[str, Any]]:
            async with session.post(f"{torch_server.url}/v1/completions", json=body) as response:
                return response.status, (await response.json())["error"]

        # Once alone: then its grammar is compiled, and the second fails while the others have long to go.
        for status, error in (await ask(), await others.run_beside(ask())):
            assert status == 500
            assert error["code"] == "engine_generate_error"
            assert "leave no token to choose" in error["message"]
        await others.check()
