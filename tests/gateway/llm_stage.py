"""An engine client over engines that say exactly what a test wants."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cores.codec import Message, decode, encode
from cores.messages import (
    AddRequest,
    EngineCoreOutputs,
    Finished,
    FinishReason,
    RankId,
    RankLoad,
)
from cores.sampling_params import RequestOutputKind, SamplingParams
from gateway.async_llm import AsyncLLM
from gateway.config import FaultConfig
from gateway.engine_client import ModelConfig
from gateway.outputs import RequestOutput
from gateway.renderer import Renderer
from tests.gateway.core_client.fake_group import DEADLINE_S, FakeGroup

ZERO, ONE = RankId(0, 1), RankId(1, 1)
PROMPT = [5, 6, 7]
NO_FAILOVER = FaultConfig(failover=False, engine_restarts=0)


class Stage:
    """An `AsyncLLM` over a fake group."""

    def __init__(self, group: FakeGroup, model: Path) -> None:
        self.group = group
        self.outputs: list[RequestOutput] = []  # of all readers
        renderer = Renderer.from_directory(model)
        model_config = ModelConfig.of(group.config, group.client.ready_messages, {})
        self.llm = AsyncLLM(group.config, model_config, renderer, group.client, clock=group.clock)
        self.llm.output_handler.start()

    def read(self, prompt: Any = PROMPT, request_id: str = "mine", **options: Any) -> asyncio.Task[list[RequestOutput]]:
        """Reads a stream to its end, in a task."""
        n = options.pop("n", 1)
        params = SamplingParams(max_tokens=50, seed=1, n=n, ignore_eos=True, output_kind=RequestOutputKind.DELTA)

        async def run() -> list[RequestOutput]:
            got = []
            async for output in self.llm.generate(prompt, params, request_id, **options):
                got.append(output)
                self.outputs.append(output)
            return got

        return asyncio.create_task(run())

    async def add_of(self, rank: int) -> AddRequest:
        """The next command that a rank gets, which is to be a request."""
        command = await self.group.engines[rank].command()
        assert isinstance(command, AddRequest), command
        return command

    def deliver(self, *messages: Message) -> None:
        """As one poll of the output socket brings them: the loop gets no turn in between."""
        for message in messages:
            self.group.client._on_message(decode(encode(message)))

    async def until(self, condition: Callable[[], object]) -> None:
        await self.group.until(condition)

    def check_empty(self) -> None:
        assert self.llm.output_processor.num_unfinished == 0
        assert self.llm.failover.num_waiting == 0
        assert self.group.client.ledger.num_in_flight == 0
        self.llm.output_processor.check_invariants()
        self.group.client.ledger.check_invariants()


def tokens_of(rank_id: RankId, step: int, *handles: int, finished: bool = False) -> EngineCoreOutputs:
    """One token for each."""
    return EngineCoreOutputs(
        rank_id=rank_id, step=step, command_seq=0, load=RankLoad(), handles=array("I", handles),
        token_ids=array("I", [70 + step] * len(handles)),
        finished={row: Finished(FinishReason.LENGTH) for row in range(len(handles))} if finished else {},
    )  # fmt: skip


def ids_of(outputs: list[RequestOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.outputs[0].token_ids]


async def finish(task: asyncio.Task[Any]) -> Any:
    async with asyncio.timeout(DEADLINE_S):
        return await task
